"""Recurrent windows: snapshot points, exact leases, count reservations, and the host tier.

Most caches here have window 0 dense and window 1 recurrent; one letter is one block.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    recurrent,
    serve,
    stored_points,
)
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.base.marks import hits
from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache, Shortfall
from wavepp_worker.cache.snapshots import granted_snapshots, snapshot_points
from wavepp_worker.wire.mailbox import StateSlots

X1_PROMPT = "x" * 100  # one letter is 1K tokens of the worked example


def hybrid(
    blocks: int, states: int, host_states: int = 0, *, floor_fraction: float = 0.0
) -> RankCache:
    return make_cache(blocks, recurrent(states, host_states), floor_fraction=floor_fraction)


def with_snapshots(prompt: str, points: Sequence[int], states: int = 12) -> RankCache:
    """A hybrid cache that has served `prompt` and kept exactly these snapshots."""
    cache = hybrid(300, states)
    serve(cache, 1, prompt, points=points)
    assert cache.view().cached == (len(prompt), len(points))
    return cache


# ── placement ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt_tokens", "points"),
    [
        (1, ()),
        (4, ()),
        (5, (4,)),
        (15, (12,)),
        (16, (12,)),
        (17, (16,)),
        (21, (16, 20)),
        (32, (16, 28)),
        (33, (16, 32)),
        (40, (16, 32, 36)),
    ],
)
def test_points_are_every_interval_and_the_deepest_endpoint(
    prompt_tokens: int, points: tuple[int, ...]
) -> None:
    """[A33] B = 4, interval 16."""
    assert snapshot_points(prompt_tokens, 4, 16) == points


def test_interval_is_whole_blocks() -> None:
    for interval in (0, 6, -4):
        with pytest.raises(InvariantError):
            snapshot_points(100, 4, interval)


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("multiple", [1, 2, 3, 4, 5])
def test_second_run_reuses_the_deepest_snapshot(multiple: int, extra: int) -> None:
    """FS-29: prompts of kS-1, kS and kS+1 tokens, each sent twice; S = 4 blocks of 2 tokens."""
    size = 8 * multiple + extra
    prompt = "p" * size
    cache = make_cache(200, recurrent(40), block_tokens=2)
    for rid in (1, 2):
        learn(cache, rid, prompt, 2, snapshot_points(size, 2, 8))
        endpoint = cache.acquire(rid, 1, size)
        cache.prepare(rid)
        cache.commit(rid, endpoint)
        cache.publish(rid, size, stored_points(cache.materialize(rid, rid)))
        cache.free(rid)
        if rid == 1:
            assert endpoint == 0
    assert endpoint == (size - 1) // 2 * 2  # at least one token is computed


def test_points_must_be_block_boundaries_in_order() -> None:
    cache = make_cache(8, recurrent(4), block_tokens=2)
    for rid, points in enumerate([(3,), (4, 2), (2, 2), (8,), (0,)]):
        with pytest.raises(InvariantError, match="snapshot points"):
            learn(cache, rid, "abcdefgh", 2, points)


# ── hints and leases ─────────────────────────────────────────────────────────────────────────


def test_hint_scans_back_from_the_attention_endpoint() -> None:
    """[I5] The deepest snapshot at or below what the other windows hold."""
    cache = with_snapshots("abcdefghij", (3, 6, 9))
    learn(cache, 2, "abcdefghijk")
    assert cache.hint(2) == 9
    assert cache.hint(2, cap=8) == 6
    assert cache.hint(2, cap=2) == 0
    learn(cache, 3, "abcdefgX")
    assert cache.hint(3) == 6
    assert cache.acquire(3, 1, 100) == 6
    assert cache.view().referenced == (6, 1)
    assert cache.stats()["wavepp_snapshot_limited_hints_total"] == 4


def test_lease_is_at_an_exact_snapshot() -> None:
    """[I8] Attention beyond the snapshot is not pinned."""
    cache = with_snapshots("abcdefghij", (3, 6, 9))
    assert lease(cache, 2, "abcdefgX") == 6
    assert cache.evict(0, 100) == 4
    assert cache.evict(1, 100) == 2
    assert cached(cache, 1) == {key_at("abcdef")}


def test_a_rank_with_states_only() -> None:
    cache = make_cache(recurrent(6))
    assert (cache.is_sparse, cache.has_states) == (True, True)
    assert cache.available_tokens() == cache.total_tokens() == 1 << 62
    assert serve(cache, 1, "abcd", points=(2, 3)).tables == ((),)
    assert lease(cache, 2, "abcX") == 3


def test_endpoints_of_two_ranks_meet_at_a_common_snapshot() -> None:
    """X1, path A: snapshots 64, 72, 90 and 64, 80; a lease at each minimum, then both agree.

    FS-35: lowering an endpoint finds an earlier real state on both.
    """
    ranks = [
        with_snapshots(X1_PROMPT, (64, 72, 90)),
        with_snapshots(X1_PROMPT, (64, 80)),
    ]
    for cache in ranks:
        learn(cache, 2, X1_PROMPT + "y")
    candidate = min(cache.hint(2) for cache in ranks)
    assert candidate == 80
    found = []
    for attempt in (1, 2, 3):
        endpoints = [cache.acquire(2, attempt, candidate) for cache in ranks]
        found.append(endpoints)
        candidate = min(endpoints)
    assert found == [[72, 80], [72, 64], [64, 64]]
    for cache in ranks:
        assert cache.prepare(2) == Prepared(64)
        assert cache.commit(2, 64) == Committed(64)
        made = cache.materialize(2, 2)
        kind, window, source, target = copies_of(made)[-1]
        assert (kind, window) == ("load_state", 1)
        slots = {block.key: block.slot for block in cache._pools[1]._blocks}
        assert (source, target) == (slots[key_at("x" * 64)], made.states[0].working)


def test_trim_path_of_two_ranks() -> None:
    """X1, path B: trims at 72 and 64 instead of new attempts."""
    ranks = [with_snapshots(X1_PROMPT, (64, 72, 90)), with_snapshots(X1_PROMPT, (64, 80))]
    endpoints = [lease(cache, 2, X1_PROMPT + "y", cap=80) for cache in ranks]
    for expected in ([72, 64], [64, 64]):
        endpoints = [cache.trim(2, min(endpoints)) for cache in ranks]
        assert endpoints == expected
    assert [cache.view().referenced for cache in ranks] == [(64, 1), (64, 1)]


def test_trim_takes_the_earlier_snapshot_before_it_gives_the_later_one_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """[I10] At every step the lease holds a complete endpoint."""
    cache = with_snapshots("abcdefghij", (3, 6, 9))
    lease(cache, 2, "abcdefghijk")
    keys = {key_at("abcdefghij"[:size]): size for size in range(11)}
    steps: list[tuple[str, list[int]]] = []
    for name in ("pin", "unpin"):
        real = getattr(BlockPool, name)

        def spy(
            pool: BlockPool, blocks: Sequence[Block], name: str = name, real: object = real,
            **options: bool,
        ) -> None:  # fmt: skip
            if blocks:
                steps.append((f"{name} {pool.window}", [keys[block.key] for block in blocks]))
            real(pool, blocks, **options)

        monkeypatch.setattr(BlockPool, name, spy)
    assert cache.trim(2, 8) == 6
    assert steps == [("pin 1", [6]), ("unpin 0", [7, 8, 9]), ("unpin 1", [9])]


def test_trim_falls_further_when_the_snapshot_is_gone() -> None:
    cache = with_snapshots("abcdefghij", (3, 6, 9))
    lease(cache, 2, "abcdefghijk")
    fallbacks = cache.stats()["wavepp_snapshot_fallbacks_total"]
    assert cache.evict(1, 3) == 2  # 9 is leased
    assert cache.trim(2, 8) == 0
    assert cache.view().referenced == (0, 0)
    assert cache.stats()["wavepp_snapshot_fallbacks_total"] == fallbacks + 1


def test_only_the_snapshot_was_evicted() -> None:
    """FS-33: attention is there, the state is not: no reuse beyond what has a state.

    The new working state begins with zeros or with its own snapshot, whatever its slot held.
    """
    cache = with_snapshots("abcdef", (2, 5), states=4)
    learn(cache, 2, "abcdefg")
    cache.evict(1, 9)
    assert cache.hint(2) == 0
    for rid in range(3, 9):  # others keep recycling the slots
        serve(cache, rid, f"{rid}{rid}", points=(1,))
    made = install(cache, 10, "abcdefgh")
    assert made.endpoint == 0
    assert copies_of(made)[-1] == ("zero_state", 1, -1, made.states[0].working)
    cache.publish(10, 8)
    again = install(cache, 11, "88X")
    assert copies_of(again)[-1][0] == "load_state"


# ── promises by count ────────────────────────────────────────────────────────────────────────


def test_snapshot_that_backs_a_promise_cannot_be_leased() -> None:
    """S5: two state slots, one with a snapshot; A's promise takes both, B falls to 0.  [A48]"""
    cache = hybrid(20, 2)
    serve(cache, 1, "bb", points=(1,))
    before = hits["lease.snapshot_refused"]
    commit(cache, 2, "aaa", points=(2,))  # a working state and one snapshot
    assert cache.view().reserved == (3, 2)
    assert lease(cache, 3, "bbb") == 0
    assert hits["lease.snapshot_refused"] == before + 1
    assert cache.view().referenced == (0, 0)
    made = cache.materialize(2, 2)
    assert {made.states[0].working, made.states[0].snapshots[0][1]} == {0, 1}


