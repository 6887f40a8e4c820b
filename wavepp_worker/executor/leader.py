"""Rank 0's part of the LoopMachine: which waves exist, and the answers they bring.

    lanes (planner) ──plan──▶ WaveHeader ──ring slot──▶ ... ──WaveResult──▶ retired, Finished

Emission never waits for a follower: a wave that names a request which a follower has not
installed yet waits there.  A cancelled request's waves run and retire like all others.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.base.errors import DeviceError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.executor.asking import Asking
from wavepp_worker.executor.ring import Ring
from wavepp_worker.planner.ports import PlannedSpan, WavePlanner, WaveSlot
from wavepp_worker.wire.mailbox import Drop, Finished, Install, Timeline
from wavepp_worker.wire.waves import (
    SPAN_FIRST,
    SPAN_LAST,
    SPAN_SNAPSHOT,
    Release,
    SpanEntry,
    WaveHeader,
    WaveResult,
)


class _Due(Struct):
    """A request whose first token is not known yet."""

    ino: int
    endpoint: int
    prompt_tokens: int
    announced_at: float
    admitted_at: float
    leased_at: float
    attempts: int
    snapshot_points: frozenset[int]
    scheduled_at: float = 0.0


class WaveLeader:
    """Plans and retires waves.

    Args:
        epoch: stamped on every message.
        asking: where requests are not admitted ahead; else None.
    """

    def __init__(
        self, epoch: int, planner: WavePlanner, ring: Ring, asking: Asking | None = None
    ) -> None:
        self._epoch = epoch
        self._planner = planner
        self._ring = ring
        # Requests whose first token is due.  Apart from the stage's books, because this rank's own
        # hold may end, and its slots be freed, before the result arrives.
        self._unanswered: dict[int, _Due] = {}
        self.asking = asking
        self.admitting_count = 0
        self._wave_tokens = 0  # of emitted waves
        self._wave_budget_tokens = 0  # what these could have held

    @property
    def is_idle(self) -> bool:
        """Whether nothing is scheduled, under way or due."""
        return not self._unanswered and self._ring.count == 0 and not self._planner.lane_count()

    def install(self, install: Install, now: Instant) -> None:
        """Take in an admitted request; it may be scheduled at once, whatever followers know."""
        if self.asking is not None:
            self.asking.answer(now, is_refused=False)
        self._unanswered[install.rid] = _Due(
            install.ino,
            install.endpoint,
            install.prompt_tokens,
            install.announced_at,
            install.admitted_at,
            install.leased_at,
            install.attempts,
            frozenset(install.snapshot_points),
        )
        self._planner.add_lane(
            install.rid, install.endpoint, install.prompt_tokens, install.snapshot_points
        )

    def drop(self, drop: Drop) -> Release:
        """Schedule nothing more of a cancelled request; return what every rank must be told.

        Sent even if all of it was emitted or this rank has freed it: other ranks may hold it.
        """
        self._planner.remove_lane(drop.rid)
        self._unanswered.pop(drop.rid, None)
        return Release(epoch=self._epoch, rid=drop.rid, ino=drop.ino)

    def plan(self, now: Instant) -> WaveHeader | None:
        """Return the next wave, or None: no slot is free or nothing is runnable."""
        ring, asking = self._ring, self.asking
        if not ring.has_room or (asking is not None and asking.is_waiting):
            return None
        planned = self._planner.plan(
            WaveSlot(ring.next_wave, ring.oldest_wave, self.admitting_count, now)
        )
        if asking is not None and asking.must_ask(planned, now):
            return None
        if planned is None:
            return None
        self._planner.accept(planned.spans)
        tokens = sum(span.length for span in planned.spans)
        check(0 < tokens <= planned.budget, "a wave fits its budget", tokens=tokens)
        self._wave_tokens += tokens
        self._wave_budget_tokens += planned.budget
        return WaveHeader(
            epoch=self._epoch,
            wave=ring.emit(now),
            tokens=tokens,
            budget=planned.budget,
            spans=tuple(self._entry(span, now) for span in planned.spans),
        )

    def retire(self, result: WaveResult, now: Instant) -> list[Finished]:
        """Retire a wave; return the answers that someone still waits for.

        Raises:
            DeviceError: the last stage failed.
        """
        if result.error:
            raise DeviceError(f"wave {result.wave}: {result.error}")
        self._ring.retire(result.wave, now)
        finished = []
        for answer in result.first_tokens:
            due = self._unanswered.pop(answer.rid, None)
            if due is None:
                mark("executor.answer_dropped")
                continue
            timeline = Timeline(
                announced_at=due.announced_at,
                admitted_at=due.admitted_at,
                scheduled_at=due.scheduled_at,
                answered_at=now,
                leased_at=due.leased_at,
                attempts=due.attempts,
            )
            finished.append(
                Finished(answer.rid, due.endpoint, answer.token, answer.logprob, timeline)
            )
        return finished

    def next_deadline(self) -> Instant | None:
        """Return when `plan` and `check_progress` must be called at the latest."""
        planned_at = self._planner.next_deadline() if self._ring.has_room else None
        deadlines = (planned_at, self._ring.deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def check_progress(self, now: Instant) -> None:
        """Raise PeerError if waves are under way and none retires."""
        self._ring.check_progress(now)

    def stats(self) -> dict[str, float]:
        """Return the planner's counters and gauges, and the leader's own."""
        values = self._planner.stats() | {
            "wavepp_ring_waves": float(self._ring.count),
            "wavepp_ring_waves_max": float(self._ring.capacity),
            "wavepp_ring_wave_seconds_total": self._ring.wave_seconds,
            "wavepp_wave_tokens_total": float(self._wave_tokens),
            "wavepp_wave_budget_tokens_total": float(self._wave_budget_tokens),
            "wavepp_lanes": float(self._planner.lane_count()),
        }
        return values if self.asking is None else values | self.asking.stats()

    def _entry(self, span: PlannedSpan, now: Instant) -> SpanEntry:
        due = self._unanswered[span.rid]
        flags = 0
        if span.start == due.endpoint:
            flags |= SPAN_FIRST
            due.scheduled_at = now
        if span.start + span.length == due.prompt_tokens:
            flags |= SPAN_LAST
        if span.start + span.length in due.snapshot_points:
            flags |= SPAN_SNAPSHOT
        return SpanEntry(span.rid, due.ino, span.start, span.length, flags)
