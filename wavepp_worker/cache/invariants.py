"""The cache's own audit: what leases, escrows and sequences claim against what the pools hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.escrow import Escrow, demand_blocks
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.sequence import Sequence


def check_books(
    pools: Seq[BlockPool],
    leases: Mapping[RequestId, Lease],
    escrows: Mapping[RequestId, Escrow],
    sequences: Mapping[RequestId, Sequence],
) -> None:
    """Raise InvariantError unless I1, I2, I8, I9 and I15-I17 hold.  Cost: O(all slots)."""
    check(leases.keys().isdisjoint(sequences), "leased and admitted")
    check(escrows.keys() <= leases.keys(), "an escrow has a lease [I21]")
    for window, pool in enumerate(pools):
        refs: Counter[int] = Counter()
        owners: dict[int, int] = {}
        for lease in leases.values():
            _check_lease(lease, pool)
            refs.update(block.slot for block in lease.blocks[window])
        for sequence in sequences.values():
            _check_sequence(sequence, pool)
            refs.update(block.slot for block in sequence.tables[window])
        for rid, escrow in escrows.items():
            _check_escrow(escrow, leases[rid], window)
            for slot in escrow.reserved[window]:
                check(slot not in owners, "two owners [I15]", slot=slot)
                owners[slot] = rid
        pool.check_invariants(refs, owners)


def _check_lease(lease: Lease, pool: BlockPool) -> None:
    """A lease is a chain from the root along the request's own keys.  [I8, I9]"""
    rid, path = lease.request.rid, lease.blocks[pool.window]
    check(
        len(path) * lease.request.block_tokens == lease.endpoint,
        "lease covers its endpoint [I8]",
        rid=rid,
    )
    check(lease.endpoint < lease.request.prompt_tokens, "last token is computed", rid=rid)
    _check_chain(path, lease.request.keys, pool, rid)


def _check_sequence(sequence: Sequence, pool: BlockPool) -> None:
    """A table covers the prompt; adopted blocks are attached, own ones attached or private."""
    request, table = sequence.request, sequence.tables[pool.window]
    check(len(table) == request.block_count, "table covers the prompt", rid=request.rid)
    check(len({block.slot for block in table}) == len(table), "slot used twice", rid=request.rid)
    first = sequence.endpoint // request.block_tokens
    _check_chain(table[:first], request.keys, pool, request.rid)
    for position in range(first, len(table)):
        block = table[position]
        if block.parent is not None:
            check(block.key == request.keys[position], "published key [I9]", rid=request.rid)
        else:
            check(block.refs == 1, "a private block has one holder", slot=block.slot)


def _check_chain(path: Seq[Block], keys: Seq[bytes], pool: BlockPool, rid: RequestId) -> None:
    node = pool.tree.root
    for block, key in zip(path, keys, strict=False):
        check(block.parent is node and block.key == key, "pinned block moved [I9]", rid=rid)
        check(block.refs > 0, "pinned block is unreferenced [I9]", rid=rid)
        node = block


def _check_escrow(escrow: Escrow, lease: Lease, window: int) -> None:
    held = len(escrow.reserved[window])
    need = demand_blocks(lease.request, escrow.endpoint)
    check(held == need, "reservation covers its endpoint [I17]", rid=escrow.rid, held=held)
    if escrow.is_committed:
        check(escrow.endpoint == lease.endpoint, "commits at the lease [I17]", rid=escrow.rid)
