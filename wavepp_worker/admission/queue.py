"""The leader's FCFS queue: who is tried next, who waits for news, and what counts as news.

Order is arrival order.  A request whose candidate is not known yet is passed over; one that is
refused blocks all younger ones.  After a failure a request waits for one of:

    a rank that failed it votes a capacity generation above that of its failure vote
    an attempt that was open together with it closes without admission
    the worker is quiet: nothing else open, every admitted request gone on all ranks

and is then tried alone (solo), so that two requests cannot go on failing each other.  If a solo
attempt that began quiet fails, and it is quiet again, the next one is the last resort: endpoint 0
and no floors, which cannot fail.  [algorithms 8.1, 8.4, A51, A52]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wavepp_worker.admission.request import Attempt, LeaderRequest
from wavepp_worker.base.errors import check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import RoundVote


class AdmissionQueue:
    """Announced requests until they are admitted, and everything that is pending or running.

    Attributes:
        pending: an attempt is open, or ADMITTED but not acknowledged as installed by all ranks.
        running: ADMITTED, and not yet voted gone by all ranks.
    """

    def __init__(self) -> None:
        self.pending: dict[int, LeaderRequest] = {}
        self.running: dict[int, LeaderRequest] = {}
        self._queued: dict[int, LeaderRequest] = {}

    def __len__(self) -> int:
        """Return how many requests are announced and not admitted."""
        return len(self._queued)

    def add(self, request: LeaderRequest) -> None:
        """Append a request that is being announced."""
        self._queued[request.rid] = request

    def oldest(self) -> LeaderRequest | None:
        """Return the first that is announced and not admitted."""
        return next(iter(self._queued.values()), None)

    def waiting(self) -> Iterator[LeaderRequest]:
        """Yield requests without an open attempt, oldest first."""
        return (r for r in self._queued.values() if r.attempt is None)

    def open_attempts(self) -> list[LeaderRequest]:
        """Return requests with an open attempt that is not withdrawn, oldest first."""
        opened = [r for r in self.pending.values() if r.attempt is not None and not r.is_withdrawn]
        return sorted(opened, key=lambda r: r.seq)

    def open(self, request: LeaderRequest, attempt: Attempt) -> None:
        """Start a chain of attempts."""
        check(request.attempt is None, "a request has two attempts", rid=request.rid)
        request.attempt = attempt
        request.companions.clear()
        request.has_closed_companion = False
        request.failures = ()
        request.is_oversized = attempt.is_oversized
        for other in self.pending.values():
            if other.attempt is not None:
                other.companions.add(request.rid)
                request.companions.add(other.rid)
        self.pending[request.rid] = request

    def admit(self, request: LeaderRequest, ino: int) -> None:
        """End the chain with an admission; pending until all ranks acknowledge."""
        request.attempt = None
        request.ino = ino
        self._queued.pop(request.rid)
        self.running[request.rid] = request

    def close(self, request: LeaderRequest, retry_at: Instant) -> None:
        """End the chain without an admission: the request waits for news."""
        attempt = request.attempt
        self._drop_attempt(request)
        request.must_wait = True
        request.retry_at = retry_at
        request.is_last_resort_due = attempt is not None and attempt.is_solo and attempt.was_quiet

    def withdraw(self, request: LeaderRequest) -> None:
        """Take a cancelled request out of the order; an open attempt stays pending until gone."""
        request.is_withdrawn = True
        self._queued.pop(request.rid, None)

    def forget(self, request: LeaderRequest) -> None:
        """All ranks voted gone."""
        self._queued.pop(request.rid, None)
        self.running.pop(request.rid, None)
        self._drop_attempt(request)

    def is_quiet(self, request: LeaderRequest) -> bool:
        """Return whether nothing but `request` can change what the ranks have available."""
        return not self.running and not any(
            other.attempt is not None for other in self.pending.values() if other is not request
        )

    def has_news(self, request: LeaderRequest, votes: Sequence[RoundVote]) -> bool:
        """Return whether a waiting request has a reason to be tried again."""
        if request.has_closed_companion:
            mark("admission.news_companion")
            return True
        if any(votes[rank].capacity_generation > known for rank, known in request.failures):
            mark("admission.news_capacity")
            return True
        if self.is_quiet(request):
            mark("admission.news_quiet")
            return True
        return False

    def _drop_attempt(self, request: LeaderRequest) -> None:
        was_open = request.attempt is not None
        request.attempt = None
        self.pending.pop(request.rid, None)
        if was_open:
            for other in self._queued.values():
                if request.rid in other.companions:
                    other.has_closed_companion = True
