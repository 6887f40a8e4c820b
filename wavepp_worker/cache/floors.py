"""Capacity that leases and escrows leave alone.  [algorithms 7.3]"""

from __future__ import annotations


def floor_blocks(total_blocks: int, floor_fraction: float, floor_headroom_blocks: int) -> int:
    """Return how many slots of an attention pool stay available after every prepare and commit.

    Args:
        total_blocks: slots of the pool.
        floor_fraction: share of the pool.
        floor_headroom_blocks: upper bound, ceil(kappa_f * 2PM / B).
    """
    return min(floor_headroom_blocks, int(floor_fraction * total_blocks))


def floor_states(total_slots: int) -> int:
    """Return the same for a pool of recurrent states, which is small by design."""
    return min(2, total_slots // 10)
