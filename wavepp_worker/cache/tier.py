"""The slots of one tier of a window's pool, by condition.

    free + evictable + reserved + referenced = total                                 [I16]

Production order of slots: empty ones first, then evictable blocks, oldest first and leaves
before parents.  A block with references or an owner is never taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.eviction import EvictionOrder


class SlotTier:
    """Device or host slots of one window.

    Args:
        blocks: all blocks of the pool; those with the same `is_host` start here, empty.
    """

    def __init__(self, blocks: Sequence[Block], *, is_host: bool) -> None:
        self._blocks = blocks
        self._is_host = is_host
        self.free = [block for block in blocks if block.is_host == is_host]
        self.free.reverse()  # a stack: the slot used last is used again first
        self.total_count = len(self.free)
        self.order = EvictionOrder(blocks, is_host=is_host)
        self.reserved_count = 0
        self.referenced_count = 0

    @property
    def free_count(self) -> int:
        """Slots that hold nothing and belong to nobody."""
        return len(self.free)

    @property
    def evictable_count(self) -> int:
        """Attached blocks that belong to nobody."""
        return self.order.count

    @property
    def available_count(self) -> int:
        """Slots that a new promise may use."""
        return len(self.free) + self.order.count

    def reserve_free(self, count: int, owner: RequestId) -> list[Block]:
        """Promise up to `count` empty slots."""
        kept = max(0, len(self.free) - count)
        blocks = self.free[kept:]
        blocks.reverse()
        del self.free[kept:]
        for block in blocks:
            block.owner = owner
        self.reserved_count += len(blocks)
        return blocks

    def reserve(self, owner: RequestId) -> Block:
        """Promise the next available slot in production order; its content stays attached."""
        if self.free:
            block = self.free.pop()
        else:
            block = self.order.oldest()
            self.order.remove(block)
        block.owner = owner
        self.reserved_count += 1
        return block

    def settle(self, block: Block) -> None:
        """Put a slot that belongs to nobody where it can be found."""
        if block.parent is None:
            self.free.append(block)
        else:
            self.order.add(block)

    def check_invariants(self, refs: Mapping[int, int], owners: Mapping[int, int]) -> None:
        """Compare the books with what leases, sequences and escrows claim.  [I9, I15, I16]

        Args:
            refs: block number -> references claimed by leases and sequences.
            owners: block number -> request whose escrow lists the block.
        """
        self.order.check_invariants()
        free = {block.number for block in self.free}
        check(len(free) == len(self.free), "a slot is free once [I16]")
        blocks = [block for block in self._blocks if block.is_host == self._is_host]
        slots = sorted(block.slot for block in blocks)
        check(slots == list(range(self.total_count)), "every slot has one block [I16]")
        counts = {"free": 0, "evictable": 0, "reserved": 0, "referenced": 0}
        for block in blocks:
            number, claimed = block.number, refs.get(block.number, 0)
            check(block.refs == claimed, "references [I9]", number=number, refs=block.refs)
            check(block.owner == owners.get(number), "owner [I15]", number=number, of=block.owner)
            check(not block.refs or block.owner is None, "owned and referenced [I15]", of=number)
            condition = _condition(block)
            counts[condition] += 1
            is_evictable, is_free = condition == "evictable", condition == "free"
            check(block.is_evictable == is_evictable, "evictable flag [I16]", number=number)
            check((number in free) == is_free, "free list [I16]", number=number)
        booked = {
            "free": self.free_count,
            "evictable": self.evictable_count,
            "reserved": self.reserved_count,
            "referenced": self.referenced_count,
        }
        check(counts == booked, "conservation [I16]", counts=counts, booked=booked)
        check(sum(counts.values()) == self.total_count, "total [I16]", counts=counts)


def _condition(block: Block) -> str:
    if block.refs:
        return "referenced"
    if block.owner is not None:
        return "reserved"
    return "free" if block.parent is None else "evictable"
