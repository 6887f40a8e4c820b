"""The cache's own audit: what leases, escrows and sequences claim against what the pools hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.parts import Window
from wavepp_worker.cache.sequence import Sequence


def check_books(
    windows: Seq[Window],
    leases: Mapping[RequestId, Lease],
    escrows: Mapping[RequestId, Escrow],
    sequences: Mapping[RequestId, Sequence],
) -> None:
    """Raise InvariantError unless I1, I2, I8, I9, I15-I17, I20 and I23 hold.

    Cost: O(all slots).
    """
    check(leases.keys().isdisjoint(sequences), "leased and admitted [I14]")
    check(escrows.keys() <= leases.keys(), "an escrow has a lease [I21]")
    for lease in leases.values():
        _check_lease(lease)
    for rid, escrow in escrows.items():
        _check_escrow(escrow, leases[rid])
    for window, rules in enumerate(windows):
        refs: Counter[int] = Counter()
        owners: dict[int, int] = {}
        for lease in leases.values():
            refs.update(block.number for block in lease.parts[window].blocks)
        for sequence in sequences.values():
            refs.update(block.number for block in sequence.parts[window].blocks)
            sequence.parts[window].check_invariants()
        for rid, escrow in escrows.items():
            for block in escrow.promises[window].owned():
                check(block.number not in owners, "two owners [I15]", number=block.number)
                owners[block.number] = rid
        rules.pool.check_invariants(refs, owners)
        by_count = sum(escrow.promises[window].count for escrow in escrows.values())
        booked = rules.pool.counted + rules.pool.device.reserved_count
        check(by_count == booked, "promises add up [I17]", window=window, booked=booked)


def check_waiting(rids: Seq[int], *tables: Mapping[RequestId, object]) -> None:
    """Raise InvariantError if a request that waits holds anything.  [I29]

    With the audit above, no lease, escrow or sequence means no reference, owner or destination.
    """
    for rid in rids:
        for table in tables:
            check(RequestId(rid) not in table, "waits and holds [I29]", rid=rid)


def _check_lease(lease: Lease) -> None:
    request = lease.request
    is_aligned = lease.endpoint % request.block_tokens == 0
    check(is_aligned, "endpoints are aligned [I8]", rid=request.rid, endpoint=lease.endpoint)
    is_short = lease.endpoint < request.prompt_tokens
    check(is_short, "last token is computed [I8]", rid=request.rid, endpoint=lease.endpoint)
    for part in lease.parts:
        part.check_invariants(lease.endpoint // request.block_tokens)


def _check_escrow(escrow: Escrow, lease: Lease) -> None:
    is_above = lease.endpoint <= escrow.endpoint
    check(is_above, "a lease only falls under its escrow [I25]", rid=escrow.rid)
    if escrow.is_committed:
        is_same = escrow.endpoint == lease.endpoint
        check(is_same, "commits at the lease [I17]", rid=escrow.rid)
    for promise, part in zip(escrow.promises, lease.parts, strict=True):
        promise.check_invariants(part, escrow.endpoint, is_committed=escrow.is_committed)
