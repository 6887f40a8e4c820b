"""Escrows: slots promised to one request, so that what is committed cannot fail.  [P-ESCROW]

A reserved slot is empty or a *victim*: a block that stays attached, matchable and indexed until
materialisation really evicts it.  A lease may claim a victim; its reservation then moves to
another slot in the same section, so an owned slot never has references.  [algorithms 7]
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import BlockId, RequestId, Tokens
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.request import KnownRequest


class Escrow:
    """The reservation of one attempt."""

    __slots__ = ("endpoint", "has_failed", "is_committed", "reserved", "rid")

    def __init__(self, rid: RequestId, endpoint: Tokens, windows_count: int) -> None:
        self.rid = rid
        self.endpoint = endpoint
        """The endpoint that the reservation was made for."""
        self.is_committed = False
        self.has_failed = False
        """A commit failed: undoing this attempt is no news to other requests.  [algorithms 8.4]"""
        self.reserved: list[dict[BlockId, Block]] = [{} for _ in range(windows_count)]
        """Per window, in the order of reservation."""

    def add(self, window: int, blocks: Sequence[Block]) -> None:
        """List blocks that the pool has reserved for this request."""
        self.reserved[window].update((block.slot, block) for block in blocks)


def demand_blocks(request: KnownRequest, endpoint: Tokens) -> int:
    """Return the new blocks that a dense window needs from `endpoint` on.  [algorithms E8]"""
    return request.block_count - endpoint // request.block_tokens


def missing_blocks(
    pools: Sequence[BlockPool], floors: Sequence[int], needs: Sequence[int]
) -> tuple[int, ...]:
    """Return, per window, how many slots are missing to take `needs` above the floors."""
    return tuple(
        max(0, need + floor - pool.available_count)
        for pool, floor, need in zip(pools, floors, needs, strict=True)
    )


def grow_escrow(escrow: Escrow, pools: Sequence[BlockPool], needs: Sequence[int]) -> None:
    """Reserve `needs` further slots per window; the caller has checked that they are there."""
    for window, (pool, need) in enumerate(zip(pools, needs, strict=True)):
        escrow.add(window, pool.reserve(need, escrow.rid))


def extra_needs(escrow: Escrow, lease: Lease) -> tuple[int, ...]:
    """Return, per window, what a commit at the lease's endpoint needs beyond the reservation.

    A lease only falls after prepare, so demand only grows.  [I25]
    """
    need = demand_blocks(lease.request, lease.endpoint)
    extra = tuple(need - len(blocks) for blocks in escrow.reserved)
    check(min(extra) >= 0, "demand fell under an escrow", rid=escrow.rid, extra=extra)
    return extra


def vacate(escrow: Escrow, pool: BlockPool, block: Block) -> bool:
    """Move the reservation on `block`, which a claimer has pinned already.  [algorithms 7.6]

    Returns:
        False if no slot is available for the owner; then nothing changed.
    """
    check(block.refs > 0, "vacates a pinned victim", slot=block.slot)
    if not pool.available_count:
        return False
    escrow.add(pool.window, pool.reserve(1, escrow.rid))
    del escrow.reserved[pool.window][block.slot]
    pool.unreserve(block)
    return True


def release_escrow(escrow: Escrow, pools: Sequence[BlockPool]) -> None:
    """Give every reserved slot back; victims fall back to their old age."""
    for pool, blocks in zip(pools, escrow.reserved, strict=True):
        for block in blocks.values():
            pool.unreserve(block)
        blocks.clear()
