"""The host tier: destinations, copies, onboarding, and what happens when it is full."""

from __future__ import annotations

import pytest

from tests.unit.cache.world import (
    books,
    cached,
    commit,
    copies_of,
    dense,
    install,
    key_at,
    learn,
    lease,
    make_cache,
    serve,
)
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache
from wavepp_worker.cache.tier import SlotTier


def host_keys(cache: RankCache) -> set[bytes]:
    return {b.key for b in cache._pools[0]._blocks if b.is_host and b.parent is not None}


def promised(cache: RankCache, rid: int) -> list[tuple[bytes, bytes | None]]:
    """Key of every promised slot, and of its host destination."""
    slots = cache._escrows[RequestId(rid)].promises[0].slots
    return [(slot.key, None if host is None else host.key) for slot, host in slots.items()]


def push_out(cache: RankCache, rid: int, text: str) -> None:
    """Use as many slots as `text` has letters and leave them empty."""
    install(cache, rid, text, cap=0)
    cache.free(rid)


def half_on_host() -> RankCache:
    """Six device slots: a, b and four empty ones; c and d of "abcd" are on the host."""
    cache = make_cache(dense(6, 6))
    serve(cache, 1, "abcd")
    push_out(cache, 2, "1234")
    assert host_keys(cache) == {key_at("abc"), key_at("abcd")}
    return cache


def test_victims_are_offloaded_and_stay_matchable() -> None:
    """[I3] Moving content changes neither the tree nor the index."""
    cache = make_cache(dense(4, 4))
    table = serve(cache, 1, "abcd").tables[0]
    keys, version = cache.view().keys, cache.index_version
    cache.drain_changes()
    made = install(cache, 2, "123")
    assert copies_of(made) == [
        ("offload", 0, table[3], 0),
        ("offload", 0, table[2], 1),
        ("offload", 0, table[1], 2),
    ]
    assert set(made.tables[0]) == {table[1], table[2], table[3]}
    assert cache.view().keys == keys
    assert cache.index_version == version
    assert cache.drain_changes() == ()
    view = cache.view()
    assert (view.cached, view.host_cached, view.host_free) == ((1,), (3,), (1,))
    learn(cache, 3, "abcde")
    assert cache.hint(3) == 4


def test_onboarding_is_part_of_the_demand() -> None:
    """[A13] Two leased host blocks and two suffix blocks: four device slots."""
    cache = half_on_host()
    assert lease(cache, 3, "abcdef") == 4
    assert cache.view().host_referenced == (2,)
    assert cache.prepare(3) == Prepared(4)
    assert cache.view().reserved == (4,)
    assert cache.commit(3, 4) == Committed(4)
    made = cache.materialize(3, 3)
    assert [copy[0] for copy in copies_of(made)] == ["onboard", "onboard"]
    assert [copy[3] for copy in copies_of(made)] == list(made.tables[0][2:4])
    view = cache.view()
    assert (view.referenced, view.host_referenced, view.host_free) == ((6,), (0,), (6,))
    assert cache.stats()["wavepp_onboarded_blocks_total"] == 2


def test_too_little_room_to_onboard_is_a_shortfall() -> None:
    cache = half_on_host()
    install(cache, 3, "xyz")
    before = cache.view()
    lease(cache, 4, "abcd1")  # two to onboard, one to compute; one slot is left
    outcome = cache.prepare(4)
    assert getattr(outcome, "missing", None) == (2,)
    assert cache.view() == before


def test_a_shared_block_is_onboarded_once_and_the_surplus_goes_back() -> None:
    """Another request onboards what this one has leased: commit gives two slots back."""
    cache = half_on_host()
    lease(cache, 3, "abcd", cap=3)  # c must come up
    assert cache.prepare(3) == Prepared(3)
    assert cache.view().reserved == (2,)
    made = install(cache, 4, "abcX", cap=3)
    assert cache.view().reserved == (2,)
    generation = cache.capacity_generation
    assert cache.commit(3, 3) == Committed(3)
    assert cache.view().reserved == (1,)
    assert cache.capacity_generation == generation + 1
    shared = cache.materialize(3, 5)
    assert shared.copies == ()
    assert shared.tables[0][:3] == made.tables[0][:3]


