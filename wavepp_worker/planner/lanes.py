"""The admitted requests with tokens left to schedule, in the order of their admission.

`LanePlanner` is what all planners share; how large a wave is and what goes in is their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.base.units import align_down
from wavepp_worker.planner.ports import PlannedSpan


class Lane(Struct):
    """One request: tokens [scheduled, stop) are not scheduled yet."""

    rid: int
    scheduled: int
    stop: int
    snapshot_points: tuple[int, ...]

    @property
    def suffix(self) -> int:
        """Tokens left to schedule."""
        return self.stop - self.scheduled

    def chunk(self, left: int, block_tokens: int) -> tuple[int, bool]:
        """Return (tokens that fit into `left`, whether a snapshot point cut them short).

        A chunk that is not the last of its request ends on a block, and never beyond the next
        snapshot point: the state after exactly that token is kept.  [algorithms 11.4, I34]
        """
        fits = min(self.suffix, left)
        index = bisect_right(self.snapshot_points, self.scheduled)
        if index < len(self.snapshot_points):
            to_point = self.snapshot_points[index] - self.scheduled
            if to_point <= fits:
                return to_point, to_point < self.suffix
        if fits < self.suffix:
            fits = align_down(self.scheduled + fits, block_tokens) - self.scheduled
        return fits, False


class Lanes:
    """FCFS lanes; which of them a wave takes is the planner's decision."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._lanes: dict[int, Lane] = {}  # a dict keeps the order of admission
        self.added_total = 0

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def first(self, count: int) -> Iterator[Lane]:
        """Yield the oldest `count` lanes."""
        return islice(self._lanes.values(), count)

    def add(self, rid: int, start: int, stop: int, snapshot_points: Sequence[int]) -> None:
        """Append an admitted request; `start` is its endpoint, a multiple of the block size."""
        check(rid not in self._lanes, "a lane is added once", rid=rid)
        check(0 <= start < stop, "a lane has tokens to run", rid=rid, start=start, stop=stop)
        check(start % self._block_tokens == 0, "a lane starts on a block", rid=rid, start=start)
        self._lanes[rid] = Lane(rid, start, stop, tuple(snapshot_points))
        self.added_total += 1

    def remove(self, rid: int) -> None:
        """Forget a cancelled request; no effect if all of it was scheduled."""
        self._lanes.pop(rid, None)

    def accept(self, spans: Sequence[PlannedSpan]) -> None:
        """Advance the lanes of emitted spans; one that is completely scheduled ends.  [I35]"""
        for span in spans:
            lane = self._lanes[span.rid]
            check(lane.scheduled == span.start, "spans of a request are contiguous", rid=span.rid)
            end = span.start + span.length
            check(span.start < end <= lane.stop, "a span stays inside its request", rid=span.rid)
            if end == lane.stop:
                del self._lanes[span.rid]
            else:
                lane.scheduled = end


class LanePlanner:
    """The bookkeeping half of `ports.WavePlanner`.

    Args:
        spans_max: K, spans in one wave and lanes looked at.
        block_tokens: B; every end but a request's last is a multiple of it.  [I34]
    """

    def __init__(self, spans_max: int, block_tokens: int) -> None:
        self._spans_max = spans_max
        self._block_tokens = block_tokens
        self._lanes = Lanes(block_tokens)

    def add_lane(
        self, rid: int, start: int, stop: int, snapshot_points: tuple[int, ...] = ()
    ) -> None:
        """Take in an admitted request; `start` is its endpoint, a multiple of `block_tokens`."""
        self._lanes.add(rid, start, stop, snapshot_points)

    def remove_lane(self, rid: int) -> None:
        """Forget a cancelled request; no effect if all of it was scheduled."""
        self._lanes.remove(rid)

    def accept(self, spans: tuple[PlannedSpan, ...]) -> None:
        """Advance the lanes of emitted spans; a lane that is completely scheduled ends."""
        self._lanes.accept(spans)

    def lane_count(self) -> int:
        """Return how many requests have tokens left to schedule."""
        return len(self._lanes)

    def next_deadline(self) -> Instant | None:
        """Return None: nothing is held back."""
        return None

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by their metric names."""
        return {}

    def _fill(self, budget: int) -> tuple[PlannedSpan, ...]:
        """Return spans of the oldest K lanes, `budget` tokens at most; () without lanes."""
        spans: list[PlannedSpan] = []
        left = budget
        for lane in self._lanes.first(self._spans_max):
            take, _ = lane.chunk(left, self._block_tokens)
            if take > 0:
                spans.append(PlannedSpan(lane.rid, lane.scheduled, take))
                left -= take
            if left == 0:
                break
        return tuple(spans)
