"""Which evictable block goes next: oldest first, leaves before parents.

A block is *ready* when no child of it is evictable.  Only ready blocks are in the heap, keyed by
age; taking a leaf makes its parent ready.  So pinning or releasing a chain of 3,000 blocks costs
one heap entry, not 3,000.  Entries are not withdrawn when a block stops being ready; they are
recognised as stale when they surface, and swept when they outnumber the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.cache.block import Block


class EvictionOrder:
    """The evictable blocks of one pool, in the order in which they would be evicted."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._ready: list[tuple[int, int]] = []  # (age, slot), some stale
        self._ready_max = 2 * len(blocks) + 64
        self._age = 0
        self.count = 0

    def stamp(self, block: Block) -> None:
        """Make `block` the youngest: its last reference went just now."""
        self._age += 1
        block.age = self._age

    def add(self, block: Block) -> None:
        """Enter an attached block, at its own age."""
        block.is_evictable = True
        self.count += 1
        parent = block.parent
        if parent is not None:
            parent.evictable_children += 1
        if block.evictable_children == 0:
            self._push(block)

    def remove(self, block: Block) -> None:
        """Withdraw a block that is about to be pinned, reserved or detached."""
        block.is_evictable = False
        self.count -= 1
        parent = block.parent
        if parent is not None:
            parent.evictable_children -= 1
            if parent.is_evictable and parent.evictable_children == 0:
                self._push(parent)

    def oldest(self) -> Block:
        """Return the next victim, without withdrawing it."""
        ready = self._ready
        while ready:
            age, slot = ready[0]
            block = self._blocks[slot]
            if block.age == age and block.is_evictable and block.evictable_children == 0:
                return block
            heappop(ready)
        raise InvariantError(f"no evictable block is ready evictable={self.count}")

    def _push(self, block: Block) -> None:
        heappush(self._ready, (block.age, block.slot))
        if len(self._ready) > self._ready_max:  # O(pool) once per O(pool) pushes
            self._ready = [
                (other.age, other.slot)
                for other in self._blocks
                if other.is_evictable and other.evictable_children == 0
            ]
            heapify(self._ready)

    def check_invariants(self) -> None:
        """Re-derive the count and the ready heap."""
        evictable = [block for block in self._blocks if block.is_evictable]
        check(len(evictable) == self.count, "evictable count", counted=self.count)
        entries = set(self._ready)
        for block in self._blocks:
            children = sum(child.is_evictable for child in block.children.values())
            check(block.evictable_children == children, "evictable children", slot=block.slot)
            if block.is_evictable and not children:
                check(
                    (block.age, block.slot) in entries, "a ready block is queued", slot=block.slot
                )
