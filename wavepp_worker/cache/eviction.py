"""Which evictable block of a tier goes next: oldest first, leaves before parents.

A block is *ready* when no child of it is evictable on the same tier.  Only ready blocks are in the
heap, keyed by age; taking a leaf makes its parent ready.  So pinning or releasing a chain of 3,000
blocks costs one heap entry, not 3,000.  Entries are not withdrawn when a block stops being ready
or moves to the other tier; they are recognised as stale when they surface, and swept when they
outnumber the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.cache.block import Block


class EvictionOrder:
    """The evictable blocks of one tier, in the order in which they would be evicted.

    Args:
        blocks: all blocks of the pool, of both tiers: a block's number is its index.
        is_host: the tier.
    """

    def __init__(self, blocks: Sequence[Block], *, is_host: bool) -> None:
        self._blocks = blocks
        self._is_host = is_host
        self._tier = int(is_host)  # index into `evictable_children`
        self._ready: list[tuple[int, int]] = []  # (age, number), some stale
        self._ready_max = 2 * len(blocks) + 64
        self.count = 0

    def add(self, block: Block) -> None:
        """Enter an attached block, at its own age."""
        tier = self._tier
        block.is_evictable = True
        self.count += 1
        parent = block.parent
        if parent is not None:
            parent.evictable_children[tier] += 1
        if not block.evictable_children[tier]:
            self._push(block)

    def remove(self, block: Block) -> None:
        """Withdraw a block that is about to be pinned, reserved, moved or detached."""
        tier = self._tier
        block.is_evictable = False
        self.count -= 1
        parent = block.parent
        if parent is not None:
            waiting = parent.evictable_children
            waiting[tier] -= 1
            if not waiting[tier] and parent.is_evictable and parent.is_host is self._is_host:
                self._push(parent)

    def oldest(self) -> Block:
        """Return the next victim, without withdrawing it."""
        ready, tier = self._ready, self._tier
        while ready:
            age, number = ready[0]
            block = self._blocks[number]
            if (
                block.age == age
                and block.is_evictable
                and block.is_host is self._is_host
                and not block.evictable_children[tier]
            ):
                return block
            heappop(ready)
        raise InvariantError(f"no evictable block is ready [I16] evictable={self.count}")

    def _holds(self, block: Block) -> bool:
        return block.is_evictable and block.is_host is self._is_host

    def _is_ready(self, block: Block) -> bool:
        return self._holds(block) and block.evictable_children[self._tier] == 0

    def _push(self, block: Block) -> None:
        heappush(self._ready, (block.age, block.number))
        if len(self._ready) > self._ready_max:  # O(pool) once per O(pool) pushes
            self._ready = [(b.age, b.number) for b in self._blocks if self._is_ready(b)]
            heapify(self._ready)

    def check_invariants(self) -> None:
        """Re-derive the count and the ready heap."""
        evictable = [block for block in self._blocks if self._holds(block)]
        check(len(evictable) == self.count, "evictable count [I16]", counted=self.count)
        entries = set(self._ready)
        for block in self._blocks:
            children = sum(self._holds(child) for child in block.children.values())
            check(
                block.evictable_children[self._tier] == children,
                "evictable children [I16]",
                number=block.number,
            )
        for block in evictable:
            is_queued = not self._is_ready(block) or (block.age, block.number) in entries
            check(is_queued, "a ready block is queued [I16]", number=block.number)
