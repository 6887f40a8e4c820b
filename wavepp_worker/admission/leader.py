"""What only rank 0 does: queue arrivals, build each broadcast, act on verdicts, select, pace.

    build     cancels and arrivals of the meantime, one record per open attempt
    decide    after merge: acknowledgements, verdicts, gone votes, then selection in FCFS order

A wish to cancel is acted on in `build` only, never between a broadcast and its merge, so no merge
can admit a request that the same round cancels.  [algorithms 8, 9.3-9.5, 14]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import structs

from wavepp_worker.admission import limits
from wavepp_worker.admission.asks import Asks
from wavepp_worker.admission.commands import (
    Outward,
    ReportGone,
    ReportReady,
    ReportRejected,
    SendAdmitting,
    SendDrop,
)
from wavepp_worker.admission.decide import Action, Verdict
from wavepp_worker.admission.queue import AdmissionQueue
from wavepp_worker.admission.replica import Replica
from wavepp_worker.admission.request import LeaderRequest
from wavepp_worker.admission.selection import Selection
from wavepp_worker.admission.settings import AdmissionSettings, Spacing
from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.limits import ANNOUNCE_BYTES_PER_ROUND, ANNOUNCES_PER_ROUND
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.wire.mailbox import Announce
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    FLAG_NO_FLOOR,
    AnnounceEntry,
    Record,
    RecordPhase,
    RoundBcast,
    RoundVote,
    VoteStatus,
)


class Leader:
    """Rank 0's part of admission; reads candidates and numbers of admission from its replica."""

    def __init__(
        self,
        settings: AdmissionSettings,
        replica: Replica,
        emit: Callable[[Outward], None],
    ) -> None:
        self.queue = AdmissionQueue()
        self.requests: dict[int, LeaderRequest] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            [*Action, "solo", "last_resort", "oversized", "cancel", "drop", "reject", "refused"], 0
        )
        self.round_counts = dict.fromkeys(Spacing, 0)
        self._settings = settings
        self._replica = replica
        self._selection = Selection(settings, self.queue, replica, self.counts)
        self._emit = emit
        self._seq_last = 0
        self._arrivals: dict[int, AnnounceEntry] = {}
        self._cancel_wishes: dict[int, LeaderRequest] = {}
        self._cancelling: dict[int, LeaderRequest] = {}
        self._view_numbers: list[int] = []
        self._shutdown_reason: str | None = None
        self._votes: Sequence[RoundVote] = ()  # of the last merged round; empty before the first
        self._admitting_count = 0
        self._asks = Asks(emit)
        self._unhurried_s = settings.round_quiet_s

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────

    def announce(self, announce: Announce, now: Instant) -> None:
        """Take a request in, or refuse it when the worker is full.

        An id that is alive, or still drains on some rank, changes nothing: it was delivered before.
        """
        rid = announce.rid
        if rid in self.requests:
            mark("admission.announced_again")
            return
        if len(self.requests) >= self._settings.queue_requests_max:
            mark("admission.refused_queue_full")
            self.counts["refused"] += 1
            self._emit(ReportRejected(rid, "overloaded", "the worker's request queue is full"))
            return
        self._seq_last += 1
        self.requests[rid] = LeaderRequest(rid, self._seq_last, announce.prompt_tokens)
        self._arrivals[rid] = AnnounceEntry(
            rid=rid,
            seq=self._seq_last,
            prompt_tokens=announce.prompt_tokens,
            keys=announce.keys,
            sampling=announce.sampling,
        )
        self._replica.prompts[rid] = (announce.tokens, now)
        self._settle_asks()

    def cancel(self, rid: int) -> None:
        """Note that nobody waits for this request; one that has ended already is not an error."""
        request = self.requests.get(rid)
        if request is None or request.is_cancelled:
            return
        request.is_cancelled = True
        self.counts["cancel"] += 1
        if rid in self._arrivals:
            mark("admission.cancel_arrival")
            self._end(request)
            self._settle_asks()
        else:
            self._cancel_wishes[rid] = request

    def ask(self, *, may_refuse: bool) -> None:
        """LOOP0 wants one more request and waits for the answer."""
        check(self._settings.is_asked, "LOOP0 asks, but requests are admitted ahead")
        self._asks.open(may_refuse=may_refuse)
        self._settle_asks()

    def request_view(self, number: int) -> None:
        """Ask every rank for a cache view in the next round."""
        self._view_numbers.append(number)

    def request_shutdown(self, reason: str) -> None:
        """End all ranks with the next broadcast."""
        self._shutdown_reason = reason

    # ── broadcast ────────────────────────────────────────────────────────────────────────────

    def build(self) -> RoundBcast:
        """Return the next broadcast."""
        epoch, number = self._settings.epoch, self._replica.round + 1
        self.round_counts[Spacing.MIN if self._is_hurried() else self._unhurried()] += 1
        if self._shutdown_reason is not None:
            return RoundBcast(epoch, number, shutdown=True, reason=self._shutdown_reason)
        self._act_on_cancels()
        bcast = RoundBcast(
            epoch=epoch,
            round=number,
            announces=self._take_arrivals(),
            records=tuple(r.attempt.record for r in self.queue.open_attempts() if r.attempt),
            cancels=tuple(self._cancelling),
            view_request=self._view_numbers.pop(0) if self._view_numbers else 0,
        )
        self._report_admitting()
        return bcast

    def spacing_s(self) -> float:
        """Return how long after the start of the last round the next one is due.  [9.5]"""
        return self._settings.round_min_s if self._is_hurried() else self._unhurried_s

    def oldest_arrival_at(self) -> Instant | None:
        """Return when the oldest request came that is not admitted; None: none waits."""
        oldest = self.queue.oldest()
        rid = oldest.rid if oldest is not None else next(iter(self._arrivals), None)
        return None if rid is None else self._replica.prompts[rid][1]

    def _is_hurried(self) -> bool:
        is_urgent = self._view_numbers or self._cancel_wishes or self._shutdown_reason is not None
        return bool(is_urgent or self._may_announce() or self._is_awaited())

    def _may_announce(self) -> bool:
        """Return whether the next broadcast can carry an arrival."""
        if not self._arrivals or not self._votes:
            return False
        return not self._settings.is_asked or (self._asks.is_open and not len(self.queue))

    def _is_awaited(self) -> bool:
        """Return whether LOOP0 waits for what the next rounds decide."""
        return self._asks.is_open and (self._asks.may_refuse or bool(self.queue.open_attempts()))

    def _unhurried(self) -> Spacing:
        if self._cancelling or self.queue.open_attempts() or self._replica.has_unsettled:
            return Spacing.ACTIVE
        if self.queue.pending or len(self.queue):
            return Spacing.IDLE
        return Spacing.QUIET

    def _act_on_cancels(self) -> None:
        for rid, request in self._cancel_wishes.items():
            if request.ino:
                mark("admission.cancel_admitted")
                self.counts["drop"] += 1
                self._emit(SendDrop(rid, request.ino))
            else:
                is_open = request.attempt is not None
                mark("admission.cancel_attempt" if is_open else "admission.cancel_waiting")
                self.queue.withdraw(request)
                self._cancelling[rid] = request
        self._cancel_wishes.clear()

    def _take_arrivals(self) -> tuple[AnnounceEntry, ...]:
        """Return the next announces within one round's limits; none before all ranks voted."""
        entries: list[AnnounceEntry] = []
        key_bytes = 0
        for entry in list(self._arrivals.values()):
            if not self._may_announce():
                break
            request = self.requests[entry.rid]
            total_tokens = limits.smallest_total(self._votes)
            if not limits.can_ever_fit(self._settings, entry.prompt_tokens, total_tokens):
                mark("admission.rejected_size")
                self._reject(
                    request,
                    "prompt_too_long_for_cache",
                    f"the prompt of {entry.prompt_tokens} tokens exceeds the cache of "
                    f"{total_tokens} tokens",
                )
                self._end(request)
                continue
            key_bytes += len(entry.keys)
            is_full = len(entries) >= ANNOUNCES_PER_ROUND or key_bytes > ANNOUNCE_BYTES_PER_ROUND
            if entries and is_full:
                mark("admission.announces_full")
                break
            del self._arrivals[entry.rid]
            self.queue.add(request)
            entries.append(self._with_points(entry))
        return tuple(entries)

    def _with_points(self, entry: AnnounceEntry) -> AnnounceEntry:
        """Choose where the request's states may be kept, if some rank keeps any.  [A33]"""
        if not any(vote.has_states for vote in self._votes):
            return entry
        block_tokens = self._settings.block_tokens
        interval_tokens = self._settings.snapshot_interval_tokens
        points = snapshot_points(entry.prompt_tokens, block_tokens, interval_tokens)
        return structs.replace(entry, snapshot_points=points)

    # ── decision ─────────────────────────────────────────────────────────────────────────────

    def decide(
        self, votes: Sequence[RoundVote], verdicts: Mapping[Record, Verdict], now: Instant
    ) -> None:
        """Act on one merged round, then select.  [algorithms 9.4]"""
        is_first = not self._votes
        self._votes = votes
        if is_first:
            self._emit(ReportReady(limits.smallest_total(votes)))
        for vote in votes:
            self._note(vote)
        for request in self.queue.open_attempts():
            # One of a record that is not the latest says nothing.  [I32]
            verdict = verdicts.get(request.attempt.record) if request.attempt else None
            if verdict is not None:
                self._follow(request, verdict, now)
        for vote in votes:
            for rid in vote.gone:
                self._note_gone(rid, vote.rank)
        if self._asks.is_open or not self._settings.is_asked:
            self._selection.select(votes, now)
        self._report_admitting()
        self._settle_asks(is_decided=True)
        self._unhurried_s = self._settings.spacing_s(self._unhurried())

    def _note(self, vote: RoundVote) -> None:
        for rid in vote.installed:
            request = self.requests[rid]
            request.installed.add(vote.rank)
            if rid in vote.gone:
                mark("admission.gone_with_installed")  # S10
            if len(request.installed) == self._settings.stages:
                self.queue.pending.pop(rid, None)
        for answer in vote.votes:
            pending = self.queue.pending.get(answer.rid)
            if pending is None or pending.attempt is None:
                continue
            if answer.status != VoteStatus.PENDING and answer.attempt == pending.attempt_number:
                pending.attempt.reported.add(vote.rank)

    def _follow(self, request: LeaderRequest, verdict: Verdict, now: Instant) -> None:
        """Apply table 6.4 to one open attempt."""
        attempt = request.attempt
        if attempt is None:
            raise InvariantError(f"verdict on request {request.rid}, which has no open attempt")
        self.counts[verdict.action] += 1
        mark(f"admission.{verdict.action}")
        phase = attempt.record.phase
        flags = attempt.record.flags & FLAG_NO_FLOOR
        match verdict.action:
            case Action.REPEAT:
                return
            case Action.ADMIT:
                if request.is_cancelled:
                    mark("admission.cancel_crossed")
                self.queue.admit(request, self._replica.requests[request.rid].ino)
                if self._settings.is_asked:
                    self._asks.grant()
                return
            case Action.CLOSE:
                self._close(request, now)
                return
            case Action.COMMIT:
                phase = RecordPhase.COMMIT
            case Action.TRIM:
                phase = RecordPhase.TRIM
                # A sparse rank may land below: then a commit here would have to be undone.  [A10]
                flags |= 0 if any(vote.is_sparse for vote in self._votes) else FLAG_COMMIT
            case Action.RETRY:
                phase = RecordPhase.LEASE
                flags |= FLAG_COMMIT if self._settings.auto_commit else 0
                request.attempt_number += 1
                attempt.reported.clear()
            case Action.RELEASE:
                phase = RecordPhase.RELEASE
                request.failures = verdict.failures
                request.has_failed = True
        attempt.record = Record(request.rid, request.attempt_number, phase, verdict.endpoint, flags)

    def _close(self, request: LeaderRequest, now: Instant) -> None:
        is_last_resort = request.attempt is not None and request.attempt.is_last_resort
        self.queue.close(request, Instant(now + self._settings.round_idle_s))
        if is_last_resort:
            if self._settings.is_strict:
                raise InvariantError(f"the last resort failed rid={request.rid}")
            self._reject(request, "failed", "the worker could not make room for this request")
            request.is_cancelled = True
            self._cancel_wishes[request.rid] = request

    def _note_gone(self, rid: int, rank: int) -> None:
        request = self.requests.get(rid)
        if request is None:
            return
        request.gone.add(rank)
        if len(request.gone) == self._settings.stages:
            self._end(request)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────

    def _reject(self, request: LeaderRequest, code: str, text: str) -> None:
        self.counts["reject"] += 1
        request.rejection = (code, text)

    def _end(self, request: LeaderRequest) -> None:
        rid = request.rid
        del self.requests[rid]
        self._arrivals.pop(rid, None)
        self._cancel_wishes.pop(rid, None)
        self._cancelling.pop(rid, None)
        self._replica.prompts.pop(rid, None)
        self.queue.forget(request)
        if request.rejection is not None:
            self._emit(ReportRejected(rid, *request.rejection))
        else:
            self._emit(ReportGone(rid))

    def _report_admitting(self) -> None:
        count = len(self.queue.open_attempts())
        if count != self._admitting_count:
            self._admitting_count = count
            self._emit(SendAdmitting(count))

    def _settle_asks(self, *, is_decided: bool = False) -> None:
        """Answer an Ask that needs no round, or one that the last round has not brought on."""
        if self._settings.is_asked:
            is_under_way = not is_decided or bool(
                self._may_announce() or self._replica.has_unsettled or self.queue.open_attempts()
            )
            self._asks.settle(len(self._arrivals) + len(self.queue), is_under_way=is_under_way)

    def check_invariants(self) -> None:
        """Check the limits on what is pending, and that nothing else holds an attempt.  [I26]"""
        pending = self.queue.pending.values()
        check(len(pending) <= self._settings.batch_requests_max, "too many pending requests")
        check(sum(r.is_oversized for r in pending) <= 1, "two oversized requests are pending")
        for request in self.requests.values():
            is_pending = request.rid in self.queue.pending
            check(
                request.attempt is None or is_pending,
                "an open attempt is not pending",
                rid=request.rid,
            )
