"""The facade: capacity news, sizes, views, and an audit that notices damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.cache.world import (
    commit,
    dense,
    install,
    key_at,
    learn,
    lease,
    make_cache,
    recurrent,
    serve,
    sliding,
)
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.cache.rank_cache import RankCache, Shortfall


def grows(cache: RankCache, section: Callable[[], object]) -> bool:
    before = cache.capacity_generation
    section()
    assert cache.capacity_generation in (before, before + 1)
    return cache.capacity_generation > before


def test_news_is_room_that_appears() -> None:
    """[algorithms 8.4]"""
    cache = make_cache(12)
    serve(cache, 1, "abcd")
    learn(cache, 2, "abcde")
    assert not grows(cache, lambda: cache.acquire(2, 1, 100))
    assert grows(cache, lambda: cache.trim(2, 2))
    assert not grows(cache, lambda: cache.trim(2, 2))
    assert not grows(cache, lambda: cache.prepare(2))
    assert not grows(cache, lambda: cache.commit(2, 2))
    assert not grows(cache, lambda: cache.materialize(2, 2))
    assert not grows(cache, lambda: cache.publish(2, 5))
    assert not grows(cache, lambda: cache.evict(0, 1))  # evictable or free: available either way
    assert grows(cache, lambda: cache.free(2))


def test_undoing_an_attempt_that_succeeded_here_is_news() -> None:
    cache = make_cache(8)
    commit(cache, 1, "abc")
    assert grows(cache, lambda: cache.release(1))
    assert not grows(cache, lambda: cache.release(1))


def test_undoing_a_failed_prepare_is_no_news() -> None:
    cache = make_cache(6)
    serve(cache, 1, "abcd")
    lease(cache, 2, "abcd123")
    assert not grows(cache, lambda: cache.prepare(2))
    assert not grows(cache, lambda: cache.release(2))


def test_undoing_a_failed_commit_is_no_news() -> None:
    cache = make_cache(10, floor_fraction=0.3)
    serve(cache, 1, "abc")
    lease(cache, 2, "1234567")
    cache.prepare(2)
    lease(cache, 3, "abX")
    assert isinstance(cache.commit(2, 0), Shortfall)
    assert not grows(cache, lambda: cache.release(2))
    assert grows(cache, lambda: cache.release(3))


def test_sizes_follow_the_smallest_window() -> None:
    cache = make_cache(10, 4, block_tokens=8)
    assert cache.total_tokens() == 32
    assert cache.available_tokens() == 32


def test_view_and_stats_agree() -> None:
    cache = make_cache(12)
    serve(cache, 1, "ab")
    install(cache, 2, "xyz")
    commit(cache, 3, "abc")
    view, stats = cache.view(), cache.stats()
    assert view.keys == ((key_at("a"), key_at("ab")),)
    assert view.total == (12,)
    assert stats['wavepp_free_blocks{window="0"}'] == view.free[0] == 6
    assert stats['wavepp_cached_blocks{window="0"}'] == view.cached[0] == 0
    assert stats['wavepp_referenced_blocks{window="0"}'] == view.referenced[0] == 5
    assert stats['wavepp_reserved_blocks{window="0"}'] == view.reserved[0] == 1
    assert stats["wavepp_pool_tokens"] == 12
    assert stats["wavepp_available_tokens"] == 6
    assert stats["wavepp_lease_count"] == stats["wavepp_escrow_count"] == 1
    assert stats["wavepp_sequence_count"] == 1
    assert stats["wavepp_published_blocks_total"] == 2


def test_changes_are_drained_once_in_order() -> None:
    cache = make_cache(4)
    serve(cache, 1, "ab")
    cache.evict(0, 2)
    assert cache.drain_changes() == (
        (True, 0, key_at("a")),
        (True, 0, key_at("ab")),
        (False, 0, key_at("ab")),
        (False, 0, key_at("a")),
    )
    assert cache.drain_changes() == ()


def damage_refs(cache: RankCache) -> None:
    cache._pools[0]._blocks[0].refs += 1


def damage_owner(cache: RankCache) -> None:
    cache._pools[0].tree.walk([key_at("x")], 1)[0].owner = 3


def damage_count(cache: RankCache) -> None:
    cache._pools[0].device.reserved_count += 1


def damage_index(cache: RankCache) -> None:
    cache._index.stored(0, key_at("q"))


def damage_escrow(cache: RankCache) -> None:
    cache._pools[0].unreserve(next(cache._escrows[3].promises[0].owned()))


def damage_free_list(cache: RankCache) -> None:
    cache._pools[0].device.free.pop()


def damage_tree(cache: RankCache) -> None:
    cache._pools[0].tree.root.children.clear()


def damage_order(cache: RankCache) -> None:
    cache._pools[0].device.order._ready.clear()


@pytest.mark.parametrize(
    "damage",
    [
        damage_refs,
        damage_owner,
        damage_count,
        damage_index,
        damage_escrow,
        damage_free_list,
        damage_tree,
        damage_order,
    ],
)
def test_audit_notices_damage(damage: Callable[[RankCache], None]) -> None:
    cache = make_cache(12)
    serve(cache, 1, "xyz")
    install(cache, 2, "ab")
    commit(cache, 3, "def")
    cache.check_invariants()
    damage(cache)
    with pytest.raises(InvariantError):
        cache.check_invariants()


def mixed_cache() -> RankCache:
    """Every kind of window, with host blocks, a lease, an escrow and a sequence."""
    cache = make_cache(dense(9, 8), sliding(8, 2, 2, 8), recurrent(5, 4))
    serve(cache, 1, "zzzzz", points=(4,))
    serve(cache, 2, "abcd", points=(2, 3))
    install(cache, 3, "1234", points=(2,))  # sends some of the first prompt to the host
    assert lease(cache, 4, "abcX") == 3
    commit(cache, 5, "56", points=(1,))
    cache.check_invariants()
    return cache


def damage_destination(cache: RankCache) -> None:
    promise = cache._escrows[5].promises[0]
    host = next(block for block in promise.owned() if block.is_host)
    cache._pools[0].unreserve(host)


def damage_counted(cache: RankCache) -> None:
    cache._pools[2].counted -= 1


def damage_promise_count(cache: RankCache) -> None:
    cache._escrows[5].promises[2].count += 1


def damage_snapshot_lease(cache: RankCache) -> None:
    cache._leases[4].parts[2].depth = 2


def damage_sliding_lease(cache: RankCache) -> None:
    part = cache._leases[4].parts[1]
    part.blocks.append(part.blocks[0])


def damage_working_state(cache: RankCache) -> None:
    cache._sequences[3].parts[2]._working.refs = 2


def damage_slots(cache: RankCache) -> None:
    cache._pools[0]._blocks[0].slot = cache._pools[0]._blocks[1].slot


def damage_tier(cache: RankCache) -> None:
    block = next(block for block in cache._pools[0]._blocks if block.is_host)
    block.is_host = False


def damage_ring(cache: RankCache) -> None:
    part = cache._sequences[3].parts[1]
    part.blocks[0] = part.blocks[1]


@pytest.mark.parametrize(
    "damage",
    [
        damage_destination,
        damage_counted,
        damage_promise_count,
        damage_snapshot_lease,
        damage_sliding_lease,
        damage_working_state,
        damage_slots,
        damage_tier,
        damage_ring,
    ],
)
def test_audit_notices_damage_in_every_kind_of_window(
    damage: Callable[[RankCache], None],
) -> None:
    cache = mixed_cache()
    damage(cache)
    with pytest.raises(InvariantError, match=r"\[I\d"):
        cache.check_invariants()


def test_counts_of_both_tiers_add_up() -> None:
    """[I16] Slots promised by count are shown as reserved, empty ones first."""
    cache = mixed_cache()
    view, stats = cache.view(), cache.stats()
    for window in range(3):
        device = (view.free, view.cached, view.referenced, view.reserved)
        host = (view.host_free, view.host_cached, view.host_referenced, view.host_reserved)
        assert sum(counts[window] for counts in device) == view.total[window]
        assert sum(counts[window] for counts in host) == view.host_total[window]
    assert view.host_total == (8, 8, 4)
    parts = ("free", "cached", "referenced", "reserved")
    for tier in ("", "host_"):
        for window in range(3):
            label = f'{{window="{window}"}}'
            shown = {name: stats[f"wavepp_{tier}{name}_blocks{label}"] for name in parts}
            assert shown == {name: getattr(view, tier + name)[window] for name in parts}
            assert sum(shown.values()) == stats[f"wavepp_{tier}pool_blocks{label}"]
    assert stats["wavepp_offloaded_blocks_total"] > 0


def test_news_of_windows_promised_by_count() -> None:
    """[algorithms 8.4] A lease, a promise and a publication change what is available."""
    cache = make_cache(20, recurrent(6))
    serve(cache, 1, "abc", points=(2,))
    learn(cache, 2, "abX", points=(2,))
    assert not grows(cache, lambda: cache.acquire(2, 1, 2))
    assert grows(cache, lambda: cache.release(2))
    made = install(cache, 3, "xyz", points=(2,))
    assert made.states[0].snapshots[0][0] == 2
    assert grows(cache, lambda: cache.publish(3, 2, (2,)))
    assert not grows(cache, lambda: cache.publish(3, 3))
    assert grows(cache, lambda: cache.free(3))