def test_surplus_victim_goes_back_with_its_destination() -> None:
    """[I14, I17] At commit one slot is too many: the youngest victim and its host slot."""
    cache = make_cache(dense(6, 8))
    serve(cache, 1, "abcd")
    push_out(cache, 2, "1234")
    serve(cache, 3, "wxyz")
    lease(cache, 4, "abcd", cap=3)
    assert cache.prepare(4) == Prepared(3)
    assert [key for key, _ in promised(cache, 4)] == [key_at("wxyz"), key_at("wxy")]
    assert cache.view().host_reserved == (2,)
    install(cache, 5, "abcX", cap=3)
    assert cache.commit(4, 3) == Committed(3)
    assert [key for key, _ in promised(cache, 4)] == [key_at("wxyz")]
    assert (cache.view().reserved, cache.view().host_reserved) == ((1,), (1,))


def test_surplus_after_commit_goes_back_at_materialisation() -> None:
    """Algorithms 10 (g): the block came up between commit and materialisation.  [I17, I23]"""
    cache = make_cache(dense(8, 6))
    serve(cache, 1, "ab")
    push_out(cache, 2, "1234567")
    assert host_keys(cache) == {key_at("ab")}
    commit(cache, 5, "ab1", cap=2)
    commit(cache, 6, "ab2", cap=2)
    assert cache.view().reserved == (4,)
    cache.materialize(5, 5)
    generation = cache.capacity_generation
    made = cache.materialize(6, 6)
    assert made.copies == ()
    assert cache.view().reserved == (0,)
    assert cache.capacity_generation == generation + 1


def test_trim_over_host_blocks_trades_onboarding_for_suffix() -> None:
    """[I25] Demand rises "at the same residency": a host block needed a slot already."""
    cache = half_on_host()
    lease(cache, 3, "abcde")
    assert cache.prepare(3) == Prepared(4)
    assert cache.view().reserved == (3,)
    assert cache.trim(3, 2) == 2  # c and d are computed instead of onboarded
    assert cache.commit(3, 2) == Committed(2)
    assert cache.view().reserved == (3,)
    assert cache.materialize(3, 3).copies == ()


def test_destination_is_reserved_before_its_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """[I20]"""
    order: list[bool] = []
    reserve = SlotTier.reserve

    def spy(tier: SlotTier, owner: RequestId) -> Block:
        block = reserve(tier, owner)
        order.append(block.is_host)
        return block

    cache = make_cache(dense(4, 2))
    serve(cache, 1, "abcd")
    monkeypatch.setattr(SlotTier, "reserve", spy)
    commit(cache, 2, "123")
    assert order == [True, False, True, False, False]  # the third finds no host slot
    view = cache.view()
    assert (view.reserved, view.host_reserved) == ((3,), (2,))


def test_a_full_host_drops_instead_of_blocking() -> None:
    """[A41] Every host slot is in use: victims lose their content, the request runs."""
    cache = make_cache(dense(5, 1))
    serve(cache, 1, "abc")
    push_out(cache, 2, "123")
    assert host_keys(cache) == {key_at("abc")}
    lease(cache, 3, "abc1")  # pins c on the host
    serve(cache, 4, "xyz")
    made = install(cache, 5, "12")
    assert made.copies == ()
    assert cached(cache) == {key_at("a"), key_at("ab"), key_at("abc"), key_at("x")}
    assert cache.stats()["wavepp_dropped_blocks_total"] == 2
    assert cache.view().host_referenced == (1,)


def test_the_oldest_host_block_makes_room() -> None:
    cache = make_cache(dense(3, 2))
    serve(cache, 1, "abc")
    made = serve(cache, 2, "xyz")  # c down, b down, c dropped for a
    assert [copy[3] for copy in copies_of(made)] == [0, 1, 0]
    assert host_keys(cache) == {key_at("a"), key_at("ab")}
    serve(cache, 3, "1")
    assert host_keys(cache) == {key_at("a"), key_at("xyz")}


def test_copies_follow_each_other_through_one_host_slot() -> None:
    """Onboarding frees a host slot that the next victim of the same Install goes to.  [I47]"""
    cache = make_cache(dense(4, 1))
    serve(cache, 1, "abc")
    serve(cache, 2, "xy")  # c goes to the one host slot
    slots = {block.key: block.slot for block in cache._pools[0]._blocks}
    made = install(cache, 3, "abc1", cap=3)  # y is dropped for c, then x takes c's place
    up, down = slots[key_at("xy")], slots[key_at("x")]
    assert copies_of(made) == [("onboard", 0, 0, up), ("offload", 0, down, 0)]
    assert made.tables[0][2:] == (up, down)


