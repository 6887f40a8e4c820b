"""Two published chunk rules behind our port, for comparison under equal conditions.

    throttle    gLLM: tokens per wave = waiting work / T, within [MinP, MaxP]
    quadratic   SGLang: a request's next chunk takes as long as its first one did

Written from their publications' formulas; what concerns decoding and free memory falls away in a
prefill-only worker, whose admission reserves memory ahead.
"""

from __future__ import annotations

from math import sqrt

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.planner.lanes import LanePlanner
from wavepp_worker.planner.ports import PlannedWave, WaveSlot


class ThrottlePlanner(LanePlanner):
    """Spread the waiting tokens over T waves.

    A lone request is not throttled, as in later releases of its source.

    Args:
        wave_tokens_max, wave_tokens_min: MaxP and MinP, tokens; multiples of `block_tokens`.
        iterations: T.
    """

    def __init__(
        self,
        wave_tokens_max: int,
        wave_tokens_min: int,
        spans_max: int,
        block_tokens: int,
        iterations: int = 8,
    ) -> None:
        super().__init__(spans_max, block_tokens)
        self._max, self._min, self._iterations = wave_tokens_max, wave_tokens_min, iterations
        self._budget = wave_tokens_max

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return a wave of one T-th of the waiting tokens, rounded up to a block."""
        self._budget = self._max
        if len(self._lanes) > 1:
            share = sum(lane.suffix for lane in self._lanes) // self._iterations
            share = min(max(share, self._min), self._max)
            self._budget = ceil_div(share, self._block_tokens) * self._block_tokens
        spans = self._fill(self._budget)
        return PlannedWave(self._budget, spans) if spans else None

    def stats(self) -> dict[str, float]:
        """Return gauges by their metric names."""
        return {"wavepp_planner_budget_tokens": float(self._budget)}


class PrefillCost(Struct, frozen=True):
    """Seconds to prefill x tokens behind none: a x^2 + b x + c, fitted at start; a > 0."""

    a: float
    b: float


class QuadraticPlanner(LanePlanner):
    """Size the oldest request's chunk so that it takes as long as `base_tokens` behind none.

    With L tokens done, x solves a x^2 + (2 a L + b) x = a base^2 + b base; then x moves from the
    base by the share `smooth`, stays above a quarter of it, and goes down to a block boundary.
    """

    def __init__(
        self,
        cost: PrefillCost,
        base_tokens: int,
        spans_max: int,
        block_tokens: int,
        smooth: float = 0.75,
    ) -> None:
        super().__init__(spans_max, block_tokens)
        check(cost.a > 0, "the fitted cost grows with the square of the length", a=cost.a)
        self._cost, self._base, self._smooth = cost, base_tokens, smooth

    def chunk_tokens(self, done: int) -> int:
        """Return the next chunk's length after `done` tokens; a positive multiple of B."""
        a, b, base = self._cost.a, self._cost.b, self._base
        linear = 2 * a * done + b
        target = a * base * base + b * base
        exact = (sqrt(linear * linear + 4 * a * target) - linear) / (2 * a)
        smoothed = base + self._smooth * (exact - base)
        whole = align_down(int(max(smoothed, base / 4)), self._block_tokens)
        return max(self._block_tokens, whole)

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return a wave whose budget is the oldest request's chunk; what is left is filled."""
        oldest = next(iter(self._lanes), None)
        if oldest is None:
            return None
        budget = self.chunk_tokens(oldest.scheduled)
        return PlannedWave(budget, self._fill(budget))
