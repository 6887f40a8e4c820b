"""Greedy packing: fill every wave to its budget, oldest request first.  [algorithms 11.4]

    budget M  |lane 0: rest of it|lane 1: rest of it|lane 2: as much as fits, to a block boundary|

The MPU planner adds a budget ladder and a rule against small fragments behind the same port.
"""

from __future__ import annotations

from itertools import islice

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import align_down
from wavepp_worker.planner.ports import PlannedSpan, PlannedWave, WaveSlot


class GreedyPlanner:
    """FCFS lanes, one fixed budget.

    Args:
        wave_tokens_max: M, tokens; a multiple of `block_tokens`.
        spans_max: K, spans in one wave and lanes looked at.
        block_tokens: B; every end but a request's last is a multiple of it.  [I34]
    """

    def __init__(self, wave_tokens_max: int, spans_max: int, block_tokens: int) -> None:
        check(
            wave_tokens_max >= block_tokens and wave_tokens_max % block_tokens == 0,
            "the wave budget is a positive multiple of the block size",
            wave_tokens_max=wave_tokens_max,
            block_tokens=block_tokens,
        )
        self._budget = wave_tokens_max
        self._spans_max = spans_max
        self._block_tokens = block_tokens
        # rid -> [scheduled, stop); a dict keeps the order of admission.
        self._lanes: dict[int, tuple[int, int]] = {}

    def add_lane(self, rid: int, start: int, stop: int) -> None:
        """Take in an admitted request; `start` is its endpoint, a multiple of `block_tokens`."""
        check(rid not in self._lanes, "a lane is added once", rid=rid)
        check(0 <= start < stop, "a lane has tokens to run", rid=rid, start=start, stop=stop)
        check(start % self._block_tokens == 0, "a lane starts on a block", rid=rid, start=start)
        self._lanes[rid] = (start, stop)

    def remove_lane(self, rid: int) -> None:
        """Forget a cancelled request; no effect if all of it was scheduled."""
        self._lanes.pop(rid, None)

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return the fullest wave of the first K lanes, or None without lanes.  [I33]"""
        spans: list[PlannedSpan] = []
        left = self._budget
        for rid, (start, stop) in islice(self._lanes.items(), self._spans_max):
            take = stop - start
            if take > left:
                take = align_down(left, self._block_tokens)
            if take > 0:
                spans.append(PlannedSpan(rid, start, take))
                left -= take
            if left == 0:
                break
        return PlannedWave(self._budget, tuple(spans)) if spans else None

    def accept(self, spans: tuple[PlannedSpan, ...]) -> None:
        """Advance the lanes of emitted spans; a lane that is completely scheduled ends."""
        for span in spans:
            scheduled, stop = self._lanes[span.rid]
            check(scheduled == span.start, "spans of a request are contiguous", rid=span.rid)
            end = span.start + span.length
            check(scheduled < end <= stop, "a span stays inside its request", rid=span.rid)
            if end == stop:
                del self._lanes[span.rid]
            else:
                self._lanes[span.rid] = (end, stop)

    def lane_count(self) -> int:
        """Return how many requests have tokens left to schedule."""
        return len(self._lanes)
