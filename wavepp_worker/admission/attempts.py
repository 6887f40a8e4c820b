"""What one rank does for one record: the sections it runs, and its answer.

    LEASE     release an older attempt [A43]; acquire, prepare; commit if exact and asked to
    TRIM      lower the lease; commit if exact and asked to
    COMMIT    fix the reservation at the lease
    RELEASE   escrow, then lease

A record is known by all its fields.  Seen before: the same answer again, nothing is done [I30].
Of an older attempt, or of a request that is ADMITTED here: the current state is the answer, and
nothing is done [I32].  [algorithms 6, 9.3]
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_worker.admission.commands import (
    AcquireLease,
    CommitEscrow,
    PrepareEscrow,
    ReleaseAttempt,
    TrimLease,
)
from wavepp_worker.admission.events import EscrowShort, LeaseTaken
from wavepp_worker.admission.flow import Flow, expect
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.request import RankRequest
from wavepp_worker.base.errors import check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    FLAG_NO_FLOOR,
    Record,
    RecordPhase,
    RecordVote,
    VoteStatus,
)

Move = Callable[[RankRequest, Phase, Instant, str], None]
"""Changes a request's phase and tells its story."""

Outcome = tuple[VoteStatus, int]
"""Status, and the capacity generation read in a failing section."""


class Attempts:
    """Executes records on this rank's requests."""

    def __init__(self, move: Move) -> None:
        self._move = move

    def answer(self, request: RankRequest | None, record: Record, now: Instant) -> Flow[RecordVote]:
        """Execute a new record and return the answer; do nothing for any other."""
        if request is None:
            mark("admission.record_unknown")
            return RecordVote(
                rid=record.rid,
                attempt=record.attempt,
                phase=record.phase,
                status=VoteStatus.UNKNOWN_RID,
                endpoint=0,
            )
        if request.answer is not None:
            if record.attempt < request.attempt or request.phase is Phase.ADMITTED:
                mark("admission.record_old")
                return request.answer
            if (known := request.answers.get(record)) is not None:
                mark("admission.record_repeated")
                return known
        if record.attempt > request.attempt:
            request.answers.clear()
        status, generation = yield from self._execute(request, record, now)
        vote = RecordVote(
            rid=record.rid,
            attempt=record.attempt,
            phase=record.phase,
            status=status,
            endpoint=request.endpoint,
            is_committed=status == VoteStatus.COMMITTED,
            generation=generation,
        )
        request.answers[record] = request.answer = vote
        return vote

    def release(self, request: RankRequest) -> Flow[None]:
        """Give back what the request holds outside of a sequence, if anything."""
        if request.is_holding:
            yield ReleaseAttempt(request.rid)
            request.is_holding = False

    def _execute(self, request: RankRequest, record: Record, now: Instant) -> Flow[Outcome]:
        is_lease = record.phase == RecordPhase.LEASE
        check(
            record.attempt > request.attempt if is_lease else record.attempt == request.attempt,
            "a record does not follow this rank's state",
            record=record,
            attempt=request.attempt,
        )
        match record.phase:
            case RecordPhase.LEASE:
                return (yield from self._lease(request, record, now))
            case RecordPhase.TRIM:
                return (yield from self._trim(request, record, now))
            case RecordPhase.COMMIT:
                self._check_prepared(request, record)
                check(
                    request.endpoint == record.endpoint,
                    "commit at an endpoint that is not leased",
                    record=record,
                )
                return (yield from self._commit(request, record, now))
            case RecordPhase.RELEASE:
                yield from self.release(request)
                if request.phase is not Phase.HINTED:
                    self._move(request, Phase.HINTED, now, "released")
                return VoteStatus.RELEASED, 0

    def _lease(self, request: RankRequest, record: Record, now: Instant) -> Flow[Outcome]:
        if request.is_holding:
            mark("admission.implicit_release")
        yield from self.release(request)
        request.leased_at = request.leased_at or now
        request.attempt = record.attempt
        self._move(request, Phase.LEASING, now, f"attempt {record.attempt}")
        acquire = AcquireLease(request.rid, record.attempt, record.endpoint)
        request.endpoint = expect((yield acquire), LeaseTaken).endpoint
        prepared = yield PrepareEscrow(request.rid, bool(record.flags & FLAG_NO_FLOOR))
        if isinstance(prepared, EscrowShort):
            mark("admission.prepare_short")
            self._move(request, Phase.RELEASING, now, "prepare fell short")
            return VoteStatus.PREP_FAILED, prepared.generation
        request.is_holding = True
        self._move(request, Phase.LEASED, now, f"lease {request.endpoint} of {record.endpoint}")
        if request.endpoint < record.endpoint:
            mark("admission.lease_below")
        return (yield from self._commit_if_exact(request, record, now))

    def _trim(self, request: RankRequest, record: Record, now: Instant) -> Flow[Outcome]:
        self._check_prepared(request, record)
        trim = TrimLease(request.rid, record.endpoint)
        request.endpoint = expect((yield trim), LeaseTaken).endpoint
        self._move(request, Phase.LEASED, now, f"trim to {request.endpoint}")
        if request.endpoint < record.endpoint:
            mark("admission.trim_below")
        return (yield from self._commit_if_exact(request, record, now))

    def _commit_if_exact(self, request: RankRequest, record: Record, now: Instant) -> Flow[Outcome]:
        if request.endpoint == record.endpoint and record.flags & FLAG_COMMIT:
            return (yield from self._commit(request, record, now))
        return VoteStatus.PREPARED, 0

    def _commit(self, request: RankRequest, record: Record, now: Instant) -> Flow[Outcome]:
        no_floor = bool(record.flags & FLAG_NO_FLOOR)
        committed = yield CommitEscrow(request.rid, request.endpoint, no_floor)
        if isinstance(committed, EscrowShort):
            mark("admission.commit_short")
            self._move(request, Phase.RELEASING, now, "commit fell short")
            return VoteStatus.COMMIT_FAILED, committed.generation
        self._move(request, Phase.COMMITTED, now, f"commit at {request.endpoint}")
        return VoteStatus.COMMITTED, 0

    def _check_prepared(self, request: RankRequest, record: Record) -> None:
        check(
            request.is_holding and request.phase is Phase.LEASED,
            "a record names an attempt that holds nothing or is committed",
            record=record,
            phase=request.phase,
        )
