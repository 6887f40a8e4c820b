"""The ladder on real graphs: every rung in turn, the same prompts, a fresh start each time.

    repeat 1   naive  waves  leases  mpu
    repeat 2   naive  waves  leases  mpu      interleaved, so that a slow minute hits all of them

Sampling is greedy, so a request's first token has to be the same on every rung; that is checked.
In 16-bit types a near tie may fall either way, because rungs cut prompts at other places.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench.figures import Machine
from wavepp_worker.bench.ladder import RUNGS, LadderReport, Rung, RungFigures
from wavepp_worker.bench.serve import ServeReport, quantile
from wavepp_worker.bench.serve_run import Measured
from wavepp_worker.bench.workload import BenchPrompt, Workload

NAMED_MAX = 5  # requests that a failure names
GAP_CAUSES = {"gap": "gap", "receive wait": "receive_wait", "install wait": "install_wait"}

RunRung = Callable[[Rung, Sequence[BenchPrompt], Sequence[BenchPrompt], str], Measured]
"""(rung, warm-up, prompts, label of the progress bar) -> what was measured."""


class RungRun(Struct, frozen=True):
    """One start of one rung."""

    rung: str
    repeat: int
    measured: Measured

    @property
    def name(self) -> str:
        """How failures call it."""
        return f"{self.rung}, repeat {self.repeat}"


def climb_measured(
    workload: Workload,
    run_rung: RunRung,
    *,
    concurrency: int,
    repeats: int,
    differing_max: int,
    machine: Machine,
    command: str,
) -> LadderReport:
    """Return the ladder's report; a rung that does not run is a failure in it, not the end.

    Args:
        differing_max: first tokens of a run that may be others than those of runs before.

    Raises:
        ConfigError: no rung ran at all.
    """
    warm_up, prompts = workload.warm_up(), list(workload.prompts())
    runs: list[RungRun] = []
    failures: dict[str, str] = {}  # of rungs that did not run
    for repeat in range(1, repeats + 1):
        for rung in RUNGS:
            if rung.name in failures:
                continue
            label = f"{rung.name} {repeat}/{repeats}"
            try:
                measured = run_rung(rung, warm_up, prompts, label)
            except ConfigError as error:
                failures[rung.name] = f"{rung.name}, repeat {repeat}: {error}"
            else:
                runs.append(RungRun(rung.name, repeat, measured))
    if not runs:
        raise ConfigError("\n".join(failures.values()))
    by_rung = {rung.name: [run for run in runs if run.rung == rung.name] for rung in RUNGS}
    differing = differing_answers(runs)
    stages = max(len(run.measured.report.stage_seconds) for run in runs)
    return LadderReport(
        kind="measured",
        workload=workload.kind,
        concurrency=concurrency,
        command=command,
        machine=machine,
        rungs=tuple(_figures(name, of) for name, of in by_rung.items() if of),
        facts=(
            f"{workload.requests} prompts of {workload.prompt_tokens:,} tokens, seed "
            f"{workload.seed}, {repeats} repeats of every rung in turn, each on a fresh graph.",
            f"Gap: seconds that {stages} stages stood still, all added up; receive wait is the "
            "part in which activations were awaited (counted on CPU only); install wait: a wave "
            "was there before its request.",
            "First tokens that are not those of the runs before: "
            f"{sum(map(len, differing.values()))} of {sum(len(r.measured.answers) for r in runs)}.",
        ),
        failures=(*failures.values(), *_failed(runs), *_differing(differing, runs, differing_max)),
        details={
            "workload": workload,
            "repeats": repeats,
            "differing": differing,
            "runs": [
                {"rung": run.rung, "repeat": run.repeat, "report": run.measured.report}
                for run in runs
            ],
        },
    )


def differing_answers(runs: Sequence[RungRun]) -> dict[str, list[int]]:
    """Return, per run, the requests whose first token is not an earlier run's, or not known."""
    reference: dict[int, int] = {}
    for run in runs:
        for number, token in _first_tokens(run).items():
            if token is not None:
                reference.setdefault(number, token)
    return {
        run.name: [
            number
            for number, token in _first_tokens(run).items()
            if token is None or token != reference.get(number, token)
        ]
        for run in runs
    }


def _first_tokens(run: RungRun) -> dict[int, int | None]:
    return {
        answer.number: answer.token_ids[0] if answer.token_ids else None
        for answer in run.measured.answers
        if not answer.error
    }


def _differing(
    found: dict[str, list[int]], runs: Sequence[RungRun], differing_max: int
) -> list[str]:
    return [
        f"{name}: {_named(numbers)} of {len(runs[0].measured.answers)} did not answer with the "
        "first token of the runs before.  With 16-bit weights a near tie can do that: see "
        "whether it stays with --set Common.model.dtype=float32, or allow some with "
        "--differing-max"
        for name, numbers in found.items()
        if len(numbers) > differing_max
    ]


def _failed(runs: Sequence[RungRun]) -> list[str]:
    return [
        f"{run.name}: {run.measured.report.failed} of {run.measured.report.requests} requests "
        f"failed: {run.measured.report.errors}"
        for run in runs
        if run.measured.report.failed
    ]


def _named(numbers: Sequence[int]) -> str:
    first = ", ".join(map(str, sorted(numbers)[:NAMED_MAX]))
    more = ", ..." if len(numbers) > NAMED_MAX else ""
    return f"{len(numbers)} requests ({first}{more})"


def _figures(name: str, runs: Sequence[RungRun]) -> RungFigures:
    reports = [run.measured.report for run in runs]
    served = [report.served_tokens_per_s for report in reports]
    completion = sorted(
        answer.seconds for run in runs for answer in run.measured.answers if not answer.error
    )
    good = [report.good_hit_share for report in reports if report.good_hit_share is not None]
    return RungFigures(
        rung=name,
        served_tokens_per_s=statistics.median(served),
        computed_tokens_per_s=statistics.median(report.computed_tokens_per_s for report in reports),
        served_runs=tuple(served),
        p50_s=quantile(completion, 0.5),
        p95_s=quantile(completion, 0.95),
        good_hit_share=statistics.mean(good) if good else None,
        busy_share=_busy_share(reports),
        gap_s={
            name: sum(
                causes.get(cause, 0.0)
                for report in reports
                for causes in report.stage_seconds.values()
            )
            for name, cause in GAP_CAUSES.items()
        },
        completion_s=tuple(completion),
    )


def _busy_share(reports: Sequence[ServeReport]) -> float | None:
    """Return the share of all stages' time spent in forwards; None: no metrics pages."""
    stage_s = sum(report.seconds * len(report.stage_seconds) for report in reports)
    forward_s = sum(
        causes.get("forward", 0.0) for report in reports for causes in report.stage_seconds.values()
    )
    return min(1.0, forward_s / stage_s) if stage_s else None