def test_a_snapshot_that_another_lease_holds_may_be_shared() -> None:
    """[A48] Only a 0 -> 1 reference takes a slot from the promises."""
    cache = hybrid(20, 3)
    serve(cache, 1, "bb", points=(1,))
    assert lease(cache, 2, "bX") == 1
    commit(cache, 3, "aaa", points=(2,))
    assert cache.view().reserved == (3, 2)
    assert lease(cache, 4, "bY") == 1


def test_refused_snapshot_falls_back_to_a_shared_earlier_one() -> None:
    cache = hybrid(40, 4)
    serve(cache, 1, "abcdef", points=(2, 4))
    assert lease(cache, 2, "abX") == 2
    commit(cache, 3, "zzz", points=(1, 2))  # takes the rest: 4 slots less the leased one
    assert cache.view().reserved == (3, 3)
    assert lease(cache, 4, "abcdef") == 2
    assert cache.stats()["wavepp_snapshot_fallbacks_total"] == 1


def test_trim_may_swap_snapshots_when_nothing_is_spare() -> None:
    """[I10, A48] The pin is allowed because the later snapshot comes back in the same section."""
    cache = hybrid(40, 4)
    serve(cache, 1, "abcdef", points=(2, 4))
    assert lease(cache, 2, "abcdef") == 4
    commit(cache, 3, "zzz", points=(1, 2))
    assert cache.view().reserved == (3, 3)  # all that is left: two empty slots and snapshot 2
    before = hits["lease.snapshot_swapped"]
    assert cache.trim(2, 3) == 2
    assert hits["lease.snapshot_swapped"] == before + 1
    assert cache.view().referenced == (2, 1)


