"""One slot of a window's pool, and its place in the tree and in the eviction order.

A slot is in exactly one of four conditions:

    free        not attached, no reference, no owner
    evictable   attached, no reference, no owner
    reserved    an escrow owns it; attached or empty; no reference
    referenced  leases or sequences hold it; attached, or private to one sequence

"Available" is free + evictable.  Offload and onboard exchange the physical slots of two blocks,
one with content and one without, so content keeps its block: key, links, references and age.
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
        "is_host",
        "key",
        "number",
        "owner",
        "parent",
        "refs",
        "slot",
    )

    def __init__(self, number: int, slot: BlockId, *, is_host: bool = False) -> None:
        self.number = number
        """Names the block within its pool, for ever."""
        self.slot = slot
        """Where it lies now, within its tier."""
        self.is_host = is_host
        self.refs = 0
        """Leases and sequences that name this slot."""
        self.owner: RequestId | None = None
        """The request whose escrow reserved it, as a slot or as a host destination."""
        self.key = NO_KEY
        """Meaningful while attached."""
        self.parent: Block | None = None
        """Tree parent (the root is a block without a slot); None: not attached."""
        self.children: dict[SequenceHash, Block] = {}
        self.age = 0
        """Turn at which the last reference went; smaller is evicted earlier."""
        self.is_evictable = False
        self.evictable_children = [0, 0]
        """On the device, on the host."""


def exchange_slots(block: Block, other: Block) -> None:
    """Let two blocks of different tiers change places; the caller keeps the tiers' books."""
    block.slot, other.slot = other.slot, block.slot
    block.is_host, other.is_host = other.is_host, block.is_host
