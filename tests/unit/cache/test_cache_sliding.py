"""Sliding windows: what an endpoint needs, the ring of slots, and what may be published.

span 3 at one token a block: an endpoint needs its last three blocks.  Chunks of 2 tokens: a ring
of 2 + 3 slots.
"""

from __future__ import annotations

import pytest

from tests.unit.cache.world import (
    cached,
    commit,
    copies_of,
    install,
    key_at,
    keys_of,
    learn,
    lease,
    make_cache,
    recurrent,
    serve,
    sliding,
)
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.base.marks import hits
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.cache.probe import common_depth, sliding_depth
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache, Shortfall

PROMPT = "abcdefghijklmnop"


def ring(slots: int, host_slots: int = 0) -> RankCache:
    return make_cache(sliding(slots, span=3, chunk=2, host_slots=host_slots))


def endpoint_keys(*sizes: int) -> set[bytes]:
    return {key_at(PROMPT[:size]) for size in sizes}


def test_needed_blocks_and_ring() -> None:
    """[A6] ceil((w - 1) / B) + 1 blocks before an endpoint; plus a chunk for the ring."""
    spec = sliding(100, span=3, chunk=2)
    assert (spec.needed_blocks(1), spec.ring_blocks(1)) == (3, 5)
    spec = sliding(100, span=4096, chunk=16384)
    assert (spec.needed_blocks(64), spec.ring_blocks(64)) == (65, 321)
    assert sliding(100, span=1, chunk=1).needed_blocks(64) == 1


def test_pool_must_hold_one_ring() -> None:
    with pytest.raises(ConfigError, match="needs 5 slots, got 4"):
        ring(4)


@pytest.mark.parametrize("needed", [1, 2, 3, 7])
def test_sliding_depth_is_the_deepest_endpoint_with_its_last_blocks(needed: int) -> None:
    """[I5] Compared with the definition, for every set of present blocks of a short prompt."""
    keys = split_keys(keys_of("abcdef"))
    for bits in range(64):
        present = {key for index, key in enumerate(keys) if bits >> index & 1}
        for limit in range(7):
            expected = max(
                depth
                for depth in range(limit + 1)
                if present.issuperset(keys[max(0, depth - needed) : depth])
            )
            depth, probes = sliding_depth(present, keys, limit, needed)
            assert depth == expected
            assert probes <= limit


def test_common_depth_asks_sparse_windows_until_none_lowers_it() -> None:
    multiples_of_4 = lambda limit: limit - limit % 4  # noqa: E731
    multiples_of_6 = lambda limit: limit - limit % 6  # noqa: E731
    assert common_depth([lambda limit: min(limit, 31)], [multiples_of_4, multiples_of_6], 99) == 24
    assert common_depth([], [multiples_of_4], 31) == 28


def test_demand_is_at_most_one_ring() -> None:
    """S15: a prompt of 100K in a pool of 2K tokens; the leader's figures leave that pool out."""
    cache = make_cache(100, sliding(2, span=1, chunk=1024), block_tokens=1024)
    with pytest.raises(ConfigError):
        make_cache(100, sliding(2, span=1024, chunk=1024), block_tokens=1024)
    assert cache.is_sparse
    assert not cache.has_states
    assert cache.available_tokens() == cache.total_tokens() == 100 * 1024
    assert make_cache(sliding(5, 3, 2)).available_tokens() == UNLIMITED_TOKENS
    learn(cache, 1, "a" * 100 * 1024, 1024)
    assert cache.acquire(1, 1, 0) == 0
    assert cache.prepare(1) == Prepared(0)
    assert cache.view().reserved == (100, 2)
    assert cache.commit(1, 0) == Committed(0)
    made = cache.materialize(1, 1)
    assert set(made.tables[1]) == {0, 1}


def test_suffix_uses_its_slots_in_turn() -> None:
    cache = ring(8)
    table = install(cache, 1, PROMPT).tables[0]
    assert len(table) == len(PROMPT)
    assert len(set(table)) == 5
    assert table[5:10] == table[:5]
    assert table[15] == table[0]
    assert cache.view().referenced == (5,)


def test_a_short_suffix_has_a_slot_for_every_block() -> None:
    cache = ring(8)
    assert len(set(install(cache, 1, "abc").tables[0])) == 3


