"""The serving process's book of live requests, from announce to `Gone`.

A request is answered when the first token (`Finished`) and every stage's hold (`Ready`) are
there; those come from different processes in any order.  The book decides who wins a race: per
request at most one of {hand-off given out, Cancel sent}.  [I49]

    open ─▶ WAITING ──finish()──▶ ANSWERED ──Gone──▶ forgotten
               │└─────cancel()──▶ CANCELLED ─Gone──▶ forgotten
               └──Rejected──────────────────────────▶ forgotten
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum

from wavepp_worker.base.errors import (
    DeviceError,
    OverloadedError,
    PeerError,
    RequestError,
    TransferError,
    WavePPError,
)
from wavepp_worker.wire.mailbox import Finished, Gone, Ready, Rejected, StageHandoff

OVERLOADED = "overloaded"  # code of WAVE0's refusals that are not the client's fault


class RequestState(Enum):
    """Who, if anybody, was told the outcome."""

    WAITING = "waiting"
    ANSWERED = "answered"
    CANCELLED = "cancelled"


class LiveRequest:
    """One request.

    Attributes:
        outcome: done when the request can be answered; raises why it cannot.
        finished: what rank 0 told, once it has the first token.
        expected_tokens: what every stage could resume when the request came.
        when_gone: called when no rank holds anything of an answered request any more.
    """

    def __init__(self, rid: int, stages: int) -> None:
        self.rid = rid
        self.state = RequestState.WAITING
        self.outcome: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        # Nobody may be left to look at a failure.
        self.outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._stages = stages
        self.finished: Finished | None = None
        self.expected_tokens = 0
        self.when_gone: Callable[[], None] = lambda: None
        self._handoffs: dict[int, StageHandoff] = {}

    def handoffs(self) -> tuple[StageHandoff, ...]:
        """Return every stage's hand-off, first stage first."""
        return tuple(self._handoffs[stage] for stage in range(self._stages))

    def take(self, report: Ready | Finished) -> None:
        """Collect one part of the answer."""
        if isinstance(report, Ready):
            self._handoffs[report.rank] = report.handoff
        else:
            self.finished = report
        if self.finished is None or len(self._handoffs) < self._stages or self.outcome.done():
            return
        if math.isfinite(self.finished.logprob):
            self.outcome.set_result(self.finished)
        else:
            self.fail(DeviceError("the model's output is not a number"))

    def fail(self, error: WavePPError) -> None:
        """End the wait with `error`, unless it has ended."""
        if not self.outcome.done():
            self.outcome.set_exception(error)


class LiveRequests:
    """All requests that hold anything on any rank.

    Args:
        stages: P; so many `Ready` per request.
        waiting_max: unanswered requests at most.
    """

    def __init__(self, stages: int, waiting_max: int) -> None:
        self._stages = stages
        self._waiting_max = waiting_max
        self._live: dict[int, LiveRequest] = {}
        self._answered_count = 0
        self._last_rid = 0
        self._failure: PeerError | None = None

    def open(self) -> LiveRequest:
        """Return a new request; its rid is ours and never used again.

        Raises:
            OverloadedError: too many requests are unanswered.
            PeerError: the worker has failed.
        """
        if self._failure is not None:
            raise self._failure
        if self.unanswered_count >= self._waiting_max:
            raise OverloadedError(f"{self.unanswered_count} requests are waiting; try again later")
        self._last_rid += 1
        request = self._live[self._last_rid] = LiveRequest(self._last_rid, self._stages)
        return request

    def finish(self, request: LiveRequest) -> bool:
        """Claim the right to hand the answer out; False if the request was cancelled."""
        if request.state is not RequestState.WAITING:
            return False
        request.state = RequestState.ANSWERED
        if request.rid in self._live:
            self._answered_count += 1
        return True

    def cancel(self, request: LiveRequest) -> bool:
        """Claim the right to send Cancel; False if there is nothing to cancel."""
        if request.state is not RequestState.WAITING:
            return False
        request.state = RequestState.CANCELLED
        return request.rid in self._live

    def take(self, report: Ready | Finished | Rejected | Gone) -> bool:
        """Take a rank's report; return whether the request is over on all ranks."""
        request = self._live.get(report.rid)
        if request is None:
            return False
        if isinstance(report, (Ready, Finished)):
            request.take(report)
            return False
        del self._live[report.rid]
        if request.state is RequestState.ANSWERED:
            self._answered_count -= 1
            request.when_gone()
        if isinstance(report, Gone):
            request.fail(TransferError("the request ended on the ranks without an answer"))
        elif report.code == OVERLOADED:
            request.fail(OverloadedError(report.text))
        else:
            request.fail(RequestError(report.code, report.text))
        return True

    def fail_all(self, reason: str) -> int:
        """The worker is lost: end every wait, refuse new requests; return how many waited."""
        self._failure = PeerError(reason)
        waiting = [r for r in self._live.values() if not r.outcome.done()]
        for request in waiting:
            request.fail(PeerError(reason))
        self._live.clear()
        self._answered_count = 0
        return len(waiting)

    @property
    def live_count(self) -> int:
        """Requests that hold something on a rank."""
        return len(self._live)

    @property
    def unanswered_count(self) -> int:
        """Live requests whose answer is not given out, cancelled ones included."""
        return len(self._live) - self._answered_count
