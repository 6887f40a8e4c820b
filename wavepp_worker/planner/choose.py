"""From settings to a planner.  `quadratic` also needs a fitted cost, so only benchmarks make it."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from wavepp_worker.config.derive import Plan
from wavepp_worker.config.schema import Config
from wavepp_worker.planner.budget import BudgetRules, budget_ladder
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.planner.mpu import MpuPlanner, MpuSettings
from wavepp_worker.planner.ports import WavePlanner
from wavepp_worker.planner.rivals import ThrottlePlanner

PlannerKind = Literal["mpu", "greedy", "throttle"]


class PlannerSettings(Struct, frozen=True, kw_only=True):
    """Everything that a planner may depend on.

    Attributes:
        stages: P.
        wave_tokens_max, wave_tokens_min: M and b_min, tokens; multiples of `block_tokens`.
        fill_factor: F, pipeline fills kept queued, the one in the ring counted.
        spans_max: K.
        inflight: what counts of a request's chunks in the ring.
    """

    kind: PlannerKind = "mpu"
    stages: int
    block_tokens: int
    wave_tokens_max: int
    wave_tokens_min: int
    fill_factor: int = 2
    split_fraction: float = 0.125
    inflight: Literal["latest", "all"] = "latest"
    spans_max: int = 16
    lone_wait_s: float = 0.001
    emit_wait_s: float = 0.005


def planner_settings(config: Config, plan: Plan) -> PlannerSettings:
    """Return what a worker's configuration says of its planner."""
    planner = config.planner
    return PlannerSettings(
        kind=planner.kind,
        stages=len(plan.stages),
        block_tokens=plan.block_tokens,
        wave_tokens_max=plan.wave_tokens_max,
        wave_tokens_min=plan.wave_tokens_min,
        fill_factor=planner.fill_factor,
        split_fraction=planner.split_fraction_max,
        inflight=planner.inflight,
        spans_max=config.admission.batch_requests_max,
        lone_wait_s=planner.lone_wait_ms / 1e3,
        emit_wait_s=planner.emit_wait_ms / 1e3,
    )


def make_planner(settings: PlannerSettings) -> WavePlanner:
    """Return the planner that the settings name."""
    largest, smallest = settings.wave_tokens_max, settings.wave_tokens_min
    spans, block = settings.spans_max, settings.block_tokens
    if settings.kind == "greedy":
        return GreedyPlanner(largest, spans, block)
    if settings.kind == "throttle":
        return ThrottlePlanner(largest, smallest, spans, block)
    ring = 2 * settings.stages
    rules = BudgetRules(
        ladder=budget_ladder(largest, smallest, block),
        ring_waves=ring,
        supply_waves=ring + (settings.fill_factor - 1) * settings.stages,
        split_fraction=settings.split_fraction,
    )
    return MpuPlanner(
        MpuSettings(
            rules=rules,
            spans_max=spans,
            block_tokens=block,
            counts_ring=settings.inflight == "all",
            lone_wait_s=settings.lone_wait_s,
            emit_wait_s=settings.emit_wait_s,
        )
    )
