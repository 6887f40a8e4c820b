"""Hint search on the index: gallop, then bisect.  [algorithms 4.3, 4.4]

A 200,000-token prompt at B = 64 has 3,124 candidate depths; a dense chain is settled in at most
2 * ceil(log2(3,125)) = 24 lookups.  Nothing is referenced or reserved [I6], so the result may be
stale by the time a lease is taken; the lease walks the tree itself.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from wavepp_worker.base.types import SequenceHash, Tokens
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.request import KnownRequest


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


def hint_endpoint(
    index: HintIndex, request: KnownRequest, cap: int | None = None
) -> tuple[Tokens, int]:
    """Return (deepest endpoint that every window seems to hold, lookups made).

    The endpoint is in tokens, block-aligned, at most `cap` and E_max(n).  [I5]
    """
    limit = request.endpoint_max // request.block_tokens
    if cap is not None:
        limit = min(limit, cap // request.block_tokens)
    probes = 0
    for present in index.windows:  # later windows search a shorter range
        limit, used = dense_prefix(present, request.keys, limit)
        probes += used
    return Tokens(limit * request.block_tokens), probes
