"""Greedy packing: fill every wave to its budget, oldest request first.  [algorithms 11.4]

    budget M  |lane 0: rest of it|lane 1: rest of it|lane 2: as much as fits, to a block boundary|

`mpu` adds a budget ladder and a rule against small fragments behind the same port.
"""

from __future__ import annotations

from wavepp_worker.base.errors import check
from wavepp_worker.planner.lanes import LanePlanner
from wavepp_worker.planner.ports import PlannedWave, WaveSlot


class GreedyPlanner(LanePlanner):
    """FCFS lanes, one fixed budget.

    Args:
        wave_tokens_max: M, tokens; a multiple of `block_tokens`.
    """

    def __init__(self, wave_tokens_max: int, spans_max: int, block_tokens: int) -> None:
        super().__init__(spans_max, block_tokens)
        check(
            wave_tokens_max >= block_tokens and wave_tokens_max % block_tokens == 0,
            "the wave budget is a positive multiple of the block size",
            wave_tokens_max=wave_tokens_max,
            block_tokens=block_tokens,
        )
        self._budget = wave_tokens_max

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return the fullest wave of the first K lanes, or None without lanes.  [I33]"""
        spans = self._fill(self._budget)
        return PlannedWave(self._budget, spans) if spans else None

    def stats(self) -> dict[str, float]:
        """Return gauges by their metric names."""
        return {"wavepp_planner_budget_tokens": float(self._budget)}
