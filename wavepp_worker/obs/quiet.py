"""Log lines whose rate no client can drive: repeated ones are merged with a count.

request failed: code=bad_tokens request=7f… seconds=0.001
...                                                       10 such lines, then
request failed: code=bad_tokens: 9990 more in 10 s
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

LINES_MAX = 10  # of one kind, in one interval
INTERVAL_S = 10.0


class _Interval:
    """What one kind had since its interval began."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.written = 0
        self.merged = 0
        self.timer: asyncio.TimerHandle | None = None


class QuietLog:
    """Writes at most `LINES_MAX` lines of a kind per `INTERVAL_S`, and one line for the rest.

    Single owner, on an asyncio loop, whose timer tells the rest even if nothing follows.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._intervals: dict[str, _Interval] = {}

    def warn(self, kind: str, facts: object) -> None:
        """Write `kind facts` at level WARNING, or count it.

        Args:
            kind: the beginning of the line; from a small closed set, for each has its own bound.
        """
        now = self._clock()
        interval = self._intervals.get(kind)
        if interval is None or now >= interval.began_at + INTERVAL_S:
            self._end(kind)
            interval = self._intervals[kind] = _Interval(now)
        if interval.written < LINES_MAX:
            interval.written += 1
            self._logger.warning("%s %s", kind, facts)
            return
        interval.merged += 1
        if interval.timer is None:
            left_s = interval.began_at + INTERVAL_S - now
            interval.timer = asyncio.get_running_loop().call_later(left_s, self._end, kind)

    def close(self) -> None:
        """Tell what was merged so far."""
        for kind in list(self._intervals):
            self._end(kind)

    def _end(self, kind: str) -> None:
        interval = self._intervals.pop(kind, None)
        if interval is None:
            return
        if interval.timer is not None:
            interval.timer.cancel()
        if interval.merged:
            self._logger.warning("%s: %d more in %.0f s", kind, interval.merged, INTERVAL_S)