def test_host_block_goes_to_the_reader_and_its_victim_is_dropped() -> None:
    """S6: the host tier is full; A's destination lies on the path of B's prompt."""
    cache = make_cache(dense(6, 3))
    serve(cache, 1, "hij")
    serve(cache, 2, "123456")
    assert host_keys(cache) == {key_at("h"), key_at("hi"), key_at("hij")}
    commit(cache, 3, "Z")  # A: victim 6, destination j, the oldest on the host
    assert promised(cache, 3) == [(key_at("123456"), key_at("hij"))]
    assert lease(cache, 4, "hijk") == 3  # B reads h, i and j
    assert promised(cache, 3) == [(key_at("123456"), None)]  # nothing else is left for A
    assert cache.view().host_referenced == (3,)
    made = cache.materialize(3, 3)
    assert made.copies == ()
    assert key_at("123456") not in cached(cache)
    assert host_keys(cache) == {key_at("h"), key_at("hi"), key_at("hij")}


def test_replaced_destination_is_not_another_pin_of_the_claimer() -> None:
    """S6: two host blocks on B's path, one beside it; A's destination moves beside it."""
    cache = make_cache(dense(6, 3))
    serve(cache, 1, "hi")
    serve(cache, 2, "q")
    serve(cache, 3, "123456")
    assert host_keys(cache) == {key_at("h"), key_at("hi"), key_at("q")}
    commit(cache, 4, "Z")
    assert promised(cache, 4) == [(key_at("123456"), key_at("hi"))]
    assert lease(cache, 5, "hik") == 2
    assert promised(cache, 4) == [(key_at("123456"), key_at("q"))]
    assert cache.stats()["wavepp_destination_claims_total"] == 1
    assert copies_of(cache.materialize(4, 4))[0][0] == "offload"
    assert key_at("q") not in cached(cache)


def test_claimed_victim_takes_its_destination_along() -> None:
    """X4 with a host tier: the replacement has a destination, the old one is free again."""
    cache = make_cache(dense(6, 6))
    serve(cache, 1, "12")
    serve(cache, 2, "abcd")
    commit(cache, 3, "Z")
    assert promised(cache, 3)[0][0] == key_at("12")
    assert lease(cache, 4, "12X") == 2
    assert promised(cache, 3)[0][0] == key_at("abcd")
    view = cache.view()
    assert (view.host_reserved, view.host_free) == ((1,), (5,))


def parent_on_host(host_slots: int) -> RankCache:
    """Four device slots, three of them empty: h on the host, v below it on the device."""
    cache = make_cache(dense(4, host_slots))
    install(cache, 1, "h")
    install(cache, 2, "hv", cap=0)
    cache.publish(1, 1)
    cache.publish(2, 2)  # own h is a duplicate, v hangs below the h of request 1
    cache.free(1)
    push_out(cache, 3, "12")  # the last free slot, and that of h
    assert host_keys(cache) == {key_at("h")}
    cache.free(2)
    return cache


def test_a_private_block_is_published_below_a_host_block() -> None:
    cache = make_cache(dense(4, 1))
    install(cache, 1, "h")
    install(cache, 2, "hv", cap=0)
    cache.publish(1, 1)
    cache.free(1)
    push_out(cache, 3, "12")  # h goes to the host before request 2 publishes
    cache.publish(2, 2)
    cache.free(2)
    learn(cache, 4, "hvw")
    assert cache.hint(4) == 2
    assert cache.acquire(4, 1, 2) == 2
    view = cache.view()
    assert (view.referenced, view.host_referenced) == ((1,), (1,))
    assert cache.prepare(4) == Prepared(2)
    assert cache.commit(4, 2) == Committed(2)
    made = cache.materialize(4, 4)
    assert copies_of(made) == [("onboard", 0, 0, made.tables[0][0])]


def test_dropping_a_host_block_takes_the_chosen_victim_below_it() -> None:
    """The victim hangs below the host block that makes room for it: nothing is copied."""
    cache = parent_on_host(1)
    commit(cache, 4, "1234")
    assert promised(cache, 4)[-1] == (key_at("hv"), key_at("h"))
    made = cache.materialize(4, 4)
    assert made.copies == ()
    assert cached(cache) == set()
    assert cache.view().host_free == (1,)


def test_reserved_victim_that_lost_its_content_keeps_its_promise() -> None:
    """[A49] The host block above a promised victim is dropped: slot and destination stay."""
    cache = parent_on_host(2)
    commit(cache, 4, "1234")
    assert promised(cache, 4)[-1] == (key_at("hv"), b"")
    cache.evict(0, 1, is_host=True)
    assert cached(cache) == set()
    view = cache.view()
    assert (view.reserved, view.host_reserved, view.host_free) == ((4,), (1,), (1,))
    assert promised(cache, 4)[-1] == (b"", b"")
    assert cache.materialize(4, 4).copies == ()
    assert cache.view().host_free == (2,)


