"""Who is tried next: the leader opens attempts in arrival order, until one is refused.

    not ready (no settled candidate)   passed over, unless it has failed before
    waits without news, or is refused  blocks all younger requests                [A16]
    has failed before                  alone: nothing else pending, nothing else selected [A51]
    does not fit beside the margin     oversized: one at a time, no headroom, no floors   [A17]
    failed alone in a quiet worker     last resort: endpoint 0, no floors                 [A52]

[P-ADMISSION, algorithms 8, 9.4]
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.admission import limits
from wavepp_worker.admission.queue import AdmissionQueue
from wavepp_worker.admission.replica import Replica
from wavepp_worker.admission.request import Attempt, LeaderRequest
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import FLAG_COMMIT, FLAG_NO_FLOOR, Record, RecordPhase, RoundVote


class Selection:
    """Opens attempts on the queue; reads candidates from the leader's replica."""

    def __init__(
        self,
        settings: AdmissionSettings,
        queue: AdmissionQueue,
        replica: Replica,
        counts: dict[str, int],
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._replica = replica
        self._counts = counts

    def select(self, votes: Sequence[RoundVote], now: Instant) -> None:
        """Open attempts.

        Args:
            votes: of the last merged round, one per rank.
        """
        for request in self._queue.waiting():
            if request.is_cancelled:
                continue
            if request.must_wait:
                if now < request.retry_at or not self._queue.has_news(request, votes):
                    return
                request.must_wait = False
            known = self._replica.requests[request.rid]
            if known.candidate is None or not self._replica.is_ready(known):
                if request.has_failed:
                    mark("admission.refused_unsettled")
                    return
                mark("admission.passed_unsettled")
                continue
            attempt = self._grant(request, known.candidate, votes)
            if attempt is None:
                return
            request.attempt_number += 1
            self._queue.open(request, attempt)

    def _grant(
        self, request: LeaderRequest, candidate: int, votes: Sequence[RoundVote]
    ) -> Attempt | None:
        """Return the attempt that may be opened for the oldest ready request, or None."""
        if not self._is_turn(request):
            return None
        settings = self._settings
        was_quiet = self._queue.is_quiet(request)
        is_last_resort = request.is_last_resort_due and was_quiet
        total_tokens = limits.smallest_total(votes)
        is_oversized = limits.is_oversized(settings, request.prompt_tokens, total_tokens)
        if is_last_resort:
            candidate = 0
        elif not self._has_room(request, candidate, is_oversized, votes):
            return None
        self._count("last_resort", is_last_resort)
        self._count("oversized", is_oversized)
        self._count("solo", request.has_failed)
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

    def _is_turn(self, request: LeaderRequest) -> bool:
        """Return whether what is pending leaves a place to this request."""
        pending, settings = self._queue.pending, self._settings
        if len(pending) >= settings.batch_requests_max:
            mark("admission.refused_count")
            return False
        if sum(other.attempt is not None for other in pending.values()) >= settings.attempts_max:
            return False
        if request.has_failed and pending:
            mark("admission.refused_not_alone")
            return False
        if any(other.has_failed for other in pending.values()):
            mark("admission.refused_by_solo")
            return False
        return True

    def _has_room(
        self, request: LeaderRequest, candidate: int, is_oversized: bool, votes: Sequence[RoundVote]
    ) -> bool:
        if is_oversized and any(other.is_oversized for other in self._queue.pending.values()):
            mark("admission.refused_second_oversized")
            return False
        unreported = [self._unreported_tokens(rank) for rank in range(self._settings.stages)]
        has_room = limits.has_room(
            need_tokens=request.prompt_tokens - candidate,
            headroom_tokens=0 if is_oversized else self._settings.headroom_tokens,
            votes=votes,
            unreported_tokens=unreported,
        )
        if not has_room:
            mark("admission.refused_tokens")
        return has_room

    def _unreported_tokens(self, rank: int) -> int:
        """Return what pending attempts need that `rank`'s last vote does not show yet."""
        return sum(
            other.prompt_tokens - other.attempt.record.endpoint
            for other in self._queue.pending.values()
            if other.attempt is not None and rank not in other.attempt.reported
        )

    def _count(self, name: str, is_so: bool) -> None:
        if is_so:
            self._counts[name] += 1
            mark(f"admission.{name}")
