"""Leases: acquire, share, trim, release, and the claim of another request's victim."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.cache.world import (
    cached,
    commit,
    key_at,
    learn,
    lease,
    make_cache,
    serve,
)
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.rank_cache import Prepared


def test_acquire_pins_the_longest_prefix_below_cap_and_last_token() -> None:
    cache = make_cache(16)
    serve(cache, 1, "abcdef")
    assert lease(cache, 2, "abcdef") == 5
    assert lease(cache, 3, "abcdefg") == 6
    assert lease(cache, 4, "abcdefg", cap=2) == 2
    assert lease(cache, 5, "abXdef") == 2
    assert lease(cache, 6, "a") == 0
    assert cache.view().referenced == (6,)


def test_leased_blocks_are_not_evicted() -> None:
    cache = make_cache(16)
    serve(cache, 1, "abcdef")
    lease(cache, 2, "abcX")
    assert cache.evict(0, 100) == 3
    assert cached(cache) == {key_at("a"), key_at("ab"), key_at("abc")}


def test_trim_gives_back_exactly_the_excess() -> None:
    cache = make_cache(16)
    serve(cache, 1, "abcdef")
    lease(cache, 2, "abcdefg")
    assert cache.trim(2, 4) == 4
    assert cache.view().referenced == (4,)
    assert cache.trim(2, 100) == 4
    assert cache.trim(2, 0) == 0
    assert cache.view().referenced == (0,)


def test_trim_rounds_down_to_a_block() -> None:
    cache = make_cache(16, block_tokens=4)
    learn(cache, 1, "abcdefghij", 4)
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    cache.materialize(1, 1)
    cache.publish(1, 10)
    learn(cache, 2, "abcdefghij", 4)
    assert cache.acquire(2, 1, 1000) == 8
    assert cache.trim(2, 7) == 4


def test_release_is_idempotent_and_leaves_nothing() -> None:
    cache = make_cache(16)
    serve(cache, 1, "abc")
    before = cache.view()
    commit(cache, 2, "abcd")
    cache.release(2)
    cache.release(2)
    cache.release(77)
    assert cache.view() == before


def test_escrow_is_released_before_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """[I21]"""
    order: list[str] = []
    for kind in (Escrow, Lease):
        real = kind.release

        def spy(held: object, kind: type = kind, real: Callable[..., None] = real) -> None:
            order.append(kind.__name__)
            real(held)

        monkeypatch.setattr(kind, "release", spy)
    cache = make_cache(8)
    commit(cache, 1, "abc")
    cache.release(1)
    assert order == ["Escrow", "Lease"]
    order.clear()
    commit(cache, 2, "abc")
    cache.materialize(2, 2)
    assert order == ["Escrow", "Lease"]


def test_newer_attempt_replaces_the_older_one() -> None:
    """[A43]"""
    cache = make_cache(16)
    serve(cache, 1, "abcdef")
    commit(cache, 2, "abcdefg")
    assert cache.acquire(2, 2, 3) == 3
    view = cache.view()
    assert (view.lease_count, view.escrow_count) == (1, 0)
    assert (view.referenced, view.reserved) == ((3,), (0,))
    with pytest.raises(InvariantError, match="attempts grow"):
        cache.acquire(2, 2, 3)


def test_claimed_victim_is_replaced_in_the_same_section() -> None:
    """X4: B's lease finds A's victim; A gets the next slot."""
    cache = make_cache(10)
    serve(cache, 1, "1234")
    serve(cache, 2, "abcdef")
    commit(cache, 3, "uvwx")  # A: the oldest four, 1234
    assert lease(cache, 4, "123Z") == 3  # B: three of them
    assert cache.view().reserved == (4,)
    assert cache.stats()["wavepp_substitutions_total"] == 3
    table = cache.materialize(3, 3).tables[0]
    assert len(set(table)) == 4
    assert cached(cache) == {key_at("1"), key_at("12"), key_at("123")} | {
        key_at("abcdef"[: n + 1]) for n in range(3)
    }


def test_claim_is_cut_where_no_replacement_exists() -> None:
    """X4, last sentence; what lies beyond the cut keeps its age and owner."""
    cache = make_cache(6)
    serve(cache, 1, "abcdef")
    commit(cache, 2, "123")  # promises f, e, d
    lease(cache, 3, "aQ")
    lease(cache, 4, "abQ")
    ages = [block.age for block in cache._pools[0]._blocks]
    assert lease(cache, 5, "abcdefg") == 3  # c was available but is pinned by this very lease
    assert cache.stats()["wavepp_cut_claims_total"] == 1
    assert cache.view().reserved == (3,)
    assert [block.age for block in cache._pools[0]._blocks] == ages
    assert cache.materialize(2, 2).endpoint == 0


def test_replacement_is_never_another_block_of_the_same_claim() -> None:
    cache = make_cache(5)
    serve(cache, 1, "abcd")  # one slot stays free
    commit(cache, 2, "12")  # promises the free slot and d
    assert lease(cache, 3, "abcdX") == 3  # a, b, c are available, and its own
    assert cache.view().reserved == (2,)


def test_claim_in_one_window_cuts_every_window() -> None:
    cache = make_cache(12, 6)
    serve(cache, 1, "abcdef")
    commit(cache, 2, "123")
    assert lease(cache, 3, "abcdefg") == 3
    assert cache.view().referenced == (3, 3)


def test_sections_refuse_unknown_and_misplaced_requests() -> None:
    cache = make_cache(8)
    with pytest.raises(InvariantError, match="known request"):
        cache.acquire(1, 1, 0)
    learn(cache, 1, "ab")
    with pytest.raises(InvariantError, match="known already"):
        learn(cache, 1, "ab")
    with pytest.raises(InvariantError, match="no lease"):
        cache.prepare(1)
    cache.acquire(1, 1, 0)
    assert cache.prepare(1) == Prepared(0)
    with pytest.raises(InvariantError, match="prepared already"):
        cache.prepare(1)
    with pytest.raises(InvariantError, match="release first"):
        cache.forget(1)
    with pytest.raises(InvariantError, match="uncommitted"):
        cache.materialize(1, 1)
    cache.commit(1, 0)
    with pytest.raises(InvariantError, match="trims after commit"):
        cache.trim(1, 0)
    with pytest.raises(InvariantError, match="one key per full block"):
        cache.learn(9, 3, b"")
