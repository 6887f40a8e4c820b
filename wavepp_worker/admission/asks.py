"""The naive rung: LOOP0 asks for every request, and every Ask gets one answer, Install or Refused.

    refused at once     nothing waits
    refused             there is other work meanwhile, and the oldest request cannot be admitted now
    kept                otherwise: LOOP0 has nothing else to do

[algorithms 22]
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_worker.admission.commands import Outward, TellAsker
from wavepp_worker.base.errors import check
from wavepp_worker.wire.mailbox import Refused, Waiting


class Asks:
    """The open Ask, if any, and what LOOP0 knows of the queue."""

    def __init__(self, emit: Callable[[Outward], None]) -> None:
        self._emit = emit
        self._waiting_count = 0  # as told
        self.is_open = False
        self.may_refuse = False

    def open(self, *, may_refuse: bool) -> None:
        """LOOP0 asks."""
        check(not self.is_open, "LOOP0 asked twice")
        self.is_open, self.may_refuse = True, may_refuse

    def grant(self) -> None:
        """A request is admitted: its Install is the answer."""
        check(self.is_open, "admitted without being asked")
        self.is_open = False

    def settle(self, waiting_count: int, *, is_under_way: bool) -> None:
        """Tell how many requests wait, if that changed; refuse what is to be refused.

        Args:
            is_under_way: an attempt is open, or may be opened without any news.
        """
        if waiting_count != self._waiting_count:
            self._waiting_count = waiting_count
            self._emit(TellAsker(Waiting(waiting_count)))
        if self.is_open and (not waiting_count or (self.may_refuse and not is_under_way)):
            self.is_open = False
            self._emit(TellAsker(Refused()))