def test_only_the_last_lap_is_published() -> None:
    """A slot of an earlier lap may be overwritten before its publication is handled.  [I43]"""
    cache = ring(8)
    install(cache, 1, PROMPT)
    cache.publish(1, 10)
    assert cached(cache) == set()
    cache.publish(1, 13)
    assert cached(cache) == endpoint_keys(12, 13)
    cache.publish(1, 16)
    assert cached(cache) == endpoint_keys(12, 13, 14, 15, 16)
    cache.free(1)
    assert cache.view().cached == (5,)


def test_lease_pins_the_last_blocks_only() -> None:
    """[I8] And the table says -1 before them."""
    cache = ring(12)
    first = serve(cache, 1, PROMPT).tables[0]
    learn(cache, 2, PROMPT + "Q")
    assert cache.hint(2) == 16
    assert cache.acquire(2, 1, 16) == 16
    assert cache.view().referenced == (3,)
    assert cache.evict(0, 99) == 2
    cache.prepare(2)
    cache.commit(2, 16)
    table = cache.materialize(2, 2).tables[0]
    assert table[:13] == (-1,) * 13
    assert table[13:16] == first[13:16]
    assert cache.view().referenced == (4,)


def test_endpoint_near_the_start_needs_what_there_is() -> None:
    cache = ring(12)
    serve(cache, 1, "abcd")
    assert lease(cache, 2, "abX") == 2
    assert cache.view().referenced == (2,)


def test_gap_moves_the_endpoint_down() -> None:
    cache = ring(12)
    serve(cache, 1, "abcdefgh")  # d .. h are left; nothing below 6 can be resumed
    learn(cache, 2, "abcdefgX")
    assert cache.hint(2) == 7
    learn(cache, 3, "abcdeX")
    assert cache.hint(3) == 0
    assert cache.acquire(3, 1, 5) == 0


def test_eviction_takes_single_blocks_leaf_first() -> None:
    """[A49] Nothing hangs below a block of a flat window."""
    cache = ring(12)
    serve(cache, 1, "abcde")
    cache.drain_changes()
    assert cache.evict(0, 2) == 2
    assert cache.drain_changes() == ((False, 0, key_at("abcde")), (False, 0, key_at("abcd")))
    assert cached(cache) == {key_at("a"), key_at("ab"), key_at("abc")}


def test_block_is_published_though_the_one_before_it_was_evicted() -> None:
    """[I9] A sequence's own block needs no parent in a flat window."""
    cache = ring(12)
    install(cache, 1, "abcd")
    install(cache, 2, "abcdef", cap=0)
    cache.publish(1, 4)
    cache.publish(2, 4)  # b, c, d are in its last lap, and duplicates
    cache.free(1)
    cache.evict(0, 9)
    assert cached(cache) == set()
    cache.publish(2, 6)
    assert cached(cache) == {key_at("abcdef"[:size]) for size in range(2, 7)}


def test_duplicate_stays_private_until_freed() -> None:
    """S1 in a sliding window.  [A53]"""
    cache = ring(10)
    install(cache, 1, "abc")
    table = install(cache, 2, "abc", cap=0).tables[0]
    cache.publish(1, 3)
    cache.publish(2, 3)
    fresh = install(cache, 3, "1234").tables[0]
    assert set(fresh).isdisjoint(table)
    cache.free(2)
    assert cache.view().free == (3,)


def test_trim_pins_the_earlier_blocks_first() -> None:
    """[I10] d, e, f are there for 6; g, h, i are given back."""
    cache = make_cache(40, sliding(12, span=3, chunk=6))
    serve(cache, 1, "abcdefghi")
    assert lease(cache, 2, "abcdefghiX") == 9
    assert cache.view().referenced == (9, 3)
    assert cache.trim(2, 6) == 6
    assert cache.view().referenced == (6, 3)
    assert cache.trim(2, 5) == 5  # overlaps with what it holds
    cache.check_invariants()
    cache.evict(1, 99)
    assert cached(cache, 1) == {key_at("abcde"[:size]) for size in (3, 4, 5)}


