"""What every rank does in a round, the leader included: apply the broadcast, vote, merge.

    apply   cancels, announces, records by arrival order, hint refresh -> this rank's vote
    merge   all votes of the round -> candidates; ADMITTED requests are installed, in `seq` order

Both are the same function of the same messages on every rank.  [P-ROUNDS, algorithms 9.1, 9.3]
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_worker.admission.attempts import Attempts
from wavepp_worker.admission.commands import (
    Forget,
    Learn,
    Materialize,
    Outward,
    ReadCapacity,
    SendInstall,
    Transition,
)
from wavepp_worker.admission.decide import Action, Verdict, answers_to, reconcile
from wavepp_worker.admission.events import CapacityRead, SequenceMade
from wavepp_worker.admission.flow import Flow, expect
from wavepp_worker.admission.hints import Hints
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.request import RankRequest
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.mailbox import Install
from wavepp_worker.wire.rounds import (
    AnnounceEntry,
    Record,
    RecordVote,
    RoundBcast,
    RoundGathered,
    RoundVote,
)


class Replica:
    """One rank's view of all live requests."""

    def __init__(self, settings: AdmissionSettings, emit: Callable[[Outward], None]) -> None:
        self.requests: dict[int, RankRequest] = {}  # in seq order
        # Rank 0: tokens and arrival, until Install takes them.
        self.prompts: dict[int, tuple[bytes, Instant]] = {}
        self.round = 0  # last one applied
        self.ino = 0  # ADMITTED decisions so far
        self.open_bcast: RoundBcast | None = None  # applied, not merged yet
        self.counts = {"candidate_tokens": 0, "attempts": 0}  # of admitted requests
        self._settings = settings
        self._emit = emit
        self._hints = Hints(settings)
        self._attempts = Attempts(self._move)
        self._seq_last = 0
        self._installed_due: list[int] = []
        self._gone_due: list[int] = []

    def is_ready(self, request: RankRequest) -> bool:
        """Return whether the candidate is known and, if hints are refined, has settled."""
        return self._hints.is_settled(request)

    @property
    def has_unsettled(self) -> bool:
        """Whether some request that waits has no settled candidate yet."""
        return self._hints.has_unsettled

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
            request = self.requests.get(record.rid)
            votes.append((yield from self._attempts.answer(request, record, now)))
        capacity = expect((yield ReadCapacity()), CapacityRead)
        yield from self._hints.refresh(self.requests, capacity.index_version, now)
        return self._vote(tuple(votes), capacity)

    def merge(self, gathered: RoundGathered, now: Instant) -> Flow[dict[Record, Verdict]]:
        """Derive candidates and admissions; return the verdict on each record of the round.

        An admission, its materialization and its Install are one step, before anything of the
        next broadcast.  [A44]  Verdicts are known by their records: one on a record that is not
        the leader's latest for its request says nothing to anybody.
        """
        bcast, self.open_bcast = self.open_bcast, None
        if bcast is None or bcast.round != gathered.round:
            raise InvariantError(f"merge of round {gathered.round}, which is not open")
        for known in self._hints.merge(self.requests, gathered.votes):
            self._move(known, Phase.HINTED, now, f"candidate {known.candidate}")
        verdicts: dict[Record, Verdict] = {}
        for record in bcast.records:
            request = self.requests.get(record.rid)
            if request is not None and request.phase is Phase.ADMITTED:
                continue
            verdict = reconcile(record, answers_to(record, gathered.votes))
            verdicts[record] = verdict
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

    # ── other parts of a broadcast ───────────────────────────────────────────────────────────

    def _cancel(self, rid: int, now: Instant) -> Flow[None]:
        """End a request that is not ADMITTED here; an unknown one is gone already.  [14]"""
        request = self.requests.get(rid)
        if request is None:
            mark("admission.cancel_repeated")
            self._gone_due.append(rid)
        elif request.phase is not Phase.ADMITTED:
            yield from self._attempts.release(request)
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
            snapshot_points=entry.snapshot_points,
        )
        self.requests[entry.rid] = request
        self._emit(Transition(entry.rid, None, request.phase, now, "announced"))
        yield Learn(entry.rid, entry.prompt_tokens, entry.keys, entry.snapshot_points)
        yield from self._hints.begin(request)

    def _vote(self, votes: tuple[RecordVote, ...], capacity: CapacityRead) -> RoundVote:
        vote = RoundVote(
            epoch=self._settings.epoch,
            round=self.round,
            rank=self._settings.rank,
            hints=self._hints.take_votes(),
            votes=votes,
            installed=tuple(self._installed_due),
            gone=tuple(self._gone_due),
            available_tokens=capacity.available_tokens,
            capacity_generation=capacity.generation,
            total_tokens=capacity.total_tokens,
            is_sparse=capacity.is_sparse,
            has_states=capacity.has_states,
        )
        self._installed_due.clear()
        self._gone_due.clear()
        return vote

    # ── merge ────────────────────────────────────────────────────────────────────────────────

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
        self.counts["candidate_tokens"] += request.candidate or 0
        self.counts["attempts"] += request.attempt
        request.answers.clear()
        self._hints.end(request.rid)
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
                    states=made.states,
                    snapshot_points=request.snapshot_points if self._settings.is_leader else (),
                    tokens=tokens,
                    sampling=request.sampling,
                    announced_at=announced_at,
                    admitted_at=now,
                    leased_at=request.leased_at,
                    attempts=request.attempt,
                )
            )
        )
        self._move(request, Phase.ADMITTED, now, f"endpoint {endpoint} ino {self.ino}")

    def _end(self, request: RankRequest, now: Instant, cause: str) -> Flow[None]:
        yield Forget(request.rid)
        del self.requests[request.rid]
        self._hints.end(request.rid)
        self.prompts.pop(request.rid, None)
        self._gone_due.append(request.rid)
        self._move(request, Phase.DONE, now, cause)

    def _move(self, request: RankRequest, new: Phase, now: Instant, cause: str) -> None:
        old = request.phase
        request.move(new)
        self._emit(Transition(request.rid, old, new, now, cause))
