"""Sequences: admitted requests that own real slots.  [algorithms 10, 13]

tokens   0 ........ endpoint .............. prompt_tokens
table    [ adopted  |  own, private until published    ]
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Tokens
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.request import KnownRequest


class Sequence:
    """One reference on every block of a prompt, from Install until Freed."""

    __slots__ = ("endpoint", "request", "tables")

    def __init__(self, request: KnownRequest, endpoint: Tokens, tables: Seq[list[Block]]) -> None:
        self.request = request
        self.endpoint = endpoint
        self.tables = tables
        """Per window, the block of every position."""


def materialize(lease: Lease, escrow: Escrow, pools: Seq[BlockPool]) -> Sequence:
    """Turn a lease and a committed escrow into a sequence; empties both.  It cannot fail. [I22]

    Each step gives one reserved slot back and takes the best slot available, so slots taken plus
    slots still reserved stay equal to what was promised [I23].  A victim survives if something
    older or empty turned up since it was chosen [A19]: with as many slots given back as taken,
    the result is the same as choosing the best among all available and all reserved at once.
    The lease's references pass to the sequence: the prefix is never without one.
    """
    tables: list[list[Block]] = []
    for pool, adopted, reserved in zip(pools, lease.blocks, escrow.reserved, strict=True):
        table = list(adopted)
        for block in reserved.values():
            pool.unreserve(block)
            table.append(pool.take())
        check(len(table) == lease.request.block_count, "promise covers the prompt [I23]")
        tables.append(table)
    for reserved in escrow.reserved:  # the escrow ends before its lease  [I21]
        reserved.clear()
    for adopted in lease.blocks:
        adopted.clear()
    return Sequence(lease.request, lease.endpoint, tables)


def publish(sequence: Sequence, end: int, pools: Seq[BlockPool]) -> int:
    """Attach the sequence's own full blocks before token `end`; return how many were attached.

    A key that is present already keeps its block; ours stays private until the sequence is freed,
    because later chunks and the transfer read it through the table [A53].  Blocks that were
    detached since, because an unreferenced ancestor was evicted, are attached again.
    """
    block_tokens = sequence.request.block_tokens
    first = sequence.endpoint // block_tokens
    stop = end // block_tokens
    keys = sequence.request.keys
    attached = 0
    for pool, table in zip(pools, sequence.tables, strict=True):
        tree = pool.tree
        node = table[first - 1] if first else tree.root
        for position in range(first, stop):
            present = node.children.get(keys[position])
            if present is None:
                present = table[position]
                tree.attach(present, node, keys[position])
                attached += 1
            node = present
    return attached


def free_sequence(sequence: Sequence, pools: Seq[BlockPool]) -> None:
    """Give every block back, leaf first; private ones become free."""
    for pool, table in zip(pools, sequence.tables, strict=True):
        pool.unpin(table)
        table.clear()
