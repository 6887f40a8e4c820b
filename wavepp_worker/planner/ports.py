"""What the LoopMachine of rank 0 asks a planner: what the next wave contains.

The machine owns the ring and calls `plan` only for a free slot; the planner owns the lanes, that
is, the admitted requests with tokens left to schedule, in the order they were admitted.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from wavepp_worker.base.types import Instant


class WaveSlot(Struct, frozen=True):
    """A free place in the ring, and what is known when it is filled."""

    wave: int  # number of the wave to plan
    oldest_wave: int  # first wave not yet retired; equals `wave` when the ring is empty
    admitting_count: int  # requests that are being admitted now
    now: Instant = Instant(0.0)


class PlannedSpan(Struct, frozen=True):
    """Tokens [start, start + length) of one request."""

    rid: int
    start: int
    length: int


class PlannedWave(Struct, frozen=True):
    """A proposal; nothing is scheduled before `accept`."""

    budget: int  # tokens this wave could have held
    spans: tuple[PlannedSpan, ...]


class WavePlanner(Protocol):
    """Decides what waves contain.  Owned by the LoopMachine of rank 0."""

    def add_lane(
        self, rid: int, start: int, stop: int, snapshot_points: tuple[int, ...] = ()
    ) -> None:
        """Take in an admitted request whose tokens [start, stop) are to be computed.

        Args:
            snapshot_points: rising; no chunk crosses one, so that its state can be kept.
        """

    def remove_lane(self, rid: int) -> None:
        """Schedule nothing more of `rid`; no effect if all of it was scheduled."""

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return the next wave's content, or None: nothing is runnable, or it is held back.

        What is held back goes out at `next_deadline` at the latest.
        """

    def accept(self, spans: tuple[PlannedSpan, ...]) -> None:
        """Note the spans that were really emitted; only these advance their lanes.  [I35]"""

    def lane_count(self) -> int:
        """Return how many requests have tokens left to schedule."""

    def next_deadline(self) -> Instant | None:
        """Return when work that is held back must be planned again; None: nothing is."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by their metric names."""
