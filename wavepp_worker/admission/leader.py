"""What only rank 0 does: queue arrivals, build each broadcast, act on verdicts, select, pace.

    build     cancels and arrivals of the meantime, one record per open attempt
    decide    after merge: acknowledgements, verdicts, gone votes, then selection in FCFS order

A wish to cancel is acted on in `build` only, never between a broadcast and its merge, so no merge
can admit a request that the same round cancels.  [algorithms 8, 9.3-9.5, 14]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wavepp_worker.admission import limits
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
from wavepp_worker.admission.request import Attempt, LeaderRequest
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import InvariantError, PeerError, check
from wavepp_worker.base.limits import ANNOUNCE_BYTES_PER_ROUND, ANNOUNCES_PER_ROUND
from wavepp_worker.base.types import Instant
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
        is_hybrid: bool,
        replica: Replica,
        emit: Callable[[Outward], None],
    ) -> None:
        self.queue = AdmissionQueue()
        self.requests: dict[int, LeaderRequest] = {}
        self.counts: dict[str, int] = dict.fromkeys(
            [*Action, "solo", "last_resort", "oversized", "cancel", "drop", "reject", "refused"], 0
        )
        self._settings = settings
        self._is_hybrid = is_hybrid
        self._replica = replica
        self._emit = emit
        self._seq_last = 0
        self._arrivals: dict[int, AnnounceEntry] = {}
        self._cancel_wishes: dict[int, LeaderRequest] = {}
        self._cancelling: dict[int, LeaderRequest] = {}
        self._view_numbers: list[int] = []
        self._shutdown_reason: str | None = None
        self._votes: Sequence[RoundVote] = ()  # of the last merged round; empty before the first
        self._admitting_count = 0
        self._unhurried_s = settings.round_quiet_s

    # ── arrivals ─────────────────────────────────────────────────────────────────────────────

    def announce(self, announce: Announce, now: Instant) -> None:
        """Take a request in, or refuse it when the worker is full."""
        rid = announce.rid
        if rid in self.requests:
            return  # delivered before
        if len(self.requests) >= self._settings.queue_requests_max:
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
            snapshot_points=announce.snapshot_points,
            sampling=announce.sampling,
        )
        self._replica.prompts[rid] = (announce.tokens, now)

    def cancel(self, rid: int) -> None:
        """Note that nobody waits for this request; one that has ended already is not an error."""
        request = self.requests.get(rid)
        if request is None or request.is_cancelled:
            return
        request.is_cancelled = True
        self.counts["cancel"] += 1
        if rid in self._arrivals:
            self._end(request)
        else:
            self._cancel_wishes[rid] = request

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
        is_urgent = self._view_numbers or self._cancel_wishes or self._shutdown_reason is not None
        if is_urgent or (self._arrivals and self._votes):
            return self._settings.round_min_s
        return self._unhurried_s

    def _unhurried(self) -> float:
        requests = self._replica.requests
        is_answer_due = bool(self._cancelling or self.queue.open_attempts()) or any(
            not self._replica.is_ready(requests[r.rid]) for r in self.queue.waiting()
        )
        if is_answer_due:
            return self._settings.round_active_s
        if self.queue.pending or len(self.queue):
            return self._settings.round_idle_s
        return self._settings.round_quiet_s

    def _act_on_cancels(self) -> None:
        for rid, request in self._cancel_wishes.items():
            if request.ino:
                self.counts["drop"] += 1
                self._emit(SendDrop(rid, request.ino))
            else:
                self.queue.withdraw(request)
                self._cancelling[rid] = request
        self._cancel_wishes.clear()

    def _take_arrivals(self) -> tuple[AnnounceEntry, ...]:
        """Return the next announces within one round's limits; none before all ranks voted."""
        entries: list[AnnounceEntry] = []
        key_bytes = 0
        for entry in list(self._arrivals.values()) if self._votes else []:
            request = self.requests[entry.rid]
            if not limits.can_ever_fit(self._settings, entry.prompt_tokens, self._total_tokens()):
                self._reject(
                    request,
                    "prompt_too_long_for_cache",
                    f"the prompt of {entry.prompt_tokens} tokens exceeds the cache of "
                    f"{self._total_tokens()} tokens",
                )
                self._end(request)
                continue
            key_bytes += len(entry.keys)
            is_full = len(entries) >= ANNOUNCES_PER_ROUND or key_bytes > ANNOUNCE_BYTES_PER_ROUND
            if entries and is_full:
                break
            del self._arrivals[entry.rid]
            self.queue.add(request)
            entries.append(entry)
        return tuple(entries)

    # ── decision ─────────────────────────────────────────────────────────────────────────────

    def decide(
        self, votes: Sequence[RoundVote], verdicts: dict[int, Verdict], now: Instant
    ) -> None:
        """Act on one merged round, then select.  [algorithms 9.4]"""
        is_first = not self._votes
        self._votes = votes
        if is_first:
            self._emit(ReportReady(self._total_tokens()))
        for vote in votes:
            self._note(vote)
        for request in self.queue.open_attempts():
            if request.rid in verdicts:
                self._follow(request, verdicts[request.rid], now)
        for vote in votes:
            for rid in vote.gone:
                self._note_gone(rid, vote.rank)
        self._select(now)
        self._report_admitting()
        self._unhurried_s = self._unhurried()

    def _note(self, vote: RoundVote) -> None:
        if vote.fatal:
            raise PeerError(f"rank {vote.rank} failed: {vote.fatal}")
        for rid in vote.installed:
            request = self.requests[rid]
            request.installed.add(vote.rank)
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
        phase = attempt.record.phase
        flags = attempt.record.flags & FLAG_NO_FLOOR
        match verdict.action:
            case Action.REPEAT:
                return
            case Action.ADMIT:
                self.queue.admit(request, self._replica.requests[request.rid].ino)
                return
            case Action.CLOSE:
                self._close(request, now)
                return
            case Action.COMMIT:
                phase = RecordPhase.COMMIT
            case Action.TRIM:
                phase = RecordPhase.TRIM
                flags |= 0 if self._is_hybrid else FLAG_COMMIT
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

    # ── selection ────────────────────────────────────────────────────────────────────────────

    def _select(self, now: Instant) -> None:
        """Open attempts in arrival order, until one is refused.  [P-ADMISSION]"""
        for request in self.queue.waiting():
            if request.is_cancelled:
                continue
            if request.must_wait:
                if now < request.retry_at or not self.queue.has_news(request, self._votes):
                    return
                request.must_wait = False
            known = self._replica.requests[request.rid]
            if known.candidate is None or not self._replica.is_ready(known):
                if request.has_failed:
                    return
                continue
            attempt = self._grant(request, known.candidate)
            if attempt is None:
                return
            request.attempt_number += 1
            self.queue.open(request, attempt)

    def _grant(self, request: LeaderRequest, candidate: int) -> Attempt | None:
        """Return the attempt that may be opened for the oldest waiting request, or None."""
        settings, pending = self._settings, self.queue.pending
        if len(pending) >= settings.batch_requests_max:
            return None
        if request.has_failed and pending:
            return None
        if any(other.has_failed for other in pending.values()):
            return None
        was_quiet = self.queue.is_quiet(request)
        is_last_resort = request.is_last_resort_due and was_quiet
        is_oversized = limits.is_oversized(settings, request.prompt_tokens, self._total_tokens())
        if is_last_resort:
            candidate = 0
        else:
            if is_oversized and any(other.is_oversized for other in pending.values()):
                return None
            headroom_tokens = 0 if is_oversized else settings.headroom_tokens
            need_tokens = request.prompt_tokens - candidate
            unreported = [self._unreported_tokens(rank) for rank in range(settings.stages)]
            if not limits.has_room(need_tokens, headroom_tokens, self._votes, unreported):
                return None
        self.counts["last_resort"] += is_last_resort
        self.counts["oversized"] += is_oversized
        self.counts["solo"] += request.has_failed
        flags = FLAG_COMMIT if settings.auto_commit else 0
        flags |= FLAG_NO_FLOOR if is_oversized or is_last_resort else 0
        number = request.attempt_number + 1
        return Attempt(
            record=Record(request.rid, number, RecordPhase.LEASE, candidate, flags),
            is_oversized=is_oversized,
            is_solo=request.has_failed,
            is_last_resort=is_last_resort,
            was_quiet=was_quiet,
        )

    def _unreported_tokens(self, rank: int) -> int:
        """Return what pending attempts need that `rank`'s last vote does not show yet."""
        return sum(
            other.prompt_tokens - other.attempt.record.endpoint
            for other in self.queue.pending.values()
            if other.attempt is not None and rank not in other.attempt.reported
        )

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

    def _total_tokens(self) -> int:
        return min(vote.total_tokens for vote in self._votes)

    def _report_admitting(self) -> None:
        count = len(self.queue.open_attempts())
        if count != self._admitting_count:
            self._admitting_count = count
            self._emit(SendAdmitting(count))

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