def test_trim_skips_a_snapshot_that_backs_a_promise() -> None:
    """[A48] The later snapshot is shared, so giving it back makes no room for the earlier one."""
    cache = hybrid(40, 4)
    serve(cache, 1, "abcdef", points=(2, 4))
    assert lease(cache, 2, "abcdef") == 4
    assert lease(cache, 3, "abcdeX") == 4
    commit(cache, 4, "zzz", points=(1, 2))
    assert cache.view().reserved == (3, 3)
    assert cache.trim(2, 3) == 0


def test_more_points_than_slots_stores_the_last_ones() -> None:
    """S9: four state slots, five snapshot points, an empty cache.  [A47]"""
    cache = hybrid(40, 4)
    made = install(cache, 1, "abcdefghijkl", points=(2, 4, 6, 8, 10))
    (state,) = made.states
    assert [point for point, _ in state.snapshots] == [6, 8, 10]
    assert len({state.working, *(slot for _, slot in state.snapshots)}) == 4
    cache.publish(1, 12, (6, 8, 10))
    assert cached(cache, 1) == {key_at("abcdefghijkl"[:size]) for size in (6, 8, 10)}
    assert cache.stats()["wavepp_snapshots_published_total"] == 3


def test_only_points_behind_the_endpoint_are_stored() -> None:
    cache = with_snapshots("abcdefgh", (2, 4, 6))
    (state,) = install(cache, 2, "abcdXYZW", points=(2, 4, 6, 7)).states
    assert [point for point, _ in state.snapshots] == [6, 7]


@pytest.mark.parametrize(
    ("wanted", "spare", "floor", "granted"),
    [(5, 3, 0, 3), (5, 9, 0, 5), (5, 3, 2, 1), (5, 1, 2, 0), (0, 9, 0, 0)],
)
def test_granted_snapshots(wanted: int, spare: int, floor: int, granted: int) -> None:
    assert granted_snapshots(wanted, spare, floor) == granted


def test_snapshots_leave_the_floor_and_the_working_state_is_hard() -> None:
    """[I24, A47] Twenty slots: two stay available."""
    cache = hybrid(100, 20)
    points = tuple(range(1, 19))
    commit(cache, 1, "a" * 20, points=points)
    assert cache.view().reserved == (20, 18)
    assert lease(cache, 2, "bb", points=(1,)) == 0
    assert cache.prepare(2) == Shortfall(missing=(0, 1), generation=0)
    cache.acquire(2, 2, 0)
    assert cache.prepare(2, no_floor=True) == Prepared(0)
    assert cache.view().reserved == (22, 19)  # waived for the working state only


