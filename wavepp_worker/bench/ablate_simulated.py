"""The ladder in a simulated pipeline: real planners, measured costs, a formula for stages.

    naive    serial: LOOP waits while two walks, two agreements and the allocation are done
    waves    one after another beside the pipeline: probe, agree, pin and allocate, agree
    leases   batched: waiting for agreements overlaps between requests
    mpu      batched, and the MPU planner

Nothing here is chosen to meet the paper's figures: the stage's constants come from a device, the
host costs from this machine, the length of a round from `wavepp bench admission`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from msgspec import Struct

from wavepp_worker.bench.figures import Machine
from wavepp_worker.bench.host_costs import HostCosts
from wavepp_worker.bench.ladder import RUNGS, LadderReport, Rung, RungFigures
from wavepp_worker.bench.planners import (
    GRID,
    REQUESTS_MIN,
    REQUESTS_PER_CLIENT,
    Load,
    PlannerOptions,
    planner_of,
)
from wavepp_worker.bench.serve import quantile
from wavepp_worker.sim.pipeline import Admission, StageTime, run_closed_loop

# One stage of eight of a 70B-class model on an H200: docs/results, `wavepp bench stage`.
H200_STAGE = StageTime(fixed_s=1.6e-3, linear_s=26.1e-6, square_s=934e-12)
# Median discovery of one arrival between two ranks with a core each: docs/results/admission.md.
ROUND_S = 0.78e-3
ROUNDS_PER_ADMISSION = 2  # one to agree on the candidate, one to agree that all ranks have it
LOADS = {load.name: load for load in GRID}


class SimulatedOptions(Struct, frozen=True, kw_only=True):
    """What to simulate.

    Attributes:
        pipeline: stages, waves, stage time and hop; its own admission time is not used.
        round_s: one agreement between the ranks.
        requests: None: enough that start and end of a run weigh little.
    """

    workload: str
    concurrency: int
    pipeline: PlannerOptions
    round_s: float = ROUND_S
    requests: int | None = None

    @property
    def load(self) -> Load:
        """The workload by its name."""
        return LOADS[self.workload]

    @property
    def request_count(self) -> int:
        """Requests of one run."""
        return self.requests or max(REQUESTS_MIN, REQUESTS_PER_CLIENT * self.concurrency)


def climb_simulated(
    options: SimulatedOptions,
    costs: HostCosts,
    machine: Machine,
    command: str,
    note: Callable[[str], None],
) -> LadderReport:
    """Return the ladder's report; deterministic, given the costs."""
    rungs = []
    for rung in RUNGS:
        note(f"{rung.name}: {rung.adds}")
        rungs.append(_run(options, costs, rung))
    return LadderReport(
        kind="simulated",
        workload=options.workload,
        concurrency=options.concurrency,
        command=command,
        machine=machine,
        rungs=tuple(rungs),
        facts=(*_facts(options, costs), *_busy_machine(costs, machine)),
        details={"options": options, "costs": costs.by_mode, "cost_points": costs.points},
    )


def admission_of(rung: Rung, options: SimulatedOptions, costs: HostCosts) -> Admission:
    """Return how a rung pays for admission."""
    cost = costs.by_mode[rung.mode]
    return Admission(
        kind=rung.admission,
        latency_s=ROUNDS_PER_ADMISSION * options.round_s,
        fixed_s=cost.fixed_s,
        token_s=cost.token_s,
        computed_token_s=cost.computed_token_s,
        wave_tokens=options.pipeline.wave_tokens_max,
    )


def _run(options: SimulatedOptions, costs: HostCosts, rung: Rung) -> RungFigures:
    pipeline = options.pipeline
    run = run_closed_loop(
        planner_of(rung.planner, pipeline),
        islice(options.load.prompts(pipeline.block_tokens), options.request_count),
        stages=pipeline.stages,
        time=pipeline.time,
        concurrency=options.concurrency,
        hop_s=pipeline.hop_s,
        admission=admission_of(rung, options, costs),
    )
    completion = tuple(sorted(run.latency_s))
    served = run.prompt_tokens / run.seconds
    return RungFigures(
        rung=rung.name,
        served_tokens_per_s=served,
        computed_tokens_per_s=run.computed_tokens / run.seconds,
        served_runs=(served,),
        p50_s=quantile(completion, 0.5),
        p95_s=quantile(completion, 0.95),
        busy_share=run.busy_share,
        waves=run.waves,
        completion_s=completion,
    )


def _busy_machine(costs: HostCosts, machine: Machine) -> Iterator[str]:
    if costs.points and machine.load_average > machine.cpus:
        yield (
            f"This machine was busy (load average {machine.load_average:.1f} on {machine.cpus} "
            "cores) while the work was measured: it is too high by about that factor."
        )


def _facts(options: SimulatedOptions, costs: HostCosts) -> tuple[str, ...]:
    pipeline, load = options.pipeline, options.load
    time = pipeline.time
    *_, prompt = islice(load.prompts(pipeline.block_tokens), 2)  # of a mixed load: the reused one
    works = {
        rung.mode: f"{rung.mode} {1e3 * admission_of(rung, options, costs).work_s(prompt):.2f} ms"
        for rung in RUNGS
    }
    source = "measured on this machine" if costs.points else "as given"
    return (
        "Simulated: production planners, a formula for stages, no model and no GPU ran here.",
        f"{pipeline.stages} stages; a wave takes {1e3 * time.fixed_s:.2f} ms + "
        f"{1e6 * time.linear_s:.1f} µs per token + {1e12 * time.square_s:.0f} ps per token and "
        f"token of context; waves of {pipeline.wave_tokens_min:,} to "
        f"{pipeline.wave_tokens_max:,} tokens.",
        f"A rank's work to admit one prompt, {source}: {', '.join(works.values())}; "
        f"and {ROUNDS_PER_ADMISSION} rounds of {1e3 * options.round_s:.2f} ms.",
        "No constant here was chosen to meet the paper's ratios.",
    )
