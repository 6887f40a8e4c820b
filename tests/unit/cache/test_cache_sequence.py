"""Materialisation, publication and the end of a sequence."""

from __future__ import annotations

import pytest

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
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.wire.mailbox import Copy


def test_materialize_adopts_the_prefix_and_owns_exactly_its_demand() -> None:
    """[I23]"""
    cache = make_cache(10)
    first = install(cache, 1, "abc")
    cache.publish(1, 3)
    available = cache.available_tokens()
    second = install(cache, 2, "abcde")
    assert second.endpoint == 3
    assert second.copies == ()
    assert second.tables[0][:3] == first.tables[0]
    assert len(set(second.tables[0])) == 5
    view = cache.view()
    assert (view.lease_count, view.escrow_count, view.sequence_count) == (0, 0, 2)
    assert (view.reserved, view.referenced) == ((0,), (5,))
    assert cache.available_tokens() == available - 2


def test_materialize_shrinks_the_promise_one_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """[I23] Slots taken plus slots still promised stay equal at every step."""
    cache = make_cache(6)
    serve(cache, 1, "abcd")
    commit(cache, 2, "wxyz")
    sums: list[int] = []
    take = BlockPool.take

    def spy(pool: BlockPool, copies: list[Copy]) -> Block:
        block = take(pool, copies)
        sums.append(len(sums) + 1 + pool.device.reserved_count)
        return block

    monkeypatch.setattr(BlockPool, "take", spy)
    cache.materialize(2, 2)
    assert sums == [4, 4, 4, 4]


def test_materialize_covers_the_partial_last_block() -> None:
    cache = make_cache(10, block_tokens=4)
    learn(cache, 1, "abcdefghi", 4)
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    assert len(cache.materialize(1, 1).tables[0]) == 3
    cache.publish(1, 9)
    assert len(cached(cache)) == 2


def test_materialize_prefers_slots_freed_since_commit_to_its_victims() -> None:
    """[A19] More cache survives, the total promise is constant."""
    cache = make_cache(6)
    serve(cache, 1, "abc")
    table = install(cache, 2, "123").tables[0]
    commit(cache, 3, "xyz")  # its victims are a, b, c
    cache.free(2)  # unpublished: three empty slots
    assert sorted(cache.materialize(3, 3).tables[0]) == sorted(table)
    assert cached(cache) == {key_at("a"), key_at("ab"), key_at("abc")}
    assert cache.view().cached == (3,)


def test_materialize_evicts_children_before_parents() -> None:
    """[I2]"""
    cache = make_cache(3)
    serve(cache, 1, "abc")
    cache.drain_changes()
    install(cache, 2, "xyz")
    assert cache.drain_changes() == (
        (False, 0, key_at("abc")),
        (False, 0, key_at("ab")),
        (False, 0, key_at("a")),
    )


def test_installs_come_in_order() -> None:
    cache = make_cache(8)
    commit(cache, 1, "a")
    commit(cache, 2, "b")
    cache.materialize(2, 1)
    with pytest.raises(InvariantError, match="in order"):
        cache.materialize(1, 1)


def test_publish_is_cumulative_and_stops_at_full_blocks() -> None:
    cache = make_cache(8, block_tokens=2)
    learn(cache, 1, "abcdef", 2)
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    cache.materialize(1, 1)
    cache.drain_changes()
    cache.publish(1, 3)
    assert cache.drain_changes() == ((True, 0, key_at("ab", 2)),)
    cache.publish(1, 3)
    assert cache.drain_changes() == ()
    cache.publish(1, 6)
    assert cache.drain_changes() == (
        (True, 0, key_at("abcd", 2)),
        (True, 0, key_at("abcdef", 2)),
    )
    with pytest.raises(InvariantError):
        cache.publish(1, 7)


def test_duplicate_stays_private_until_freed() -> None:
    """S1 [A53]: Z must not be given the slot that Y still reads."""
    cache = make_cache(7)
    install(cache, 1, "ax")
    y_table = install(cache, 2, "ay")
    cache.publish(1, 1)
    cache.drain_changes()
    cache.publish(2, 1)  # same key as X's block 0
    assert cache.drain_changes() == ()
    z_table = install(cache, 3, "zzz")
    assert set(z_table.tables[0]).isdisjoint(y_table.tables[0])
    assert cache.view().free == (0,)
    cache.free(2)
    assert cache.view().free == (2,)


def test_own_block_hangs_below_the_block_that_was_first() -> None:
    cache = make_cache(8)
    install(cache, 1, "ax")
    install(cache, 2, "ay")
    cache.publish(1, 2)
    cache.publish(2, 2)
    assert cached(cache) == {key_at("a"), key_at("ax"), key_at("ay")}
    assert cache.view().free == (4,)


def test_child_of_a_dropped_victim_keeps_its_slot_and_is_published_again() -> None:
    """S13: p unused, its child published by the running X; p is dropped."""
    cache = make_cache(8)
    install(cache, 1, "p")
    x_table = install(cache, 2, "pcd", cap=0).tables[0]
    cache.publish(1, 1)
    cache.publish(2, 2)  # own p is a duplicate, c hangs below the p of request 1
    cache.free(1)
    cache.drain_changes()
    taken = install(cache, 3, "12345").tables[0]  # needs the slot of p
    assert cache.drain_changes() == ((False, 0, key_at("pc")), (False, 0, key_at("p")))
    assert set(taken).isdisjoint(x_table)
    cache.publish(2, 3)
    assert cache.drain_changes() == (
        (True, 0, key_at("p")),
        (True, 0, key_at("pc")),
        (True, 0, key_at("pcd")),
    )
    cache.free(2)
    assert cache.view().cached == (3,)


def test_free_keeps_published_blocks_and_frees_private_ones() -> None:
    cache = make_cache(8)
    install(cache, 1, "abcd")
    cache.publish(1, 2)
    cache.free(1)
    view = cache.view()
    assert (view.free, view.cached, view.referenced) == ((6,), (2,), (0,))
    with pytest.raises(InvariantError, match="no sequence"):
        cache.free(1)


def test_a_live_sequence_outlives_forget() -> None:
    cache = make_cache(8)
    install(cache, 1, "abcd")
    cache.forget(1)
    cache.forget(1)
    cache.publish(1, 4)
    assert len(cached(cache)) == 4


def test_prefix_is_never_unreferenced_between_lease_and_free() -> None:
    cache = make_cache(8)
    serve(cache, 1, "abc")
    lease(cache, 2, "abcd")
    cache.prepare(2)
    cache.commit(2, 3)
    cache.evict(0, 99)
    cache.materialize(2, 2)
    cache.evict(0, 99)
    assert cached(cache) == {key_at("a"), key_at("ab"), key_at("abc")}