def test_commit_gives_promised_snapshots_up_for_the_floor() -> None:
    """[A47] A lease on a snapshot ate into the margin after prepare: fewer are stored."""
    cache = hybrid(100, 20)
    serve(cache, 1, "zzzz", points=(1, 2, 3))
    lease(cache, 2, "a" * 20, points=tuple(range(1, 19)))
    assert cache.prepare(2) == Prepared(0)
    assert cache.view().reserved[1] == 18
    assert lease(cache, 3, "zzzX") == 3
    assert cache.commit(2, 0) == Committed(0)
    assert cache.view().reserved[1] == 17


def test_lower_endpoint_asks_for_more_snapshots_at_commit() -> None:
    cache = with_snapshots("abcdefgh", (2, 4, 6))
    assert lease(cache, 2, "abcdefghij", points=(2, 4, 6, 8, 9)) == 6
    assert cache.prepare(2) == Prepared(6)
    assert cache.view().reserved == (4, 3)
    assert cache.trim(2, 5) == 4
    assert cache.commit(2, 4) == Committed(4)
    assert cache.view().reserved == (6, 4)


def test_all_or_nothing_when_one_state_slot_is_missing() -> None:
    """FS-34: the request waits with nothing held, and is admitted when a slot frees up.  [I29]"""
    cache = hybrid(50, 3)
    for rid in (1, 2):
        install(cache, rid, f"{rid}{rid}")
    serve(cache, 3, "ss", points=(1,))  # cannot store it: the only slot is its working state
    assert cached(cache, 1) == set()
    install(cache, 4, "44")
    before = books(cache)
    lease(cache, 5, "55", points=(1,))
    assert cache.prepare(5) == Shortfall(missing=(0, 1), generation=cache.capacity_generation)
    assert cache.view() == before[3]
    cache.check_invariants(waiting=[5])
    generation = cache.capacity_generation
    cache.free(1)
    assert cache.capacity_generation == generation + 1
    assert cache.acquire(5, 2, 10) == 0
    assert cache.prepare(5) == Prepared(0)


def test_a_request_that_holds_something_does_not_wait() -> None:
    """[I29]"""
    cache = hybrid(50, 3)
    lease(cache, 1, "aa")
    with pytest.raises(InvariantError, match="I29"):
        cache.check_invariants(waiting=[1])


def test_count_reservations_and_leases_never_exceed_the_slots() -> None:
    """[I17] available(g) >= 0 is audited."""
    cache = hybrid(50, 3)
    commit(cache, 1, "aa", points=(1,))
    cache._pools[1].counted += 2
    with pytest.raises(InvariantError, match="I17"):
        cache.check_invariants()


# ── sequence ─────────────────────────────────────────────────────────────────────────────────


def test_publication_gives_snapshot_slots_back() -> None:
    """A snapshot is attached without a reference as soon as its wave is done: that is room."""
    cache = hybrid(20, 4)
    install(cache, 1, "abcdef", points=(2, 4))
    assert cache.view().referenced == (6, 3)
    generation = cache.capacity_generation
    cache.publish(1, 3, (2,))
    assert cache.view().referenced == (6, 2)
    assert cache.view().cached == (0, 1)
    assert cache.capacity_generation == generation + 1
    assert lease(cache, 2, "abX") == 2  # while the first still runs
    cache.free(1)  # 4 was never written
    assert cached(cache, 1) == {key_at("ab")}
    assert cache.view().free == (17, 3)


def test_duplicate_snapshot_is_freed_at_once() -> None:
    cache = hybrid(20, 8)
    install(cache, 1, "abc", points=(2,))
    install(cache, 2, "abd", points=(2,))
    cache.publish(1, 3, (2,))
    cache.drain_changes()
    free = cache.view().free[1]
    cache.publish(2, 3, (2,))
    assert cache.view().free[1] == free + 1
    assert (True, 1, key_at("ab")) not in cache.drain_changes()
    assert cache.view().cached[1] == 1


def test_snapshot_reported_too_early_or_nowhere_is_refused() -> None:
    """[I43]"""
    cache = hybrid(20, 8)
    install(cache, 1, "abcdef", points=(2, 4))
    with pytest.raises(InvariantError, match="I43"):
        cache.publish(1, 3, (4,))
    with pytest.raises(InvariantError, match="I43"):
        cache.publish(1, 6, (3,))


