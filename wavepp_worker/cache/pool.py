"""The slots of one window: who may use which, and what is given up when room is needed.

    free + evictable + reserved + referenced = total                                 [I16]

Production order of slots: empty ones first, then evictable blocks, oldest first and leaves
before parents.  A block with references or an owner is never taken.  No operation scans the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import BlockId, RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.eviction import EvictionOrder
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.tree import PrefixTree


class BlockPool:
    """Slots 0 .. total-1 of one window, with their tree and eviction order."""

    def __init__(self, window: int, slots: int, index: HintIndex) -> None:
        self.window = window
        self.total_count = slots
        self.tree = PrefixTree(window, index)
        self._blocks = [Block(BlockId(slot)) for slot in range(slots)]
        self._free = self._blocks[::-1]  # a stack: the slot used last is used again first
        self._order = EvictionOrder(self._blocks)
        self.reserved_count = 0
        self.referenced_count = 0
        self.evicted_total = 0

    @property
    def free_count(self) -> int:
        """Slots that hold nothing and belong to nobody."""
        return len(self._free)

    @property
    def evictable_count(self) -> int:
        """Attached blocks that belong to nobody."""
        return self._order.count

    @property
    def available_count(self) -> int:
        """Slots that a new promise may use."""
        return len(self._free) + self._order.count

    def pin(self, blocks: Sequence[Block]) -> None:
        """Reference attached blocks, given root first.

        An owned block keeps its owner; the caller moves that reservation in the same section.
        """
        remove = self._order.remove
        for block in blocks:
            if block.refs == 0:
                self.referenced_count += 1
                if block.is_evictable:
                    remove(block)
            block.refs += 1

    def unpin(self, blocks: Sequence[Block], *, is_use: bool = True) -> None:
        """Give back one reference on each block, given root first; released leaf first.

        Leaf first makes a leaf older than its parent.  With `is_use` false a block keeps the age
        it had, as if it had never been pinned.
        """
        for block in reversed(blocks):
            check(block.refs > 0, "unpinned without a reference", slot=block.slot)
            block.refs -= 1
            if block.refs == 0:
                self.referenced_count -= 1
                if is_use:
                    self._order.stamp(block)
                if block.owner is None:
                    self._settle(block)

    def reserve(self, count: int, owner: RequestId) -> list[Block]:
        """Promise `count` slots, no more than are available, to `owner`, in production order.

        Victims stay attached and matchable.
        """
        check(count <= self.available_count, "reserves what is available", count=count)
        taken: list[Block] = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = self._order.oldest()
                self._order.remove(block)
            block.owner = owner
            taken.append(block)
        self.reserved_count += count
        return taken

    def unreserve(self, block: Block) -> None:
        """End a promise; an unreferenced block falls back to its old age."""
        check(block.owner is not None, "unreserved without an owner", slot=block.slot)
        block.owner = None
        self.reserved_count -= 1
        if block.refs == 0:
            self._settle(block)

    def take(self) -> Block:
        """Return one available slot, emptied, with one reference for its sequence."""
        if not self._free:
            self._evict(self._order.oldest())
        block = self._free.pop()
        block.refs = 1
        self.referenced_count += 1
        return block

    def evict(self, count: int) -> int:
        """Empty `count` evictable blocks in eviction order, or all; return how many went.

        An evictable block below a referenced one goes with its ancestor, so it may be more.
        """
        before = self._order.count
        while self._order.count and before - self._order.count < count:
            self._evict(self._order.oldest())
        return before - self._order.count

    def _evict(self, block: Block) -> None:
        """Detach an evictable block and all below it, children first; free it last.  [A49]

        A descendant that is referenced stays with its holder, one that is reserved stays
        reserved; only slots with neither become free.
        """
        for node in reversed(self.tree.subtree(block)):
            if node.is_evictable:
                self._order.remove(node)
                self._free.append(node)
            self.tree.detach(node)
            self.evicted_total += 1

    def _settle(self, block: Block) -> None:
        """Put a slot that belongs to nobody where it can be found."""
        if block.parent is None:
            self._free.append(block)
        else:
            self._order.add(block)

    def check_invariants(self, refs: Mapping[int, int], owners: Mapping[int, int]) -> None:
        """Compare the books with what leases, sequences and escrows claim.  [I9, I15, I16]

        Args:
            refs: slot -> references claimed by leases and sequences.
            owners: slot -> request whose escrow lists the slot.
        """
        self.tree.check_invariants()
        self._order.check_invariants()
        free = {block.slot for block in self._free}
        check(len(free) == len(self._free), "a slot is free once")
        counts = {"free": 0, "evictable": 0, "reserved": 0, "referenced": 0}
        for block in self._blocks:
            slot, is_attached = block.slot, block.parent is not None
            check(block.refs == refs.get(slot, 0), "references", slot=slot, refs=block.refs)
            check(block.owner == owners.get(slot), "owner", slot=slot, owner=block.owner)
            check(block.owner is None or block.refs == 0, "owned and referenced [I15]", slot=slot)
            if block.refs:
                condition = "referenced"
            elif block.owner is not None:
                condition = "reserved"
            else:
                condition = "evictable" if is_attached else "free"
            counts[condition] += 1
            check(block.is_evictable == (condition == "evictable"), "evictable flag", slot=slot)
            check((slot in free) == (condition == "free"), "free list", slot=slot)
            check(is_attached or not block.children, "a detached block has children", slot=slot)
        check(
            counts
            == {
                "free": self.free_count,
                "evictable": self.evictable_count,
                "reserved": self.reserved_count,
                "referenced": self.referenced_count,
            },
            "conservation [I16]",
            window=self.window,
            counts=counts,
        )
        check(sum(counts.values()) == self.total_count, "total [I16]", window=self.window)
