"""How deep a prompt can be resumed, by the rule of each kind of window.  [algorithms 4.3, 4.4]

    dense       the leading blocks present: gallop, then bisect
    sliding     the deepest endpoint with its last blocks present: scan back, counting the run
    recurrent   the deepest endpoint with a snapshot: scan back

On the index the result is a hint: nothing is referenced or reserved [I6], so it may be stale by
the time a lease is taken; the lease applies the same rules to the tree itself.  A 200,000-token
prompt at B = 64 has 3,124 candidate depths; a dense chain is settled in at most
2 * ceil(log2(3,125)) = 24 lookups, a scan back needs one per block that it passes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from wavepp_worker.base.types import SequenceHash

Reach = Callable[[int], int]
"""Deepest endpoint that one window can resume, at most the one given; both in blocks."""
Search = Callable[[Sequence[SequenceHash], int], tuple[int, int]]
"""The same by one window's index, for any keys; with the lookups made."""


def dense_prefix(
    present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
) -> tuple[int, int]:
    """Return (leading blocks present, at most `limit`; lookups made).

    Exact when the present depths form a prefix [I2], with at most 2 * ceil(log2(limit + 1))
    lookups [I4].
    """
    depth, step, probes = 0, 1, 0
    while True:
        tried = min(step, limit)
        if tried == depth:
            return depth, probes
        probes += 1
        if keys[tried - 1] not in present:
            break
        depth = tried
        step *= 2
    absent = tried
    while absent - depth > 1:  # present(depth) or depth == 0; not present(absent)
        middle = (depth + absent) // 2
        probes += 1
        if keys[middle - 1] in present:
            depth = middle
        else:
            absent = middle
    return depth, probes


def sliding_depth(
    present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int, needed: int
) -> tuple[int, int]:
    """Return (deepest endpoint in blocks whose last `needed` blocks are present; lookups made).

    Near the start of the prompt as many blocks are needed as there are.  [A6]
    """
    depth, probes = limit, 0  # blocks [index, depth) are present
    for index in range(limit - 1, -1, -1):
        if depth - index > needed:
            break
        probes += 1
        if keys[index] not in present:
            depth = index
    return depth, probes


def snapshot_depth(
    present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
) -> tuple[int, int]:
    """Return (deepest endpoint in blocks that has a snapshot, 0 without any; lookups made)."""
    depth = limit
    while depth > 0 and keys[depth - 1] not in present:
        depth -= 1
    return depth, limit - depth + (depth > 0)


def common_depth(dense: Sequence[Reach], sparse: Sequence[Reach], limit: int) -> int:
    """Return the deepest endpoint, at most `limit` blocks, that all windows can resume.

    A dense window that reaches some depth reaches every smaller one, so it is asked once; sparse
    windows are asked in turn until none of them lowers the endpoint.
    """
    for reach in dense:
        limit = reach(limit)
    while True:
        depth = limit
        for reach in sparse:
            depth = reach(depth)
        if depth == limit or len(sparse) == 1:
            return depth
        limit = depth


def hint_depth(
    dense: Sequence[Search], sparse: Sequence[Search], keys: Sequence[SequenceHash], limit: int
) -> tuple[int, int, int]:
    """Return what the index suggests: (depth, depth of the dense windows alone, lookups)."""
    probes = 0

    def reach(search: Search, limit: int) -> int:
        nonlocal probes
        depth, used = search(keys, limit)
        probes += used
        return depth

    for search in dense:
        limit = reach(search, limit)
    depth = limit
    if sparse:
        depth = common_depth((), [partial(reach, search) for search in sparse], limit)
    return depth, limit, probes
