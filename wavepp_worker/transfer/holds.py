"""Lifetimes of holds: who may still read a finished prompt's slots, and until when.  Pure.

    offer ──▶ OFFERED ──open──▶ READING ──close──▶ ended
                 │                 │
                 └── deadline, withdraw, decline, overflow ──▶ ended

A hold that ended is forgotten at once, so a late or repeated message meets an unknown name and is
answered `expired` or refused; slots are never served after their hold.  Every hold that ends is
reported exactly once by `take_ended`; only then may its slots be reused.  [algorithms 13, A54]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from wavepp_worker.base.errors import check


@dataclass(slots=True)
class TransferHold:
    """One finished prompt on one stage."""

    rid: int
    name: str  # in the hand-off
    block_ids: tuple[int, ...]
    tokens: int
    deadline: float  # seconds; the hold has ended when now >= deadline
    offered_at: float
    ticket: str = ""  # names the one read; empty until opened
    state_slot: int | None = None  # of the state after the prompt, with recurrent layers


@dataclass(slots=True)
class HoldCounts:
    """Holds that ended, by cause, and refused opens."""

    offered: int = 0
    read: int = 0
    expired: int = 0
    withdrawn: int = 0
    declined: int = 0
    crowded_out: int = 0
    refused: int = 0


class HoldTable:
    """All holds of one stage.  Times are seconds on the caller's clock, which never goes back."""

    def __init__(self, hold_s: float, holds_max: int) -> None:
        self.hold_s = hold_s
        self.holds_max = holds_max
        self.counts = HoldCounts()
        # Every change of a deadline sets it to now + hold_s, so moving the hold to the end keeps
        # this in deadline order: the first hold ends first.
        self._by_name: OrderedDict[str, TransferHold] = OrderedDict()
        self._by_ticket: dict[str, TransferHold] = {}
        self._by_rid: dict[int, TransferHold] = {}
        self._ended: list[int] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def offer(
        self,
        rid: int,
        name: str,
        block_ids: Sequence[int],
        tokens: int,
        now: float,
        *,
        state_slot: int | None = None,
    ) -> None:
        """Hold a request's slots for a reader that knows `name`.

        In a full table the hold that would end first is ended now: its request is computed again.
        """
        check(rid not in self._by_rid, "a request has one hold", rid=rid)
        check(name not in self._by_name, "a hold's name is unique", rid=rid)
        self.expire(now)
        if len(self._by_name) >= self.holds_max:
            self.counts.crowded_out += 1
            self._end(next(iter(self._by_name.values())))
        self.counts.offered += 1
        deadline = now + self.hold_s
        hold = TransferHold(
            rid, name, tuple(block_ids), tokens, deadline, now, state_slot=state_slot
        )
        self._by_name[name] = hold
        self._by_rid[rid] = hold

    def open(self, name: str, ticket: str, now: float) -> TransferHold | str:
        """Start the one read of a hold; its time starts anew.  Returns a reason if refused."""
        self.expire(now)
        if not ticket or ticket in self._by_ticket:
            self.counts.refused += 1
            return "the ticket is empty or in use"
        hold = self._by_name.get(name)
        if hold is None:
            self.counts.refused += 1
            return "the hold is unknown, has expired or was cancelled"
        if hold.ticket:
            self.counts.refused += 1
            return "the hold was already opened by a reader; a hold is read once"
        hold.ticket = ticket
        self._by_ticket[ticket] = hold
        self._restart(hold, now)
        return hold

    def renew(self, ticket: str, now: float) -> bool:
        """Start the hold's time anew; False if it has ended."""
        self.expire(now)
        hold = self._by_ticket.get(ticket)
        if hold is None:
            return False
        self._restart(hold, now)
        return True

    def close(self, ticket: str, now: float) -> bool:
        """End a read; True if the slots were held until now."""
        self.expire(now)
        hold = self._by_ticket.get(ticket)
        if hold is None:
            return False
        self.counts.read += 1
        self._end(hold)
        return True

    def decline(self, name: str, now: float) -> bool:
        """End a hold that nobody opened and nobody will; False if it is not in that state."""
        self.expire(now)
        hold = self._by_name.get(name)
        if hold is None or hold.ticket:
            return False
        self.counts.declined += 1
        self._end(hold)
        return True

    def withdraw(self, rid: int) -> bool:
        """End a request's hold, if it has one: the request was cancelled.  Idempotent."""
        hold = self._by_rid.get(rid)
        if hold is None:
            return False
        self.counts.withdrawn += 1
        self._end(hold)
        return True

    def expire(self, now: float) -> None:
        """End every hold whose deadline has come."""
        while self._by_name and now >= (hold := next(iter(self._by_name.values()))).deadline:
            self.counts.expired += 1
            self._end(hold)

    def take_ended(self) -> list[int]:
        """Return the requests whose hold ended since the last call, each once, in order."""
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        """Return when the next hold ends if nothing happens."""
        return next((hold.deadline for hold in self._by_name.values()), None)

    def oldest_age_s(self, now: float) -> float:
        """Return how long the oldest hold has been there; 0 without holds."""
        return max((now - hold.offered_at for hold in self._by_name.values()), default=0.0)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the three indexes disagree."""
        check(len(self._by_rid) == len(self._by_name), "one hold per request")
        check(len(self._by_name) <= self.holds_max, "the table is bounded")
        for hold in self._by_name.values():
            check(self._by_rid.get(hold.rid) is hold, "indexes agree", rid=hold.rid)
        reading = [hold for hold in self._by_name.values() if hold.ticket]
        check(
            {hold.ticket: hold for hold in reading} == self._by_ticket,
            "exactly the holds being read have a ticket",
        )
        deadlines = [hold.deadline for hold in self._by_name.values()]
        check(deadlines == sorted(deadlines), "holds are kept in deadline order")

    def _restart(self, hold: TransferHold, now: float) -> None:
        hold.deadline = now + self.hold_s
        self._by_name.move_to_end(hold.name)

    def _end(self, hold: TransferHold) -> None:
        del self._by_name[hold.name]
        del self._by_rid[hold.rid]
        if hold.ticket:
            del self._by_ticket[hold.ticket]
        self._ended.append(hold.rid)
