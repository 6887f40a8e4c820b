"""Capacity that leases and escrows leave alone.  [algorithms 7.3]"""

from __future__ import annotations


def floor_blocks(total_blocks: int, floor_fraction: float, floor_headroom_blocks: int) -> int:
    """Return how many slots of a pool stay available after every prepare and commit.

    Args:
        total_blocks: slots of the pool.
        floor_fraction: share of the pool.
        floor_headroom_blocks: upper bound, ceil(kappa_f * 2PM / B).
    """
    return min(floor_headroom_blocks, int(floor_fraction * total_blocks))