def test_trim_falls_to_what_is_left() -> None:
    cache = make_cache(40, sliding(12, span=3, chunk=6))
    serve(cache, 1, "abcdefghi")
    lease(cache, 2, "abcdefghiX")
    before = hits["lease.trim_falls_further"]
    cache.evict(1, 9)
    assert cache.trim(2, 6) == 0
    assert hits["lease.trim_falls_further"] == before + 1


def test_claimed_victim_is_replaced() -> None:
    """X4 in a sliding window."""
    cache = ring(12)
    serve(cache, 1, "1234")
    serve(cache, 2, "abcde")
    commit(cache, 3, "uvwx")  # three free slots, and the oldest victim: "1234"
    assert lease(cache, 4, "1234Z") == 4
    assert cache.stats()["wavepp_substitutions_total"] == 1
    assert cache.view().reserved == (4,)
    cache.materialize(3, 3)
    assert key_at("1234") in cached(cache)
    assert key_at("1") not in cached(cache)  # the replacement: the oldest that B does not need


def test_claim_is_cut_before_the_block_that_has_no_replacement() -> None:
    """X4, last sentence; pins of the refused endpoint are undone.  [I15]"""
    cache = ring(6)
    serve(cache, 1, "abcde")
    commit(cache, 2, "123")  # the free slot, e and d
    lease(cache, 3, "abX")
    lease(cache, 4, "abcX")  # the last available block
    assert lease(cache, 5, "abcdeQ") == 3
    assert cache.stats()["wavepp_cut_claims_total"] == 1
    assert cache.view().reserved == (3,)


def test_trim_may_claim_a_victim_of_its_own_escrow() -> None:
    """The earlier blocks were chosen as victims for the later endpoint: they are replaced."""
    cache = make_cache(40, sliding(9, span=3, chunk=6))
    serve(cache, 1, "abcdefghi")
    assert lease(cache, 2, "abcdefghi123") == 9
    assert cache.prepare(2) == Prepared(9)
    assert cache.view().reserved == (3, 3)  # three of a .. f
    owned = {block.key for block in cache._escrows[2].promises[1].owned()}
    assert key_at("abcdef") in owned
    assert cache.trim(2, 6) == 6
    assert cache.view().referenced == (6, 3)
    outcome = cache.commit(2, 6)
    assert outcome == Committed(6)
    assert len(set(cache.materialize(2, 2).tables[1][3:])) == 9


def test_host_tier_of_a_sliding_window() -> None:
    """Leased host blocks are onboarded beside the ring.  [A13, I3]"""
    cache = ring(9, host_slots=9)
    serve(cache, 1, "abcde")
    made = serve(cache, 2, "123456789")
    assert {copy[0] for copy in copies_of(made)} == {"offload"}
    version = cache.index_version
    assert lease(cache, 3, "abcdeX") == 5
    assert cache.index_version == version
    on_host = cache.view().host_referenced[0]
    assert on_host >= 1
    assert cache.prepare(3) == Prepared(5)
    assert cache.view().reserved == (1 + on_host,)
    cache.commit(3, 5)
    again = cache.materialize(3, 3)
    assert [copy[0] for copy in copies_of(again)].count("onboard") == on_host
    assert cache.view().host_referenced == (0,)


def test_three_kinds_settle_on_one_endpoint() -> None:
    """[I5, I8] Dense to 9, sliding from 6, snapshots at 4 and 7: the common endpoint is 7."""
    cache = make_cache(40, sliding(12, span=3, chunk=3), recurrent(8))
    serve(cache, 1, "abcdefghi", points=(4, 7))
    learn(cache, 2, "abcdefghiX")
    assert cache.hint(2) == 7
    assert cache.acquire(2, 1, 99) == 7
    assert cache.view().referenced == (7, 3, 1)
    cache.release(2)
    cache.evict(2, 1)
    assert cache.hint(2) in (0, 7)
    assert cache.acquire(2, 2, 99) == cache.hint(2)


def test_floor_of_a_sliding_window() -> None:
    """[I24]"""
    cache = make_cache(sliding(10, span=3, chunk=2), floor_fraction=0.3)
    install(cache, 1, "abc")
    lease(cache, 2, "12345")
    assert cache.prepare(2) == Shortfall(missing=(1,), generation=0)
    cache.acquire(2, 2, 0)
    assert cache.prepare(2, no_floor=True) == Prepared(0)
