"""Eviction order, and what goes when an inner block goes."""

from __future__ import annotations

from tests.unit.cache.world import (
    cached,
    commit,
    install,
    key_at,
    learn,
    lease,
    make_cache,
    serve,
)
from wavepp_worker.base.types import BlockId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.eviction import EvictionOrder


def test_oldest_branch_goes_first_and_leaf_before_parent() -> None:
    cache = make_cache(8)
    serve(cache, 1, "abc")
    serve(cache, 2, "xy")
    gone = []
    cache.drain_changes()
    while cache.evict(0, 1):
        gone += [key for _, _, key in cache.drain_changes()]
    assert gone == [key_at("abc"), key_at("ab"), key_at("a"), key_at("xy"), key_at("x")]


def test_use_makes_a_branch_young() -> None:
    cache = make_cache(8)
    serve(cache, 1, "abc")
    serve(cache, 2, "xy")
    lease(cache, 3, "abQ")
    cache.release(3)
    cache.evict(0, 3)  # c was not used again; then x's branch
    assert cached(cache) == {key_at("a"), key_at("ab")}


def test_a_parent_that_is_older_than_its_child_waits_for_it() -> None:
    cache = make_cache(8)
    install(cache, 1, "ab")
    install(cache, 2, "abc", cap=0)
    cache.publish(1, 1)
    cache.publish(2, 2)  # own a is a duplicate; own b hangs under the a of request 1
    cache.free(1)  # a is unused from now on
    cache.free(2)  # b is younger than its parent
    cache.evict(0, 1)
    assert cached(cache) == {key_at("a")}


def test_inner_block_detaches_its_referenced_child_which_keeps_its_slot() -> None:
    """[A49]"""
    cache = make_cache(8)
    install(cache, 1, "ab")
    table = install(cache, 2, "abc", cap=0).tables[0]
    cache.publish(1, 1)
    cache.publish(2, 2)
    cache.free(1)
    cache.drain_changes()
    assert cache.evict(0, 1) == 1
    assert cache.drain_changes() == ((False, 0, key_at("ab")), (False, 0, key_at("a")))
    assert cache.view().referenced == (3,)
    fresh = install(cache, 3, "12345").tables[0]
    assert set(fresh).isdisjoint(table)


def test_inner_block_detaches_its_reserved_child_which_stays_reserved() -> None:
    """[A49] A victim below an evicted block stays promised, now empty."""
    cache = make_cache(6)
    install(cache, 1, "a")
    install(cache, 2, "ab", cap=0)
    cache.publish(1, 1)
    cache.publish(2, 2)
    cache.free(2)  # ab: evictable; a: referenced by 1
    install(cache, 3, "1234")  # no free slot is left
    commit(cache, 4, "5")  # promises ab
    assert cache.view().reserved == (1,)
    cache.free(1)
    cache.evict(0, 1)
    assert cached(cache) == set()
    assert cache.view().reserved == (1,)
    assert cache.materialize(4, 4).tables[0]


def test_evictable_block_below_a_referenced_one_becomes_free() -> None:
    """[A49] "Only a slot with neither becomes free"."""
    cache = make_cache(8)
    install(cache, 1, "a")
    install(cache, 2, "ab", cap=0)
    cache.publish(1, 1)
    cache.publish(2, 2)
    install(cache, 3, "abc", cap=0)
    cache.publish(3, 3)
    cache.free(1)  # a unused, b with request 2
    cache.free(3)  # c unused, below b
    assert cache.view().free == (8 - 2 - 2,)
    assert cache.evict(0, 1) == 2
    assert cached(cache) == set()
    assert cache.view().free == (6,)


def test_ages_survive_a_reservation_that_is_given_back() -> None:
    cache = make_cache(6)
    serve(cache, 1, "abc")
    serve(cache, 2, "xyz")
    learn(cache, 3, "1234")
    cache.acquire(3, 1, 0)
    cache.prepare(3)
    cache.release(3)
    cache.evict(0, 3)
    assert cached(cache) == {key_at("x"), key_at("xy"), key_at("xyz")}


def test_stale_heap_entries_are_swept() -> None:
    blocks = [Block(slot, BlockId(slot)) for slot in range(4)]
    order = EvictionOrder(blocks, is_host=False)
    for turn in range(10_000):
        block = blocks[turn % 3]
        if block.is_evictable:
            order.remove(block)
        block.age = turn
        order.add(block)
    assert len(order._ready) <= 2 * len(blocks) + 64
    assert order.oldest() is blocks[(10_000 - 3) % 3]
    order.check_invariants()
