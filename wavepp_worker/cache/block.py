"""One slot of a window's pool, and its place in the tree and in the eviction order.

A slot is in exactly one of four conditions:

    free        not attached, no reference, no owner
    evictable   attached, no reference, no owner
    reserved    an escrow owns it; attached or empty; no reference
    referenced  leases or sequences hold it; attached, or private to one sequence

"Available" is free + evictable.
"""

from __future__ import annotations

from wavepp_worker.base.types import BlockId, RequestId, SequenceHash

NO_KEY = SequenceHash(b"")


class Block:
    """Mutable record of one slot; compared by identity."""

    __slots__ = (
        "age",
        "children",
        "evictable_children",
        "is_evictable",
        "key",
        "owner",
        "parent",
        "refs",
        "slot",
    )

    def __init__(self, slot: BlockId) -> None:
        self.slot = slot
        self.refs = 0
        """Leases and sequences that name this slot."""
        self.owner: RequestId | None = None
        """The request whose escrow reserved it."""
        self.key = NO_KEY
        """Meaningful while attached."""
        self.parent: Block | None = None
        """Tree parent (the root is a block without a slot); None: not attached."""
        self.children: dict[SequenceHash, Block] = {}
        self.age = 0
        """Turn at which the last reference went; smaller is evicted earlier."""
        self.is_evictable = False
        self.evictable_children = 0
