"""Bar and line charts as SVG elements: what a report needs, and no library for it.

Charts are built as trees, so that no text can break out of its element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from xml.etree.ElementTree import Element, SubElement

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2")
WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 34, 58
TICKS = 5


def bar_chart(
    title: str, unit: str, names: Sequence[str], series: Mapping[str, Sequence[float | None]]
) -> Element:
    """Return groups of bars, one group per name, one bar in it per series.

    Args:
        series: name -> one value per group; None leaves its place empty.
    """
    top = _round_up(max((v for vs in series.values() for v in vs if v is not None), default=0.0))
    chart = _frame(title, unit, top)
    group = (WIDTH - LEFT - RIGHT) / len(names)
    bar = 0.8 * group / len(series)
    for index, name in enumerate(names):
        middle = LEFT + group * (index + 0.5)
        _text(chart, middle, HEIGHT - BOTTOM + 18, name)
        for number, values in enumerate(series.values()):
            value = values[index]
            if value is None:
                continue
            x = middle - 0.4 * group + number * bar
            y = _y(value, top)
            SubElement(
                chart,
                "rect",
                x=_n(x),
                y=_n(y),
                width=_n(0.92 * bar),
                height=_n(HEIGHT - BOTTOM - y),
                fill=COLOURS[number % len(COLOURS)],
            )
            _text(chart, x + 0.46 * bar, y - 4, number_text(value), size=10)
    _legend(chart, list(series))
    return chart


def line_chart(
    title: str, unit: str, x_unit: str, series: Mapping[str, Sequence[tuple[float, float]]]
) -> Element:
    """Return one line per series, through its (x, y) points; both axes begin at 0."""
    points = [point for line in series.values() for point in line]
    x_max = _round_up(max((x for x, _ in points), default=0.0))
    y_max = _round_up(max((y for _, y in points), default=0.0))
    chart = _frame(title, unit, y_max)
    for tick in range(TICKS + 1):
        value = x_max * tick / TICKS
        x = LEFT + (WIDTH - LEFT - RIGHT) * tick / TICKS
        _text(chart, x, HEIGHT - BOTTOM + 18, number_text(value), size=11)
    _text(chart, WIDTH - RIGHT, HEIGHT - BOTTOM + 32, x_unit, size=11, anchor="end")
    for number, line in enumerate(series.values()):
        at = [
            f"{_n(LEFT + (WIDTH - LEFT - RIGHT) * x / x_max)},{_n(_y(y, y_max))}" for x, y in line
        ]
        SubElement(
            chart,
            "polyline",
            {"points": " ".join(at), "stroke-width": "2"},
            fill="none",
            stroke=COLOURS[number % len(COLOURS)],
        )
    _legend(chart, list(series))
    return chart


def number_text(value: float) -> str:
    """Return a number with three digits that count, thousands apart."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - floor(log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _frame(title: str, unit: str, top: float) -> Element:
    chart = Element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    SubElement(chart, "title").text = title
    _text(chart, LEFT, 18, title, size=14, anchor="start", weight="bold")
    _text(chart, LEFT - 8, TOP - 4, unit, size=11, anchor="end")
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = _y(value, top)
        SubElement(
            chart, "line", x1=_n(LEFT), x2=_n(WIDTH - RIGHT), y1=_n(y), y2=_n(y), stroke="#ddd"
        )
        _text(chart, LEFT - 8, y + 4, number_text(value), size=11, anchor="end")
    return chart


def _legend(chart: Element, names: Sequence[str]) -> None:
    if len(names) < 2:
        return
    step = (WIDTH - LEFT - RIGHT) / len(names)
    for number, name in enumerate(names):
        x, y = LEFT + number * step, HEIGHT - 14
        colour = COLOURS[number % len(COLOURS)]
        SubElement(chart, "rect", x=_n(x), y=_n(y - 9), width="10", height="10", fill=colour)
        _text(chart, x + 15, y, name, size=12, anchor="start")


def _text(
    chart: Element,
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    anchor: str = "middle",
    weight: str = "normal",
) -> None:
    names = {"text-anchor": anchor, "font-size": str(size), "font-weight": weight}
    SubElement(chart, "text", names, x=_n(x), y=_n(y)).text = text


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top


def _round_up(value: float) -> float:
    """Return the end of an axis: 1, 2, 2.5 or 5 times a power of ten, not below `value`."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value)


def _n(value: float) -> str:
    return f"{value:.1f}"
