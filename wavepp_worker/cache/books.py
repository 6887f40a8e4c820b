"""Pictures of the books for views and metrics; they decide nothing."""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.cache.outcomes import RankView
from wavepp_worker.cache.pool import BlockPool

GAUGES = {
    "free": "wavepp_free_blocks",
    "cached": "wavepp_cached_blocks",
    "referenced": "wavepp_referenced_blocks",
    "reserved": "wavepp_reserved_blocks",
    "total": "wavepp_pool_blocks",
    "host_free": "wavepp_host_free_blocks",
    "host_cached": "wavepp_host_cached_blocks",
    "host_referenced": "wavepp_host_referenced_blocks",
    "host_reserved": "wavepp_host_reserved_blocks",
    "host_total": "wavepp_host_pool_blocks",
}
"""Field of `RankView` -> metric, per window."""


def view_of(
    pools: Sequence[BlockPool], lease_count: int, escrow_count: int, sequence_count: int
) -> RankView:
    """Return keys and counts.  Cost: O(attached blocks)."""
    return RankView(
        keys=tuple(tuple(block.key for block in pool.tree.attached()) for pool in pools),
        **_counts(pools),
        lease_count=lease_count,
        escrow_count=escrow_count,
        sequence_count=sequence_count,
    )


def pool_stats(pools: Sequence[BlockPool]) -> dict[str, float]:
    """Return counters summed over windows, and gauges per window."""
    values: dict[str, float] = {
        "wavepp_evicted_blocks_total": sum(pool.evicted_total for pool in pools),
        "wavepp_dropped_blocks_total": sum(pool.dropped_total for pool in pools),
        "wavepp_offloaded_blocks_total": sum(pool.offloaded_total for pool in pools),
        "wavepp_onboarded_blocks_total": sum(pool.onboarded_total for pool in pools),
    }
    for name, counts in _counts(pools).items():
        for window, count in enumerate(counts):
            values[f'{GAUGES[name]}{{window="{window}"}}'] = count
    return values


def _counts(pools: Sequence[BlockPool]) -> dict[str, tuple[int, ...]]:
    """Return slots per window by condition; those of a tier add up to its total.

    Slots promised by count are shown as reserved, and taken from the free ones first, as
    materialisation will.
    """
    return {
        "free": tuple(max(0, pool.device.free_count - pool.counted) for pool in pools),
        "cached": tuple(
            pool.device.evictable_count - max(0, pool.counted - pool.device.free_count)
            for pool in pools
        ),
        "referenced": tuple(pool.device.referenced_count for pool in pools),
        "reserved": tuple(pool.device.reserved_count + pool.counted for pool in pools),
        "total": tuple(pool.device.total_count for pool in pools),
        "host_free": tuple(pool.host.free_count for pool in pools),
        "host_cached": tuple(pool.host.evictable_count for pool in pools),
        "host_referenced": tuple(pool.host.referenced_count for pool in pools),
        "host_reserved": tuple(pool.host.reserved_count for pool in pools),
        "host_total": tuple(pool.host.total_count for pool in pools),
    }
