"""What every rank does in a round, the leader included: apply the broadcast, vote, merge.

Each method that touches the cache is a generator: it yields one section and receives its result.
So the order of sections is the order of the code, and the machine stays free of callbacks.

    apply   cancels, announces, records by arrival order, hint refresh -> this rank's vote
    merge   all votes of the round -> candidates; ADMITTED requests are installed, in `seq` order

Both are the same function of the same messages on every rank.  [P-ROUNDS, algorithms 9.1, 9.3]
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

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
    SendInstall,
    Transition,
    TrimLease,
)
from wavepp_worker.admission.decide import Action, Verdict, answers_to, reconcile
from wavepp_worker.admission.events import (
    CapacityRead,
    EscrowShort,
    HintProbed,
    LeaseTaken,
    SectionResult,
    SequenceMade,
)
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.request import RankRequest
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.mailbox import Install
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    FLAG_NO_FLOOR,
    AnnounceEntry,
    HintVote,
    Record,
    RecordPhase,
    RecordVote,
    RoundBcast,
    RoundGathered,
    RoundVote,
    VoteStatus,
)

T = TypeVar("T")
R = TypeVar("R", bound=SectionResult)
Flow = Generator[Section, SectionResult, T]


def expect(result: SectionResult, kind: type[R]) -> R:
    """Return `result`, which must be of this kind."""
    if not isinstance(result, kind):
        raise InvariantError(f"a section answered {result!r}, expected {kind.__name__}")
    return result


class Replica:
    """One rank's view of all live requests."""

    def __init__(
        self,
        settings: AdmissionSettings,
        is_refining: bool,
        emit: Callable[[Outward], None],
    ) -> None:
        self.requests: dict[int, RankRequest] = {}  # in seq order
        # Rank 0: tokens and arrival, until Install takes them.
        self.prompts: dict[int, tuple[bytes, Instant]] = {}
        self.round = 0  # last one applied
        self.ino = 0  # ADMITTED decisions so far
        self.open_bcast: RoundBcast | None = None  # applied, not merged yet
        self._settings = settings
        self._is_refining = is_refining
        self._emit = emit
        self._seq_last = 0
        self._probed_version = 0  # of the hint index, at the last refresh
        self._refreshed_at: Instant | None = None
        self._hints_due: dict[int, int] = {}
        self._installed_due: list[int] = []
        self._gone_due: list[int] = []

    def is_ready(self, request: RankRequest) -> bool:
        """Return whether the candidate is known and, if hints are refined, has settled."""
        if request.candidate is None:
            return False
        return not self._is_refining or all(
            hint == request.candidate for hint in request.hints.values()
        )

    def apply(self, bcast: RoundBcast, now: Instant) -> Flow[RoundVote]:
        """Do what the broadcast asks, in the order that is the same on all ranks."""
        check(self.open_bcast is None, "a round began before the last was merged", round=self.round)
        self.round = bcast.round
        self.open_bcast = bcast
        for rid in bcast.cancels:
            yield from self._cancel(rid, now)
        for entry in bcast.announces:
            yield from self._announce(entry, now)
        votes = []
        for record in bcast.records:
            votes.append((yield from self._answer(record, now)))  # noqa: PERF401 (generator)
        capacity = expect((yield ReadCapacity()), CapacityRead)
        yield from self._refresh_hints(capacity.index_version, now)
        return self._vote(tuple(votes), capacity)

    def merge(self, gathered: RoundGathered, now: Instant) -> Flow[dict[int, Verdict]]:
        """Derive candidates and admissions; return the verdict on each record of the round.

        An admission, its materialization and its Install are one step, before anything of the
        next broadcast.  [A44]
        """
        bcast, self.open_bcast = self.open_bcast, None
        if bcast is None or bcast.round != gathered.round:
            raise InvariantError(f"merge of round {gathered.round}, which is not open")
        self._merge_hints(gathered, now)
        verdicts: dict[int, Verdict] = {}
        for record in bcast.records:
            request = self.requests.get(record.rid)
            if request is not None and request.phase is Phase.ADMITTED:
                continue
            verdict = reconcile(record, answers_to(record, gathered.votes))
            verdicts[record.rid] = verdict
            if verdict.action is Action.ADMIT:
                if request is None:
                    raise InvariantError(f"request {record.rid} was admitted, but is unknown here")
                yield from self._admit(request, record, verdict.endpoint, now)
        return verdicts

    def freed(self, rid: int, now: Instant) -> Flow[None]:
        """LOOP gave the slots of an admitted request back: vote gone, forget."""
        request = self.requests.get(rid)
        if request is None or request.phase is not Phase.ADMITTED:
            raise InvariantError(f"request {rid} was freed, but is not installed here")
        yield from self._end(request, now, "freed")

    # ── records ──────────────────────────────────────────────────────────────────────────────

    def _answer(self, record: Record, now: Instant) -> Flow[RecordVote]:
        """Execute a new record; answer a repeated or an old one without doing anything.  [I30]"""
        request = self.requests.get(record.rid)
        if request is None:
            return RecordVote(
                rid=record.rid,
                attempt=record.attempt,
                phase=record.phase,
                status=VoteStatus.UNKNOWN_RID,
                endpoint=0,
            )
        if request.answer is not None:
            is_old = record.attempt < request.attempt or request.phase is Phase.ADMITTED
            known = request.answer if is_old else request.answers.get(record)
            if known is not None:
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

    def _execute(
        self, request: RankRequest, record: Record, now: Instant
    ) -> Flow[tuple[VoteStatus, int]]:
        no_floor = bool(record.flags & FLAG_NO_FLOOR)
        is_lease = record.phase == RecordPhase.LEASE
        check(
            record.attempt > request.attempt if is_lease else record.attempt == request.attempt,
            "a record does not follow this rank's state",
            record=record,
            attempt=request.attempt,
        )
        if record.phase == RecordPhase.RELEASE:
            yield from self._release(request)
            if request.phase is not Phase.HINTED:
                self._move(request, Phase.HINTED, now, "released")
            return VoteStatus.RELEASED, 0
        if is_lease:
            yield from self._release(request)
            request.attempt = record.attempt
            self._move(request, Phase.LEASING, now, f"attempt {record.attempt}")
            lease = expect(
                (yield AcquireLease(request.rid, record.attempt, record.endpoint)), LeaseTaken
            )
            request.endpoint = lease.endpoint
            prepared = yield PrepareEscrow(request.rid, no_floor)
            if isinstance(prepared, EscrowShort):
                self._move(request, Phase.RELEASING, now, "prepare fell short")
                return VoteStatus.PREP_FAILED, prepared.generation
            request.is_holding = True
            self._move(request, Phase.LEASED, now, f"lease {lease.endpoint} of {record.endpoint}")
        check(
            request.is_holding and request.phase is Phase.LEASED,
            "a record names an attempt that holds nothing or is committed",
            record=record,
            phase=request.phase,
        )
        if record.phase == RecordPhase.TRIM:
            lease = expect((yield TrimLease(request.rid, record.endpoint)), LeaseTaken)
            request.endpoint = lease.endpoint
            self._move(request, Phase.LEASED, now, f"trim to {lease.endpoint}")
        is_exact = request.endpoint == record.endpoint
        if record.phase == RecordPhase.COMMIT:
            check(is_exact, "commit at an endpoint that is not leased", record=record)
        elif not (is_exact and record.flags & FLAG_COMMIT):
            return VoteStatus.PREPARED, 0
        committed = yield CommitEscrow(request.rid, request.endpoint, no_floor)
        if isinstance(committed, EscrowShort):
            self._move(request, Phase.RELEASING, now, "commit fell short")
            return VoteStatus.COMMIT_FAILED, committed.generation
        self._move(request, Phase.COMMITTED, now, f"commit at {request.endpoint}")
        return VoteStatus.COMMITTED, 0

    def _release(self, request: RankRequest) -> Flow[None]:
        if request.is_holding:
            yield ReleaseAttempt(request.rid)
            request.is_holding = False

    # ── other parts of a broadcast ───────────────────────────────────────────────────────────

    def _cancel(self, rid: int, now: Instant) -> Flow[None]:
        """End a request that is not ADMITTED here; an unknown one is gone already.  [14]"""
        request = self.requests.get(rid)
        if request is None:
            self._gone_due.append(rid)
        elif request.phase is not Phase.ADMITTED:
            yield from self._release(request)
            yield from self._end(request, now, "cancelled")

    def _announce(self, entry: AnnounceEntry, now: Instant) -> Flow[None]:
        if entry.seq <= self._seq_last:
            return  # delivered before; the request may be gone by now
        self._seq_last = entry.seq
        request = RankRequest(
            rid=entry.rid,
            seq=entry.seq,
            prompt_tokens=entry.prompt_tokens,
            sampling=entry.sampling if self._settings.is_last else None,
        )
        self.requests[entry.rid] = request
        self._emit(Transition(entry.rid, None, request.phase, now, "announced"))
        yield Learn(entry.rid, entry.prompt_tokens, entry.keys)
        yield from self._probe(request, None)

    def _refresh_hints(self, index_version: int, now: Instant) -> Flow[None]:
        """Probe the oldest waiting requests again if the index changed; refine candidates.

        A candidate may rise while no attempt is open.  [A8, A9]
        """
        last = self._refreshed_at
        is_due = last is None or now - last >= self._settings.round_idle_s
        if self._is_refining:
            for request in self.requests.values():
                is_waiting = request.phase is Phase.HINTED and request.candidate is not None
                if is_waiting and (request.hint or 0) > (request.candidate or 0):
                    yield from self._probe(request, request.candidate)
        elif index_version != self._probed_version and is_due:
            self._probed_version, self._refreshed_at = index_version, now
            waiting = [r for r in self.requests.values() if r.phase is Phase.HINTED]
            for request in waiting[: self._settings.batch_requests_max]:
                yield from self._probe(request, None)

    def _probe(self, request: RankRequest, cap: int | None) -> Flow[None]:
        probed = expect((yield Probe(request.rid, cap)), HintProbed)
        if probed.endpoint != request.hint:
            request.hint = self._hints_due[request.rid] = probed.endpoint

    def _vote(self, votes: tuple[RecordVote, ...], capacity: CapacityRead) -> RoundVote:
        vote = RoundVote(
            epoch=self._settings.epoch,
            round=self.round,
            rank=self._settings.rank,
            hints=tuple(HintVote(rid, endpoint) for rid, endpoint in self._hints_due.items()),
            votes=votes,
            installed=tuple(self._installed_due),
            gone=tuple(self._gone_due),
            available_tokens=capacity.available_tokens,
            capacity_generation=capacity.generation,
            total_tokens=capacity.total_tokens,
        )
        self._hints_due.clear()
        self._installed_due.clear()
        self._gone_due.clear()
        return vote

    # ── merge ────────────────────────────────────────────────────────────────────────────────

    def _merge_hints(self, gathered: RoundGathered, now: Instant) -> None:
        for vote in gathered.votes:
            for hint in vote.hints:
                request = self.requests.get(hint.rid)
                if request is None:
                    continue
                request.hints[vote.rank] = hint.endpoint
                if len(request.hints) < self._settings.stages:
                    continue
                request.candidate = min(request.hints.values())
                if request.phase is Phase.ANNOUNCED:
                    self._move(request, Phase.HINTED, now, f"candidate {request.candidate}")

    def _admit(
        self, request: RankRequest, record: Record, endpoint: int, now: Instant
    ) -> Flow[None]:
        check(
            request.phase is Phase.COMMITTED
            and request.attempt == record.attempt
            and request.endpoint == endpoint,
            "admitted, but this rank did not commit that",
            request=request,
            endpoint=endpoint,
        )
        self.ino += 1
        made = expect((yield Materialize(request.rid, self.ino)), SequenceMade)
        check(made.endpoint == endpoint, "installed at another endpoint", made=made)
        request.is_holding = False
        request.ino = self.ino
        request.answers.clear()
        self._installed_due.append(request.rid)
        tokens, announced_at = self.prompts.pop(request.rid, (b"", Instant(0.0)))
        self._emit(
            SendInstall(
                Install(
                    ino=self.ino,
                    rid=request.rid,
                    prompt_tokens=request.prompt_tokens,
                    endpoint=endpoint,
                    tables=made.tables,
                    copies=made.copies,
                    tokens=tokens,
                    sampling=request.sampling,
                    announced_at=announced_at,
                    admitted_at=now,
                )
            )
        )
        self._move(request, Phase.ADMITTED, now, f"endpoint {endpoint} ino {self.ino}")

    def _end(self, request: RankRequest, now: Instant, cause: str) -> Flow[None]:
        yield Forget(request.rid)
        del self.requests[request.rid]
        self.prompts.pop(request.rid, None)
        self._gone_due.append(request.rid)
        self._move(request, Phase.DONE, now, cause)

    def _move(self, request: RankRequest, new: Phase, now: Instant, cause: str) -> None:
        old = request.phase
        request.move(new)
        self._emit(Transition(request.rid, old, new, now, cause))
