"""The paper's ladder of four configurations, and what climbing it showed.

    naive ──▶ waves ──▶ leases ──▶ mpu
      │         │          │         └ waves sized so that every stage has some
      │         │          └ leases and escrows: requests in admission overlap
      │         └ admission beside the pipeline, endpoints found by index
      └ one request at a time, in the pipeline's path, two tree walks

Every rung is configuration of the same code.  Measured and simulated runs report in the same
form, so that one table and one page show either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from wavepp_worker.bench.figures import Machine


class Rung(Struct, frozen=True):
    """One configuration.

    Attributes:
        mode: `admission.mode` of a worker.
        admission: how the simulated pipeline pays for admission.
        planner: `planner.kind`, in both.
        adds: what it has that the rung before lacks.
    """

    name: str
    mode: str
    admission: str
    planner: Literal["greedy", "mpu"]
    adds: str

    def overrides(self) -> tuple[str, ...]:
        """Return what `--set` is given for the graph."""
        return (
            f"PrefillWorker.admission.mode={self.mode}",
            f"PrefillWorker.planner.kind={self.planner}",
        )


RUNGS = (
    Rung("naive", "naive", "serial", "greedy",
         "one request at a time, two tree walks, LOOP waits"),
    Rung("waves", "waves", "one", "greedy", "beside the pipeline, endpoint by index"),
    Rung("leases", "leases", "batched", "greedy", "leases and escrows, many at once"),
    Rung("mpu", "leases", "batched", "mpu", "waves sized to fill every stage"),
)  # fmt: skip

# The paper's: served input tokens per second on one node of eight B300 GPUs.
PAPER: dict[tuple[str, int], dict[str, float]] = {
    ("cold-131k", 16): {"naive": 8_826.0, "waves": 29_692.0},
    ("reuse-131k", 8): {"waves": 96_796.0, "leases": 149_021.0, "mpu": 211_214.0},
}


class RungFigures(Struct, frozen=True, kw_only=True):
    """What one rung showed, all repeats together.

    Attributes:
        served_runs: served tokens per second of every repeat; their median is the figure above.
        busy_share: of all stages, simulated runs only.
        gap_s: why stages stood still: cause -> seconds over all stages and repeats; measured only.
        completion_s: of every request, rising.
    """

    rung: str
    served_tokens_per_s: float
    computed_tokens_per_s: float
    served_runs: tuple[float, ...]
    p50_s: float
    p95_s: float
    good_hit_share: float | None = None
    busy_share: float | None = None
    waves: int | None = None
    gap_s: dict[str, float] = {}
    completion_s: tuple[float, ...] = ()


class LadderReport(Struct, frozen=True, kw_only=True):
    """Everything of one command.

    Attributes:
        facts: what a reader must know, one sentence each.
        failures: what went wrong, one sentence each; () is a success.
        details: raw material of its own kind: options, costs, single runs.
    """

    kind: Literal["measured", "simulated"]
    workload: str
    concurrency: int
    command: str
    machine: Machine
    rungs: tuple[RungFigures, ...]
    facts: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    details: dict[str, object] = {}

    @property
    def title(self) -> str:
        """What was run, and whether it was real."""
        kind = "SIMULATED pipeline" if self.kind == "simulated" else "Measured"
        return f"{kind}: {self.workload}, {self.concurrency} clients"


class Step(Struct, frozen=True):
    """A rung's throughput against others; None: there is nothing to compare with.

    Attributes:
        paper_to_previous: the paper's ratio of the same two rungs.
    """

    rung: str
    to_first: float | None
    to_previous: float | None
    paper_to_first: float | None = None
    paper_to_previous: float | None = None


def steps_of(report: LadderReport) -> list[Step]:
    """Return one step per rung of the ladder that was measured.

    Ratios are to `naive` and to the rung right below, never to another one that happens to be
    there: with a rung missing, its neighbour has nothing to be compared with.
    """
    served = {figures.rung: figures.served_tokens_per_s for figures in report.rungs}
    paper = PAPER.get((report.workload, report.concurrency), {})
    names = [rung.name for rung in RUNGS]
    below = dict(zip(names[1:], names, strict=False))
    return [
        Step(
            name,
            _ratio(served, name, names[0]),
            _ratio(served, name, below.get(name)),
            _ratio(paper, name, names[0]),
            _ratio(paper, name, below.get(name)),
        )
        for name in names
        if name in served
    ]


def _ratio(values: dict[str, float], name: str, base: str | None) -> float | None:
    if base is None or name not in values or base not in values:
        return None
    return values[name] / values[base]


def render(report: LadderReport) -> str:
    """Return the report as text for a terminal."""
    lines = [report.title, machine_text(report.machine), "", *_aligned(table_of(report)), ""]
    lines += facts_of(report)
    lines += [f"FAILED: {failure}" for failure in report.failures]
    return "\n".join(lines)


def machine_text(machine: Machine) -> str:
    """Return one line about the machine."""
    return (
        f"{machine.cpus} cores, {machine.cpu_model}, {machine.python}, "
        f"load average {machine.load_average:.1f}"
    )


def facts_of(report: LadderReport) -> list[str]:
    """Return what a reader must know, the paper's own figures included."""
    paper = PAPER.get((report.workload, report.concurrency), {})
    if not paper:
        return list(report.facts)
    values = ", ".join(f"{name} {value:,.0f}" for name, value in paper.items())
    return [*report.facts, f"The paper's served tok/s, on eight B300 GPUs: {values}."]


def table_of(report: LadderReport) -> list[list[str]]:
    """Return head and rows; a column is there if the run has figures for it."""
    has_good = any(figures.good_hit_share is not None for figures in report.rungs)
    has_busy = any(figures.busy_share is not None for figures in report.rungs)
    has_paper = (report.workload, report.concurrency) in PAPER
    causes = list(dict.fromkeys(cause for f in report.rungs for cause in f.gap_s))
    heads = ["rung", "served tok/s", "computed tok/s", "p50 s", "p95 s"]
    heads += ["good hits"] * has_good + ["busy"] * has_busy
    heads += [f"{cause} s" for cause in causes] + ["x naive", "x before"]
    heads += ["paper x naive", "paper x before"] * has_paper
    rows = [heads]
    for figures, step in zip(report.rungs, steps_of(report), strict=True):
        row = [
            figures.rung,
            f"{figures.served_tokens_per_s:,.0f}",
            f"{figures.computed_tokens_per_s:,.0f}",
            f"{figures.p50_s:.3f}",
            f"{figures.p95_s:.3f}",
        ]
        row += [share_text(figures.good_hit_share)] * has_good
        row += [share_text(figures.busy_share)] * has_busy
        row += [f"{figures.gap_s.get(cause, 0.0):.2f}" for cause in causes]
        row += [ratio_text(step.to_first), ratio_text(step.to_previous)]
        if has_paper:
            row += [ratio_text(step.paper_to_first), ratio_text(step.paper_to_previous)]
        rows.append(row)
    return rows


def ratio_text(ratio: float | None) -> str:
    """Return a ratio for a table."""
    return "-" if ratio is None else f"{ratio:.2f}x"


def share_text(share: float | None) -> str:
    """Return a share for a table."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
