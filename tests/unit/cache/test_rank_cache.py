"""The facade: capacity news, sizes, views, and an audit that notices damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.cache.world import commit, install, key_at, learn, lease, make_cache, serve
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
    assert stats["wavepp_free_blocks"] == view.free[0] == 6
    assert stats["wavepp_cached_blocks"] == view.cached[0] == 0
    assert stats["wavepp_referenced_blocks"] == view.referenced[0] == 5
    assert stats["wavepp_reserved_blocks"] == view.reserved[0] == 1
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
    cache._pools[0].reserved_count += 1


def damage_index(cache: RankCache) -> None:
    cache._index.stored(0, key_at("q"))


def damage_escrow(cache: RankCache) -> None:
    cache._pools[0].unreserve(cache._escrows[3].reserved[0].popitem()[1])


def damage_free_list(cache: RankCache) -> None:
    cache._pools[0]._free.pop()


def damage_tree(cache: RankCache) -> None:
    cache._pools[0].tree.root.children.clear()


def damage_order(cache: RankCache) -> None:
    cache._pools[0]._order._ready.clear()


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
