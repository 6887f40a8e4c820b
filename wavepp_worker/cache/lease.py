"""Leases: one reference on every block of a reused prefix, in every window.  [P-LEASE]

A lease ends when it is released or when materialisation hands its references to the sequence;
never by time.  Blocks may be shared by any number of leases and sequences.  [algorithms 6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId, Tokens
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.request import KnownRequest

Vacate = Callable[[BlockPool, Block, RequestId], bool]
"""Move the owner's reservation on a pinned block elsewhere; False: no slot is left for it."""


class Lease:
    """The pinned prefix of one attempt: tokens [0, endpoint)."""

    __slots__ = ("attempt", "blocks", "endpoint", "request")

    def __init__(
        self,
        request: KnownRequest,
        attempt: int,
        endpoint: Tokens,
        blocks: list[list[Block]],
    ) -> None:
        self.request = request
        self.attempt = attempt
        self.endpoint = endpoint
        self.blocks = blocks
        """Per window, root first."""


def acquire_lease(
    request: KnownRequest,
    attempt: int,
    cap: int,
    pools: Sequence[BlockPool],
    vacate: Vacate,
) -> Lease:
    """Pin the longest prefix, at most `cap` tokens, that the trees hold and no escrow needs.

    The whole path is pinned before any reservation on it moves, so that no replacement can be
    another block of the same path.  The lease is cut before the first block whose reservation
    has no place to go.  [algorithms 6.1, 7.6]
    """
    check(cap >= 0, "an endpoint is not negative", cap=cap)
    limit = min(request.endpoint_max, cap) // request.block_tokens
    paths: list[list[Block]] = []
    for pool in pools:
        path = pool.tree.walk(request.keys, limit)
        limit = len(path)
        paths.append(path)
    for pool, path in zip(pools, paths, strict=True):
        del path[limit:]
        pool.pin(path)
    for pool, path in zip(pools, paths, strict=True):
        for depth in range(limit):
            block = path[depth]
            owner = block.owner
            if owner is not None and not vacate(pool, block, owner):
                limit = depth
                break
    for pool, path in zip(pools, paths, strict=True):
        pool.unpin(path[limit:], is_use=False)
        del path[limit:]
    return Lease(request, attempt, Tokens(limit * request.block_tokens), paths)


def trim_lease(lease: Lease, cap: int, pools: Sequence[BlockPool]) -> Tokens:
    """Give back the blocks beyond `cap` tokens; return the endpoint left.  [algorithms 6.2]

    Dense windows pin every block, so the result is exactly the smaller of the two.
    """
    check(cap >= 0, "an endpoint is not negative", cap=cap)
    if lease.endpoint > cap:
        limit = cap // lease.request.block_tokens
        for pool, path in zip(pools, lease.blocks, strict=True):
            pool.unpin(path[limit:])
            del path[limit:]
        lease.endpoint = Tokens(limit * lease.request.block_tokens)
    return lease.endpoint


def release_lease(lease: Lease, pools: Sequence[BlockPool]) -> None:
    """Give every block back, leaf first."""
    for pool, path in zip(pools, lease.blocks, strict=True):
        pool.unpin(path)
        path.clear()
