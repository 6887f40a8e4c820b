"""`wavepp bench planners`: how busy a simulated pipeline is under each planner.

    for every workload and concurrency: greedy, mpu, gLLM's throttle, SGLang's quadratic rule

The planners are the production ones behind one port; the stages are a formula,

    time of a wave = fixed + linear * tokens + square * tokens * context,

with constants that `wavepp bench stage` fits on a device.  Nothing else differs between the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from msgspec import Struct

from wavepp_worker.base.units import align_down
from wavepp_worker.planner.choose import PlannerSettings, make_planner
from wavepp_worker.planner.ports import WavePlanner
from wavepp_worker.planner.rivals import PrefillCost, QuadraticPlanner
from wavepp_worker.sim.pipeline import Admission, Prompt, StageTime, run_closed_loop

PLANNERS = ("greedy", "mpu", "throttle", "quadratic")
REQUESTS_PER_CLIENT = 8  # so that start and end of a run weigh little
REQUESTS_MIN = 32


class Load(Struct, frozen=True):
    """A workload of the paper's grid: prompt length and the part that is cached."""

    name: str
    tokens: int
    reuse_share: float = 0.0
    is_mixed: bool = False  # every second prompt is cold

    def prompts(self, block_tokens: int) -> Iterator[Prompt]:
        """Yield prompts without end."""
        endpoint = align_down(int(self.tokens * self.reuse_share), block_tokens)
        number = 0
        while True:
            is_cold = self.is_mixed and number % 2 == 0
            yield Prompt(self.tokens, 0 if is_cold else endpoint)
            number += 1


GRID = (
    Load("cold-65k", 65_536),
    Load("cold-131k", 131_072),
    Load("cold-262k", 262_144),
    Load("reuse-131k", 131_072, 0.9),
    Load("reuse-262k", 262_144, 0.9),
    Load("mixed-131k", 131_072, 0.9, is_mixed=True),
)


class PlannerOptions(Struct, frozen=True, kw_only=True):
    """What to compare."""

    stages: int = 8
    block_tokens: int = 64
    wave_tokens_max: int = 16_384
    wave_tokens_min: int = 8_192
    spans_max: int = 16
    concurrencies: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    admission_s: float = 0.005
    hop_s: float = 0.000_5
    inflight: Literal["latest", "all"] = "latest"
    time: StageTime


class PlannerCell(Struct, frozen=True):
    """One run."""

    load: str
    concurrency: int
    planner: str
    busy_share: float
    tokens_per_s: float
    p50_s: float
    waves: int


def compare(options: PlannerOptions, note: Callable[[str], None]) -> list[PlannerCell]:
    """Return one cell per workload, concurrency and planner; deterministic."""
    cells = []
    for load in GRID:
        note(load.name)
        for concurrency in options.concurrencies:
            count = max(REQUESTS_MIN, REQUESTS_PER_CLIENT * concurrency)
            for name in PLANNERS:
                run = run_closed_loop(
                    planner_of(name, options),
                    islice(load.prompts(options.block_tokens), count),
                    stages=options.stages,
                    time=options.time,
                    concurrency=concurrency,
                    hop_s=options.hop_s,
                    admission=Admission(latency_s=options.admission_s),
                )
                latency = sorted(run.latency_s)
                cells.append(
                    PlannerCell(
                        load=load.name,
                        concurrency=concurrency,
                        planner=name,
                        busy_share=run.busy_share,
                        tokens_per_s=run.prompt_tokens / run.seconds,
                        p50_s=latency[len(latency) // 2],
                        waves=run.waves,
                    )
                )
    return cells


def planner_of(name: str, options: PlannerOptions) -> WavePlanner:
    """Return a fresh planner of that name."""
    if name == "quadratic":
        # A lone prompt of x tokens attends x / 2 tokens on average.
        cost = PrefillCost(options.time.square_s / 2, options.time.linear_s)
        return QuadraticPlanner(
            cost, options.wave_tokens_max, options.spans_max, options.block_tokens
        )
    return make_planner(
        PlannerSettings(
            kind=name,  # type: ignore[arg-type]
            stages=options.stages,
            block_tokens=options.block_tokens,
            wave_tokens_max=options.wave_tokens_max,
            wave_tokens_min=options.wave_tokens_min,
            spans_max=options.spans_max,
            inflight=options.inflight,
        )
    )


def render(cells: list[PlannerCell]) -> str:
    """Return a table: share of stage time spent busy, and throughput against greedy."""
    lines = [f"{'workload':11} {'c':>3}  " + "  ".join(f"{name:>15}" for name in PLANNERS)]
    by_key = {(c.load, c.concurrency, c.planner): c for c in cells}
    for load, concurrency in dict.fromkeys((c.load, c.concurrency) for c in cells):
        greedy = by_key[load, concurrency, "greedy"]
        row = []
        for name in PLANNERS:
            cell = by_key[load, concurrency, name]
            ratio = cell.tokens_per_s / greedy.tokens_per_s
            row.append(f"{100 * cell.busy_share:5.1f} % ({ratio:4.2f}x)")
        lines.append(f"{load:11} {concurrency:3}  " + "  ".join(f"{text:>15}" for text in row))
    lines.append("busy share of all stages (throughput relative to greedy); simulated stages")
    return "\n".join(lines)
