"""Escrows: demand, floors, prepare, commit, and failures that change nothing."""

from __future__ import annotations

import pytest

from tests.unit.cache.world import (
    books,
    cached,
    commit,
    install,
    key_at,
    learn,
    lease,
    make_cache,
    serve,
)
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache, Shortfall
from wavepp_worker.cache.window import WindowSpec


def test_prepare_reserves_free_slots_first_and_keeps_victims_matchable() -> None:
    cache = make_cache(6)
    serve(cache, 1, "abcd")
    index_version = cache.index_version
    commit(cache, 2, "123")
    view = cache.view()
    assert (view.free, view.cached, view.reserved) == ((0,), (3,), (3,))
    assert len(view.keys[0]) == 4  # the one victim is still attached
    assert cache.index_version == index_version
    learn(cache, 3, "abcde")
    assert cache.hint(3) == 4


def test_prepare_shortfall_releases_the_lease_in_the_same_section() -> None:
    cache = make_cache(6)
    serve(cache, 1, "abc")
    install(cache, 2, "wxyz")  # three free slots and c
    before, generation = cache.view(), cache.capacity_generation
    assert lease(cache, 3, "ab123") == 2
    assert cache.prepare(3) == Shortfall(missing=(3,), generation=generation)
    assert cache.view() == before
    cache.release(3)
    assert cache.capacity_generation == generation


def test_prepare_is_all_or_nothing_across_windows() -> None:
    cache = make_cache(10, 4)
    before = cache.view()
    lease(cache, 1, "123456")
    assert cache.prepare(1) == Shortfall(missing=(0, 2), generation=0)
    assert cache.view() == before


@pytest.mark.parametrize(
    ("total", "fraction", "headroom", "floor"),
    [(100, 0.10, 512, 10), (100, 0.10, 7, 7), (9, 0.10, 512, 0), (30, 0.10, 512, 3)],
)
def test_floor(total: int, fraction: float, headroom: int, floor: int) -> None:
    assert floor_blocks(total, fraction, headroom) == floor


def test_floor_holds_after_prepare_and_is_waived_on_request() -> None:
    cache = make_cache(10, floor_fraction=0.2)
    lease(cache, 1, "123456789")
    assert cache.prepare(1) == Shortfall(missing=(1,), generation=0)
    cache.acquire(1, 2, 0)
    assert cache.prepare(1, no_floor=True) == Prepared(0)
    assert cache.view().free == (1,)
    assert cache.commit(1, 0) == Shortfall(missing=(1,), generation=0)
    assert cache.commit(1, 0, no_floor=True) == Committed(0)


def test_long_hit_is_admitted_only_without_floors() -> None:
    """S7: 100 blocks, floor 10; 98 blocks of prompt, 90 of them cached."""
    cache = make_cache(100, floor_fraction=0.1)
    prompt = "x" * 98
    serve(cache, 1, prompt[:90])
    assert lease(cache, 2, prompt) == 90
    assert isinstance(cache.prepare(2), Shortfall)
    assert cache.acquire(2, 2, 90) == 90
    assert cache.prepare(2, no_floor=True) == Prepared(90)
    assert cache.commit(2, 90, no_floor=True) == Committed(90)
    assert len(cache.materialize(2, 2).tables[0]) == 98


def worked_example_x2(slots: int) -> RankCache:
    """n = 200K leased at 112K and prepared; B = 64, K = 1024 tokens."""
    cache = RankCache([WindowSpec(slots=slots)], 64, 0.0, 0, check_always=True)
    prompt = bytes(4 * 200 * 1024)
    keys = b"".join(index.to_bytes(32, "big") for index in range(len(prompt) // 256))
    cache.learn(1, 112 * 1024, keys[: 32 * 1792])
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    cache.materialize(1, 1)
    cache.publish(1, 112 * 1024)
    cache.free(1)
    cache.learn(2, 200 * 1024, keys)
    assert cache.acquire(2, 1, 112 * 1024) == 112 * 1024
    assert cache.prepare(2) == Prepared(112 * 1024)
    assert cache.view().reserved == (1408,)
    return cache


def test_commit_after_trim_finds_the_extra_blocks() -> None:
    """X2: the blocks just unpinned are themselves candidates.  [I25]"""
    cache = worked_example_x2(3200)
    assert cache.trim(2, 96 * 1024) == 96 * 1024
    assert cache.commit(2, 96 * 1024) == Committed(96 * 1024)
    assert cache.view().reserved == (1664,)
    assert len(cache.materialize(2, 2).tables[0]) == 3200


def test_failed_commit_leaves_everything_as_it_was() -> None:
    """X2, extra victims not to be found.  [I18]"""
    cache = worked_example_x2(3200)
    cache.trim(2, 96 * 1024)
    keys = b"".join(index.to_bytes(32, "big") for index in range(1600))
    cache.learn(3, 100 * 1024 + 1, keys)
    assert cache.acquire(3, 1, 100 * 1024) == 100 * 1024  # pins 64 of the 256 blocks
    before, generation = books(cache), cache.capacity_generation
    assert cache.commit(2, 96 * 1024) == Shortfall(missing=(64,), generation=generation)
    assert books(cache) == before
    assert cache.view().reserved == (1408,)
    cache.release(3)
    assert cache.commit(2, 96 * 1024) == Committed(96 * 1024)


def test_commit_is_idempotent_and_bound_to_the_lease() -> None:
    cache = make_cache(16)
    serve(cache, 1, "abcd")
    commit(cache, 2, "abcde")
    before = books(cache)
    assert cache.commit(2, 4) == Committed(4)
    assert books(cache) == before
    with pytest.raises(InvariantError, match="commits at the lease"):
        cache.commit(2, 3)


def test_commit_checks_the_floor_again() -> None:
    """A lease taken after prepare may have eaten into the margin.  [I24]"""
    cache = make_cache(10, floor_fraction=0.3)
    serve(cache, 1, "abc")
    lease(cache, 2, "1234567")
    assert cache.prepare(2) == Prepared(0)
    lease(cache, 3, "abX")
    assert cache.commit(2, 0) == Shortfall(missing=(2,), generation=cache.capacity_generation)


def test_last_resort_takes_every_slot() -> None:
    """[A52] At endpoint 0 without floors, a request that fits at all cannot fail when quiet."""
    cache = make_cache(8, floor_fraction=0.5)
    serve(cache, 1, "ab")
    serve(cache, 2, "xyz")
    lease(cache, 3, "12345678", cap=0)
    assert cache.prepare(3, no_floor=True) == Prepared(0)
    assert cache.commit(3, 0, no_floor=True) == Committed(0)
    assert sorted(cache.materialize(3, 3).tables[0]) == list(range(8))
    assert cached(cache) == set()


def test_promises_of_two_requests_never_overlap() -> None:
    cache = make_cache(10)
    serve(cache, 1, "abcdefgh")
    commit(cache, 2, "1234")
    commit(cache, 3, "uvwxyz")
    assert cache.view().reserved == (10,)
    second = cache.materialize(2, 2).tables[0]
    third = cache.materialize(3, 3).tables[0]
    assert set(second).isdisjoint(third)


def test_released_escrow_returns_victims_unharmed() -> None:
    cache = make_cache(4)
    serve(cache, 1, "abcd")
    learn(cache, 2, "wxy")
    cache.acquire(2, 1, 0)
    before = books(cache)
    cache.prepare(2)
    cache.release(2)
    cache.acquire(2, 2, 0)
    assert books(cache) == before
    assert key_at("abcd") in cached(cache)
