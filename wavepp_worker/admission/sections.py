"""The seam between the pure machine and one rank's cache, for the WAVE process and for tests.

`InlineRank` runs each section as soon as the machine asks for it, so a whole round is one call
and nothing else touches the cache in between.  What it returns is for the driver to send:

    SendBroadcast, SendGathered   to every other rank, in order (rank 0 only)
    SendVote                      to rank 0
    SendInstall, SendDrop, SendAdmitting, TellAsker   to this rank's LOOP
    Report*, SendCacheView                                to the serving process
    ShutDown                                              end the process
    Transition                                            one line of a request's story

Call `handle(Tick(), now)` when `next_deadline()` has passed; on rank 0 not before every rank has
joined the rounds plane.  [algorithms 16]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

from wavepp_worker.admission.commands import (
    AcquireLease,
    CommitEscrow,
    Forget,
    Learn,
    Materialize,
    Outward,
    PrepareEscrow,
    Probe,
    ReadCapacity,
    ReleaseAttempt,
    Section,
    TrimLease,
)
from wavepp_worker.admission.events import (
    CapacityRead,
    EscrowHeld,
    EscrowShort,
    HintProbed,
    LeaseTaken,
    OutsideEvent,
    SectionDone,
    SectionResult,
    SequenceFreed,
    SequenceMade,
)
from wavepp_worker.admission.machine import AdmissionMachine
from wavepp_worker.admission.section_times import SectionTimes
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.outcomes import Committed, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.wire.mailbox import Freed, WaveDone


class InlineRank:
    """One rank's AdmissionMachine on its RankCache.

    Args:
        clock: measures the sections; None: they are not measured.
    """

    def __init__(
        self,
        settings: AdmissionSettings,
        cache: RankCache,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.cache = cache
        self._times = SectionTimes(clock)
        self.machine = AdmissionMachine(settings)

    def handle(self, event: OutsideEvent, now: Instant) -> list[Outward]:
        """Return what to send after `event`, in order.

        Raises:
            InvariantError, PeerError: the rank cannot go on; fatal for the worker.
        """
        return list(self.steps(event, now))

    def steps(self, event: OutsideEvent, now: Instant) -> Iterator[Outward]:
        """Yield what `handle` returns, each before the section behind it runs.

        So a broadcast leaves while the leader still works on its own share of the round.  The
        caller must exhaust the iterator before the next event.
        """
        due: OutsideEvent | SectionResult | None = event
        while due is not None:
            commands = self.machine.handle(due, now)
            due = None
            for command in commands:
                if isinstance(command, Section):
                    with self._times.of(command):
                        due = run_section(self.cache, command)
                else:
                    yield command

    def wave_done(self, done: WaveDone) -> None:
        """Publish what a wave of this rank has completed.  [algorithms 13]"""
        points: dict[int, list[int]] = {rid: [] for rid, _ in done.ends}
        for rid, point in done.snapshots:
            check(rid in points, "a wave stored a state of a request it did not run", rid=rid)
            points[rid].append(point)
        for rid, end in done.ends:
            with self._times.of("publish"):
                self.cache.publish(rid, end, points[rid])

    def freed(self, freed: Freed, now: Instant) -> list[Outward]:
        """Take a sequence's slots back; the next vote says that it is gone here."""
        with self._times.of("free"):
            self.cache.free(freed.rid)
        return self.handle(SequenceFreed(freed.rid), now)

    def next_deadline(self) -> Instant | None:
        """Return when `Tick` is due; None: only messages move this rank."""
        return self.machine.next_deadline()

    def stats(self) -> dict[str, float]:
        """Return the counters and gauges of machine, cache and sections."""
        return self.machine.stats() | self.cache.stats() | self._times.stats()


def run_section(cache: RankCache, section: Section) -> SectionResult:  # noqa: PLR0911
    """Run one section to completion and return its result."""
    match section:
        case Learn():
            cache.learn(section.rid, section.prompt_tokens, section.keys, section.snapshot_points)
        case Probe(rid=rid, cap=cap, is_walk=is_walk):
            endpoint = cache.walk(rid, cap) if is_walk else cache.hint(rid, cap)
            return HintProbed(endpoint, cache.index_version)
        case AcquireLease(rid=rid, attempt=attempt, cap=cap):
            return LeaseTaken(cache.acquire(rid, attempt, cap))
        case TrimLease(rid=rid, cap=cap):
            return LeaseTaken(cache.trim(rid, cap))
        case PrepareEscrow(rid=rid, no_floor=no_floor):
            return _escrow_result(cache.prepare(rid, no_floor=no_floor))
        case CommitEscrow(rid=rid, endpoint=endpoint, no_floor=no_floor):
            return _escrow_result(cache.commit(rid, endpoint, no_floor=no_floor))
        case ReleaseAttempt(rid=rid):
            cache.release(rid)
        case Materialize(rid=rid, ino=ino):
            made = cache.materialize(rid, ino)
            return SequenceMade(made.endpoint, made.tables, made.copies, made.states)
        case Forget(rid=rid):
            cache.forget(rid)
        case ReadCapacity():
            return CapacityRead(
                available_tokens=cache.available_tokens(),
                generation=cache.capacity_generation,
                total_tokens=cache.total_tokens(),
                index_version=cache.index_version,
                is_sparse=cache.is_sparse,
                has_states=cache.has_states,
            )
        case _:
            raise TypeError(f"not a section: {section!r}")
    return SectionDone()


def _escrow_result(outcome: Prepared | Committed | Shortfall) -> SectionResult:
    match outcome:
        case Shortfall(generation=generation):
            return EscrowShort(generation)
        case Prepared() | Committed():
            return EscrowHeld()
        case _:
            assert_never(outcome)
