"""The naive rung of the ladder: the executor asks for the next request, and waits for it.

    lanes do not fill a wave, and requests wait  ─▶ Ask ─▶ no wave before Install or Refused
    Refused                                      ─▶ the next wave goes out with what there is

[algorithms 22]
"""

from __future__ import annotations

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.planner.ports import PlannedWave
from wavepp_worker.wire.mailbox import Ask


class Asking:
    """Rank 0's questions, one at a time.

    Args:
        spans_max: K; a wave with so many requests has no place for another.
        block_tokens: B; a wave with less room than that is full.
    """

    def __init__(self, spans_max: int, block_tokens: int) -> None:
        self._spans_max, self._block_tokens = spans_max, block_tokens
        self._waiting_count = 0
        self._ask: Ask | None = None
        self._asked_at: Instant | None = None
        self._was_refused = False
        self._asks = 0
        self._wait_s = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is due."""
        return self._asked_at is not None

    def waiting(self, count: int) -> None:
        """So many requests could be asked for."""
        self._waiting_count = count

    def answer(self, now: Instant, *, is_refused: bool) -> None:
        """Take the answer: a request was installed, or none can be now."""
        asked_at, self._asked_at = self._asked_at, None
        check(asked_at is not None, "an answer that nobody asked for")
        if asked_at is not None:
            self._wait_s += now - asked_at
        self._was_refused = is_refused

    def must_ask(self, planned: PlannedWave | None, now: Instant) -> bool:
        """Return whether `planned` has to wait for an answer; if so, the question is due."""
        was_refused, self._was_refused = self._was_refused, False
        if not self._waiting_count or (planned is not None and was_refused):
            return False
        if planned is not None:
            room = planned.budget - sum(span.length for span in planned.spans)
            if room < self._block_tokens or len(planned.spans) >= self._spans_max:
                return False
        self._ask = Ask(may_refuse=planned is not None)
        self._asked_at = now
        self._asks += 1
        return True

    def take(self) -> Ask | None:
        """Return the question to send, once."""
        ask, self._ask = self._ask, None
        return ask

    def stats(self) -> dict[str, float]:
        """Return counters by their metric names."""
        return {
            "wavepp_asks_total": float(self._asks),
            "wavepp_ask_wait_seconds_total": self._wait_s,
        }
