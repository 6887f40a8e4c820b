"""A ladder's report as one HTML page: charts, table, facts; it loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from wavepp_worker.bench.ladder import (
    PAPER,
    RUNGS,
    LadderReport,
    facts_of,
    machine_text,
    steps_of,
    table_of,
)
from wavepp_worker.bench.svg import bar_chart, line_chart

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1360px; padding: 0 1em }
.kind { display: inline-block; padding: .1em .6em; border-radius: .3em; color: #fff }
.simulated { background: #b35900 } .measured { background: #2a6f3a }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
svg { border: 1px solid #ddd; border-radius: .4em; width: 100%; font-family: inherit }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
.failed { color: #b00020; white-space: pre-wrap } code { background: #f3f3f3; padding: .1em .3em }
"""


def ladder_page(report: LadderReport) -> str:
    """Return the page."""
    page = Element("html", lang="en")
    head = SubElement(page, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "title").text = f"wavepp ablate: {report.title}"
    SubElement(head, "style").text = STYLE
    body = SubElement(page, "body")
    SubElement(body, "h1").text = f"What each rung adds: {report.workload}"
    line = SubElement(body, "p")
    label = SubElement(line, "span", {"class": f"kind {report.kind}"})
    label.text = "SIMULATED" if report.kind == "simulated" else "measured"
    label.tail = f" {report.concurrency} clients; {machine_text(report.machine)}"
    SubElement(SubElement(body, "p"), "code").text = report.command
    for failure in report.failures:
        SubElement(body, "p", {"class": "failed"}).text = f"FAILED: {failure}"
    charts = SubElement(body, "div", {"class": "charts"})
    charts.extend(_charts(report))
    _table(body, table_of(report))
    facts = SubElement(body, "ul")
    for fact in facts_of(report):
        SubElement(facts, "li").text = fact
    rungs = SubElement(body, "ul")
    for rung in RUNGS:
        item = SubElement(rungs, "li")
        SubElement(item, "b").text = rung.name
        item[0].tail = f": {rung.adds} ({', '.join(rung.overrides())})"
    return "<!doctype html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _charts(report: LadderReport) -> list[Element]:
    rungs = report.rungs
    names = [figures.rung for figures in rungs]
    is_simulated = report.kind == "simulated"
    suffix = ", simulated" if is_simulated else ""
    charts = [
        bar_chart(
            f"Throughput{suffix}",
            "tok/s",
            names,
            {
                "served": [figures.served_tokens_per_s for figures in rungs],
                "computed": [figures.computed_tokens_per_s for figures in rungs],
            },
        ),
        bar_chart(
            f"Completion{suffix}",
            "s",
            names,
            {
                "p50": [figures.p50_s for figures in rungs],
                "p95": [figures.p95_s for figures in rungs],
            },
        ),
        line_chart(
            f"Share of requests completed within a time{suffix}",
            "%",
            "s",
            {figures.rung: _cumulative(figures.completion_s) for figures in rungs},
        ),
    ]
    if (report.workload, report.concurrency) in PAPER:
        steps = steps_of(report)
        charts.append(
            bar_chart(
                "Throughput against the rung before",
                "x",
                names,
                {
                    f"here{suffix}": [step.to_previous for step in steps],
                    "paper, 8 x B300": [step.paper_to_previous for step in steps],
                },
            )
        )
    if any(figures.busy_share is not None for figures in rungs):
        shares = [f.busy_share if f.busy_share is None else 100 * f.busy_share for f in rungs]
        charts.append(bar_chart(f"Stages busy{suffix}", "%", names, {"busy": shares}))
    causes = list(dict.fromkeys(cause for figures in rungs for cause in figures.gap_s))
    if causes:
        gaps = {cause: [figures.gap_s.get(cause) for figures in rungs] for cause in causes}
        charts.append(bar_chart("Stages stood still, all together", "s", names, gaps))
    return charts


def _cumulative(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Return the steps of the distribution of rising values, in percent."""
    points = [(0.0, 0.0)]
    for count, value in enumerate(ordered, 1):
        points += [(value, points[-1][1]), (value, 100 * count / len(ordered))]
    return points


def _table(body: Element, rows: Sequence[Sequence[str]]) -> None:
    table = SubElement(body, "table")
    for index, row in enumerate(rows):
        line = SubElement(table, "tr")
        for cell in row:
            SubElement(line, "td" if index else "th").text = cell