def test_leased_snapshot_is_no_victim_of_its_own_install() -> None:
    """[I9, I46] Two slots: the snapshot read stays, the other one becomes the working state."""
    cache = hybrid(20, 2)
    serve(cache, 1, "ab", points=(1,))
    made = serve(cache, 2, "abc", points=(2,))  # leases 1; no slot is left for 2
    (state,) = made.states
    assert state == StateSlots(1, state.working, ())
    (copy,) = copies_of(made)
    assert copy[0] == "load_state"
    assert copy[2] != copy[3]
    assert cached(cache, 1) == {key_at("a")}


def test_working_state_stays_until_freed() -> None:
    cache = hybrid(20, 1)
    install(cache, 1, "ab")
    cache.publish(1, 2)
    assert cache.view().referenced[1] == 1
    cache.free(1)
    assert cache.view().free[1] == 1


# ── host tier ────────────────────────────────────────────────────────────────────────────────


def test_snapshot_is_offloaded_and_loaded_from_the_host() -> None:
    """FS-30: a hybrid prompt of exactly kS tokens goes to the host and comes back whole.

    Attention and state resume at the same token, the deepest snapshot before its last block.
    """
    cache = make_cache(dense(8, 8), recurrent(2, 8))
    points = snapshot_points(8, 1, 4)
    serve(cache, 1, "abcdefgh", points=points)
    made = serve(cache, 2, "12345678", points=points)
    assert ("offload", 1) in {copy[:2] for copy in copies_of(made)}
    assert cache.view().host_cached == (8, 1)
    assert lease(cache, 3, "abcdefgh") == 7
    cache.prepare(3)
    cache.commit(3, 7)
    again = cache.materialize(3, 3)
    assert again.endpoint == 7
    assert [copy[0] for copy in copies_of(again) if copy[1] == 1][-1] == "onboard_state"
    assert {copy[0] for copy in copies_of(again) if copy[1] == 0} == {"offload", "onboard"}
    assert cache.view().host_cached[1] >= 1  # it stays where it is


def test_host_without_a_state_falls_back_to_an_earlier_one() -> None:
    """FS-30, second half: the state at the end is gone from the host."""
    cache = make_cache(20, recurrent(4, 4))
    serve(cache, 1, "abcdefgh", points=(4, 7))
    made = install(cache, 2, "123", points=(1, 2))
    assert [copy[0] for copy in copies_of(made)].count("offload") == 1
    cache.evict(1, 1, is_host=True)
    learn(cache, 3, "abcdefgh")
    assert cache.hint(3) == 7
    assert cache.acquire(3, 1, 7) == 7
    cache.release(3)
    cache.evict(1, 1)
    assert cache.acquire(3, 2, 7) == 0


def test_leasing_a_host_snapshot_takes_no_device_slot() -> None:
    """[A48] It backs no promise, so it is never refused."""
    cache = make_cache(40, recurrent(2, 2))
    serve(cache, 1, "ab", points=(1,))
    serve(cache, 2, "zz", points=(1,))  # a's snapshot is offloaded
    assert cache.view().host_cached == (0, 1)
    commit(cache, 3, "yy", points=(1,))
    assert cache.view().reserved == (2, 2)
    assert lease(cache, 4, "aX") == 1
    assert cache.view().host_referenced == (0, 1)


def test_full_host_drops_the_snapshot() -> None:
    """[A41] The one host slot is being read."""
    cache = make_cache(40, recurrent(2, 1))
    serve(cache, 1, "ab", points=(1,))
    serve(cache, 2, "zz", points=(1,))
    lease(cache, 3, "aX")
    made = install(cache, 4, "yy", points=(1,))
    assert "offload" not in {copy[0] for copy in copies_of(made)}
    assert cached(cache, 1) == {key_at("a")}


def test_two_recurrent_windows_may_store_different_points() -> None:
    """A rank that cannot store a snapshot skips it; divergence is legal."""
    cache = make_cache(recurrent(2), recurrent(5))
    made = install(cache, 1, "abcdef", points=(2, 4))
    assert [[point for point, _ in state.snapshots] for state in made.states] == [[4], [2, 4]]
    cache.publish(1, 6, (2, 4))
    assert [len(cached(cache, window)) for window in (0, 1)] == [1, 2]
    cache.evict(1, 2)
    assert lease(cache, 2, "abcdeX") == 0


def test_release_gives_every_promise_back() -> None:
    """[I14]"""
    cache = hybrid(20, 6)
    serve(cache, 1, "abc", points=(2,))
    before = cache.view()
    commit(cache, 2, "abcd", points=(3,))
    cache.release(2)
    assert cache.view() == before
    assert RequestId(2) not in cache._escrows
