"""Draw a part of a timeline as SVG: the device of every stage, and the requests.

    python tools/draw_timeline.py trace.json timeline.svg --begin-s 12.5 --for-s 3

For documents; to look around in a trace, open it in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LEFT, WIDTH, ROW, PAD = 76, 1100, 22, 6
HAIR = 0.05  # narrower bars cannot be seen
WAVES = ("#4878a8", "#6c9bc8")  # in turn, so that neighbours can be told apart
CAUSES = {
    "send": "#d8a25e", "no header": "#e8e4da", "not installed": "#b5651d",
    "copy": "#7a9a5a", "launch": "#c9b8d8", "receive": "#d06a5a",
}  # fmt: skip
PHASES = {
    "hash": "#999999", "queue": "#e3c878", "lease": "#b5651d", "wait": "#e8e4da",
    "execution": "#5f9e8f", "handoff": "#8b6aa8",
}  # fmt: skip
Event = dict[str, Any]


class Picture:
    """Rectangles on a time axis from `begin_us`."""

    def __init__(self, begin_us: float, span_us: float) -> None:
        self._begin_us, self._scale = begin_us, (WIDTH - LEFT) / span_us
        self._parts: list[str] = []
        self._y = PAD

    def row(self, title: str, height: int = ROW) -> None:
        """Start a row below the last one."""
        self._text(4, self._y + height - 7, title)
        self._row_y, self._row_height = self._y, height - 2
        self._y += height

    def bar(self, began_us: float, ended_us: float, color: str, label: str = "") -> None:
        """Draw in the last row; what lies outside is cut off."""
        left = max(LEFT, LEFT + (began_us - self._begin_us) * self._scale)
        right = min(WIDTH, LEFT + (ended_us - self._begin_us) * self._scale)
        if right - left < HAIR:
            return
        size = f'width="{right - left:.2f}" height="{self._row_height}"'
        self._parts.append(f'<rect x="{left:.2f}" y="{self._row_y}" {size} fill="{color}"/>')
        if label and right - left > 7 * len(label):
            self._text(left + 3, self._row_y + self._row_height - 5, label)

    def axis(self, step_us: float) -> None:
        """Draw the time's axis below everything."""
        self._y += PAD
        span_us = (WIDTH - LEFT) / self._scale
        at_us = 0.0
        while at_us <= span_us:
            x = LEFT + at_us * self._scale
            line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{PAD}" y2="{self._y}"'
            self._parts.insert(0, f'<line {line} stroke="#dddddd"/>')
            self._text(x + 2, self._y + 10, f"{at_us / 1e6:g} s")
            at_us += step_us
        self._y += ROW

    def legend(self, title: str, colors: dict[str, str]) -> None:
        """Say what colors mean."""
        self._text(4, self._y + 12, title)
        x = LEFT
        for name, color in colors.items():
            where = f'x="{x}" y="{self._y + 3}" width="12" height="12"'
            self._parts.append(f'<rect {where} fill="{color}" stroke="#888888"/>')
            self._text(x + 16, self._y + 13, name)
            x += 34 + 7 * len(name)
        self._y += ROW

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{WIDTH + 10}" height="{self._y + PAD}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
        body = "\n".join(self._parts)
        back = '<rect width="100%" height="100%" fill="white"/>'
        return f'{head} font-size="11">\n{back}\n{body}\n</svg>\n'

    def _text(self, x: float, y: float, text: str) -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y}">{escape(text)}</text>')


def draw(events: list[Event], begin_us: float, span_us: float) -> str:
    """Return the picture of a part of a trace."""
    picture = Picture(begin_us, span_us)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for pid, name in sorted(names.items()):
        if not name.startswith("LOOP"):
            continue
        picture.row(name)
        for e in events:
            if e["ph"] != "X" or e["pid"] != pid or e["tid"] != 1:
                continue
            wave = e["args"].get("wave")
            color = CAUSES[e["name"]] if wave is None else WAVES[wave % 2]
            picture.bar(e["ts"], e["ts"] + e["dur"], color, "" if wave is None else str(wave))
    for rid, phases in sorted(_requests(events), key=lambda request: request[1][0][1]):
        began_us, ended_us = phases[0][1], phases[-1][2]
        if ended_us < begin_us or began_us > begin_us + span_us:
            continue
        picture.row(f"request {rid}", ROW - 6)
        for name, at_us, until_us in phases:
            picture.bar(at_us, until_us, PHASES[name])
    picture.axis(_step(span_us))
    picture.legend("gaps", CAUSES)
    picture.legend("requests", PHASES)
    return picture.svg()


def _requests(events: list[Event]) -> Iterator[tuple[int, list[tuple[str, float, float]]]]:
    """Yield (rid, phases) of every request that the serving process told to its end."""
    found: dict[tuple[int, str], list[tuple[str, float, float]]] = {}
    begun: dict[tuple[int, str, str], float] = {}
    serving = {e["pid"] for e in events if e["name"] == "process_name"
               and e["args"]["name"].startswith("serving")}  # fmt: skip
    for e in events:
        if e["ph"] not in "be" or e["pid"] not in serving or e["name"] not in PHASES:
            continue
        key = e["pid"], e["id2"]["local"]
        if e["ph"] == "b":
            begun[*key, e["name"]] = e["ts"]
        else:
            found.setdefault(key, []).append((e["name"], begun[*key, e["name"]], e["ts"]))
    for (_, local), phases in found.items():
        yield int(local, 16), phases


def _step(span_us: float) -> float:
    """Return a round distance of marks on the axis, about a tenth of it."""
    size = 1.0
    while size * 10 < span_us / 10:
        size *= 10
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= span_us / 12)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--begin-s", type=float, default=0.0)
    parser.add_argument("--for-s", type=float, default=1.0)
    args = parser.parse_args()
    events = json.loads(args.trace.read_text())["traceEvents"]
    args.picture.write_text(draw(events, 1e6 * args.begin_s, 1e6 * args.for_s))


if __name__ == "__main__":
    main()
