"""How device slots are promised: one by one (attention), or by count (recurrent state).

A promised slot is empty or a *victim*: a block that stays attached, matchable and indexed until
materialisation really takes it.  A victim that would be offloaded has a host destination, which is
empty or itself still holds content.  A lease may claim either; the promise then moves in the same
section, so that an owned block never has references.  [algorithms 7]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wavepp_worker.base.errors import check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.parts import LeasePart
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.snapshots import granted_snapshots
from wavepp_worker.wire.mailbox import Copy


class SlotPromise:
    """Concrete slots of an attention window.

    Args:
        suffix_blocks: how many slots a run from an endpoint writes.
    """

    def __init__(
        self, rid: RequestId, pool: BlockPool, suffix_blocks: Callable[[int], int]
    ) -> None:
        self._rid = rid
        self._pool = pool
        self._suffix_blocks = suffix_blocks
        self.slots: dict[Block, Block | None] = {}
        """Promised slot -> host destination of its content, in the order of reservation."""
        self._victims: dict[Block, Block] = {}
        """The same backwards: host destination -> slot."""
        self._filled_count = 0

    @property
    def count(self) -> int:
        """Slots promised."""
        return len(self.slots)

    def demand(self, part: LeasePart, endpoint: int) -> int:
        """Return the new slots that a run needs: for its suffix, and to onboard its prefix.

        [algorithms E8, A13]
        """
        onboarding = 0
        if self._pool.host.referenced_count:
            onboarding = sum(block.is_host for block in part.blocks)
        return self._suffix_blocks(endpoint) + onboarding

    def missing(self, part: LeasePart, endpoint: int, floor: int) -> int:
        """See `Promise`."""
        extra = self.demand(part, endpoint) - self.count
        return max(0, extra + floor - self._pool.available_count)

    def fill(self, part: LeasePart, endpoint: int) -> None:
        """See `Promise`.  Another request may have onboarded a shared block since prepare."""
        need = self.demand(part, endpoint)
        if need < self.count:
            mark("escrow.surplus_returned")
        while self.count > need:
            self._give_back(next(reversed(self.slots)))
        slots = self._pool.reserve(max(0, need - self.count), self._rid)
        self.slots.update(slots)
        self._victims.update({host: slot for slot, host in slots.items() if host is not None})
        self._filled_count = need

    def vacate(self, block: Block) -> bool:
        """Move the promise away from `block`, which a claimer has pinned.  [algorithms 7.6]

        Returns:
            False if no slot is available for it; then nothing changed.  A host destination is
            always let go: without another one its victim will be dropped.
        """
        check(block.refs > 0, "vacates a pinned block [I15]", number=block.number)
        if block in self.slots:
            if not self._pool.available_count:
                mark("lease.claim_cut")
                return False
            mark("lease.victim_claimed")
            self._give_back(block)
            self._list(*self._pool.reserve_one(self._rid))
            return True
        victim = self._victims.pop(block)
        self._pool.unreserve(block)
        destination = self._pool.reserve_host(self._rid)
        mark("lease.destination_lost" if destination is None else "lease.destination_claimed")
        self._list(victim, destination)
        return True

    def exchange(self, copies: list[Copy]) -> Iterator[Block]:
        """Yield one taken slot for each that is promised, giving the promised one back first.

        So slots taken plus slots still promised stay constant [I23], and a victim survives if
        something older or empty turned up since it was chosen [A19]: with as many slots given
        back as taken, the result is the best choice among all available and all promised.
        """
        give_back, take = self._give_back, self._pool.take
        for block in list(self.slots):
            give_back(block)
            taken = take(copies)
            if taken is not block and block.is_evictable and not block.is_host:
                mark("sequence.victim_survived")
            yield taken

    def release(self) -> None:
        """Give back whatever is still promised; victims fall back to their old age."""
        for block in list(self.slots):
            self._give_back(block)

    def owned(self) -> Iterator[Block]:
        """Yield every slot and host destination that this promise owns."""
        yield from self.slots
        yield from self._victims

    def check_invariants(self, part: LeasePart, endpoint: int, *, is_committed: bool) -> None:
        """The promise is what it was filled to, and covers the demand.  [I17, I20]"""
        rid, held = self._rid, self.count
        check(held == self._filled_count, "promise as filled [I17]", rid=rid, held=held)
        check(held >= self._suffix_blocks(endpoint), "covers the suffix [I17]", rid=rid, held=held)
        if is_committed:
            check(held >= self.demand(part, endpoint), "covers the demand [I17]", rid=rid)
        destinations = {slot: host for slot, host in self.slots.items() if host is not None}
        backwards = {slot: host for host, slot in self._victims.items()}
        check(destinations == backwards, "destinations [I20]", rid=rid)
        check(all(host.is_host for host in self._victims), "destination is host [I20]", rid=rid)
        check(not any(slot.is_host for slot in self.slots), "a slot is on the device [I17]")

    def _list(self, slot: Block, destination: Block | None) -> None:
        self.slots[slot] = destination
        if destination is not None:
            self._victims[destination] = slot

    def _give_back(self, block: Block) -> None:
        destination = self.slots.pop(block)
        self._pool.unreserve(block)
        if destination is not None:
            del self._victims[destination]
            self._pool.unreserve(destination)


class CountPromise:
    """Slots of a recurrent window by count: one working state, and snapshots as a wish.  [A12]

    Snapshots are a cache, not a need: a short pool stores fewer of them, the last ones, and never
    refuses a request because of them.  [A47]

    Args:
        floor: slots that snapshots leave available, even where floors are waived.
    """

    def __init__(self, request: KnownRequest, pool: BlockPool, floor: int) -> None:
        self._request = request
        self._pool = pool
        self._floor = floor
        self.count = 0
        """Slots promised: the working state, then snapshots."""

    def missing(self, part: LeasePart, endpoint: int, floor: int) -> int:
        """See `Promise`.  Snapshots that were promised before are given up first."""
        return max(0, 1 + floor - self._pool.available_count - self.count)

    def fill(self, part: LeasePart, endpoint: int) -> None:
        """See `Promise`."""
        spare = self._pool.available_count + self.count - 1
        wanted = len(self._request.points_after(endpoint))
        granted = granted_snapshots(wanted, spare, self._floor)
        if granted < wanted:
            mark("escrow.snapshots_short")
        if granted < self.count - 1:
            mark("escrow.snapshots_given_up")
        self._set(1 + granted)

    def vacate(self, block: Block) -> bool:
        """Nothing is owned here, so nothing can be claimed."""
        check(False, "a count owns no block [I15]", number=block.number)
        return False

    def exchange(self, copies: list[Copy]) -> Iterator[Block]:
        """See `Promise`: the working state's slot first."""
        while self.count:
            self._set(self.count - 1)
            yield self._pool.take(copies)

    def release(self) -> None:
        """Give back whatever is still promised."""
        self._set(0)

    def owned(self) -> Iterator[Block]:
        """Yield nothing."""
        return iter(())

    def check_invariants(self, part: LeasePart, endpoint: int, *, is_committed: bool) -> None:
        """A working state is promised, and no more snapshots than the run passes.  [I17]"""
        wanted = len(self._request.points_after(endpoint))
        check(1 <= self.count <= 1 + wanted, "promise of states [I17]", rid=self._request.rid)

    def _set(self, count: int) -> None:
        self._pool.counted += count - self.count
        self.count = count