def test_dropped_host_block_leaves_referenced_blocks_below_it_to_their_holder() -> None:
    """[A49, I9] Published below a host block that goes: private again, attached again later."""
    cache = make_cache(dense(4, 1))
    install(cache, 1, "h")
    table = install(cache, 2, "hv", cap=0).tables[0]
    cache.publish(1, 1)
    cache.publish(2, 2)
    cache.free(1)
    push_out(cache, 3, "12")
    cache.drain_changes()
    cache.evict(0, 1, is_host=True)
    assert cache.drain_changes() == ((False, 0, key_at("hv")), (False, 0, key_at("h")))
    assert cache.view().referenced == (2,)
    assert set(install(cache, 4, "12").tables[0]).isdisjoint(table)
    cache.publish(2, 2)
    assert cached(cache) == {key_at("h"), key_at("hv")}


def test_leased_path_is_onboarded_by_another_request() -> None:
    """[I9] The lease follows the move; its prefix is never without a reference."""
    cache = half_on_host()
    lease(cache, 3, "abcdX")
    install(cache, 4, "abcdY", cap=4)
    cache.evict(0, 9)
    cache.evict(0, 9, is_host=True)
    view = cache.view()
    assert (view.referenced, view.host_referenced) == ((5,), (0,))
    cache.free(4)
    cache.evict(0, 9)
    assert len(cached(cache)) == 4


def test_failed_commit_leaves_destinations_as_they_were() -> None:
    """[I18]"""
    cache = make_cache(dense(8, 4), floor_fraction=0.25)
    serve(cache, 1, "abcdef")
    lease(cache, 2, "12345")
    assert cache.prepare(2) == Prepared(0)
    assert cache.view().host_reserved == (3,)
    lease(cache, 3, "abX")
    before = books(cache)
    assert getattr(cache.commit(2, 0), "missing", None) == (1,)
    assert books(cache) == before


def test_books_change_no_content() -> None:
    """[I19] Prepare, trim and commit leave keys, tiers and the index alone."""
    cache = half_on_host()
    lease(cache, 3, "abcdX")

    def content() -> object:
        places = [(b.key, b.slot, b.is_host) for b in cache._pools[0]._blocks]
        return places, cache.view().keys, cache.index_version

    before = content()
    cache.prepare(3)
    cache.trim(3, 3)
    cache.commit(3, 3)
    assert content() == before
    cache.release(3)
    assert content() == before


def test_release_leaves_no_destination() -> None:
    """[I14]"""
    cache = make_cache(dense(4, 4))
    serve(cache, 1, "abcd")
    before = cache.view()
    commit(cache, 2, "123")
    assert cache.view().host_reserved == (3,)
    cache.release(2)
    assert cache.view() == before


def test_a_save_cannot_be_overtaken() -> None:
    """FS-90: a block on its way to the host is not given away before its copy is listed.

    The slot's next holder is named by the same Install as the copy, behind it, and a copy runs
    before any wave of that Install: the saved key is right whenever the copy runs.
    """
    cache = make_cache(dense(4, 3))
    old = serve(cache, 1, "abc").tables[0]
    made = install(cache, 2, "wxyz")
    saved = {copy[2]: copy[3] for copy in copies_of(made)}
    assert set(saved) == set(old)
    assert set(made.tables[0]) > set(old)
    assert len(set(saved.values())) == 3
    cache.free(2)  # cancelled before its first wave; its copies run all the same
    back = install(cache, 3, "abcd", cap=2)
    onboarded = [copy[2] for copy in copies_of(back) if copy[0] == "onboard"]
    assert onboarded == [saved[old[0]], saved[old[1]]]


def test_host_use_is_bounded_under_a_cycle() -> None:
    """FS-91: a working set of three host capacities goes round; the hot prompt hits."""
    cache = make_cache(dense(6, 8))
    rid = 0
    for _ in range(20):
        for letter in "abcdefgh":
            rid += 1
            serve(cache, rid, letter * 3)
            rid += 1
            serve(cache, rid, "HOT")
            view = cache.view()
            assert view.host_total == (8,)
            assert view.host_free[0] + view.host_cached[0] == 8
            assert len(view.keys[0]) == view.cached[0] + view.host_cached[0]
    learn(cache, 1000, "HOT!")
    assert cache.hint(1000) == 3
    stats = cache.stats()
    label = '{window="0"}'
    resident = stats[f"wavepp_cached_blocks{label}"] + stats[f"wavepp_host_cached_blocks{label}"]
    assert stats["wavepp_published_blocks_total"] - stats["wavepp_dropped_blocks_total"] == resident
