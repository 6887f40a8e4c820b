"""Field scenarios of events and identity, with the ranks' real caches behind the view."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from kv_router_hooks.router_view import BlockRemoved, BlockStored
from tests.unit.kv_router_hooks.fleet import BLOCK, Fleet, Router, keys_of
from wavepp_worker.base.errors import PeerError
from wavepp_worker.base.types import KEY_BYTES
from wavepp_worker.cache import hashing
from wavepp_worker.cache.hashing import router_hash, scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec

DENSE = WindowSpec(slots=12)
SMALL = WindowSpec(slots=6)
WITH_HOST = WindowSpec(slots=6, host_slots=6)
STATES = WindowSpec(kind="recurrent", slots=6)
PROMPT = "aabbccddx"


def test_two_copies_of_a_prefix_are_one_entry_until_the_last_is_gone() -> None:
    """FS-74: after every step the index says what a request would reuse."""
    fleet = Fleet([DENSE], [DENSE])
    first, second = fleet.open(PROMPT), fleet.open(PROMPT)
    for rid in (first, second):
        fleet.publish(rid, len(PROMPT))
        assert fleet.router.depth(PROMPT) == fleet.reuse(PROMPT) == 8
    for rid in (first, second):
        fleet.free(rid)
        assert fleet.router.depth(PROMPT) == fleet.reuse(PROMPT) == 8
    stored = [event.key for event in fleet.router.events]
    assert stored == keys_of(PROMPT), "one entry for both copies"
    fleet.evict(1, 0, 3)
    assert fleet.router.depth(PROMPT) == fleet.reuse(PROMPT) == 2
    fleet.evict(1, 0, 1)
    assert fleet.router.depth(PROMPT) == fleet.reuse(PROMPT) == 0
    fleet.evict(0, 0, 4)
    removed = [event.key for event in fleet.router.events if isinstance(event, BlockRemoved)]
    assert removed == keys_of(PROMPT)[::-1], "each block once, with its first lost copy"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_or_repeated_delta_is_seen(rank: int) -> None:
    """FS-75: numbers per rank grow without a gap, so a view is never silently wrong."""
    fleet = Fleet([DENSE], [DENSE])
    fleet.serve("aab")
    fleet.serve("ccd")
    fleet.caches[rank].evict(0, 1)
    (lost,) = fleet.deltas()
    fleet.caches[rank].evict(0, 1)
    (next_one,) = fleet.deltas()
    with pytest.raises(PeerError, match=rf"rank {rank}: cache delta {next_one[1]} arrived"):
        fleet.view.apply(*next_one)
    fleet.router.follow(fleet.view.apply(*lost))
    with pytest.raises(PeerError, match=rf"rank {rank}"):
        fleet.view.apply(*lost)
    fleet.router.follow(fleet.view.apply(*next_one))
    assert fleet.router.parents == {}


def test_every_event_follows_its_parent_and_chains_spell_the_prompt() -> None:
    """FS-76: prompts that share 0..n blocks, in chunks, on caches too small for all of them."""
    draw = random.Random(7)
    fleet = Fleet([SMALL], [DENSE, SMALL], [DENSE])
    roots = ["".join(draw.choices("abc", k=10)) for _ in range(4)]
    for _ in range(120):
        shared = draw.choice(roots)[: draw.randrange(11)]
        text = shared + "".join(draw.choices("xyz", k=12 - len(shared)))[: draw.randrange(1, 12)]
        rid = fleet.open(text, limit=draw.randrange(12))
        chunk = draw.randrange(1, 7)
        for end in [*range(chunk, len(text), chunk), len(text)]:
            fleet.publish(rid, end)
        fleet.free(rid)
        longer = text + "?"
        assert fleet.router.depth(longer) == fleet.reuse(longer)
    kinds = [type(event) for event in fleet.router.events]
    assert min(kinds.count(BlockStored), kinds.count(BlockRemoved)) > 100


SLIDING = WindowSpec(span_tokens=3, chunk_tokens=4, slots=12, host_slots=4)
HYBRIDS = {
    "attention and states": ([[DENSE, STATES], [DENSE]], 0.9),
    "states on two ranks": ([[DENSE, STATES], [STATES], [SMALL, STATES]], 0.5),
    "states only": ([[STATES], [STATES]], 0.5),
    "host tiers": ([[WITH_HOST, WindowSpec(kind="recurrent", slots=3, host_slots=3)]], 0.5),
    "sliding": ([[DENSE, SLIDING], [SLIDING]], 0.5),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_whatever_the_router_was_told_can_be_resumed_by_all_ranks(name: str) -> None:
    """FS-76, FS-79: every chain that was told is resumed to its end, for any mixture of windows.

    Snapshots and blocks are lost at random; a prompt that follows no chain to its end may be told
    more than it resumes, never less.
    """
    ranks, share = HYBRIDS[name]
    draw = random.Random(name)
    fleet = Fleet(*ranks)
    roots = ["".join(draw.choices("ab", k=10)) for _ in range(3)]
    compared = 0
    for _ in range(60):
        text = draw.choice(roots)[: draw.randrange(11)]
        text += "".join(draw.choices("xyz", k=draw.randrange(1, 12 - len(text))))
        last = (len(text) - 1) // BLOCK * BLOCK
        fleet.serve(text, points=sorted({*range(4, last, 4), last} - {0}))
        if draw.random() < share:
            rank = draw.randrange(len(ranks))
            fleet.evict(rank, draw.randrange(len(ranks[rank])), 1)
        for told, salt in fleet.router.leaves():
            assert fleet.reuse(told + "?", salt) == len(told)
            compared += 1
        assert fleet.router.depth(text + "?") >= fleet.reuse(text + "?")
    assert compared > 60


def test_a_new_life_starts_empty_and_takes_nothing_from_the_old_one() -> None:
    """FS-78: ranks live and die with their serving process, whose Dynamo instance id is new in
    each life; so "cleared" is a new view, and a delta of the old life is refused.  A router that
    starts later is told everything at once."""
    old = Fleet([DENSE], [DENSE])
    old.serve("aab")
    old.serve(PROMPT)
    late = Router()
    late.follow(old.view.snapshot())
    assert late.parents == old.router.parents
    assert late.depth(PROMPT) == old.reuse(PROMPT) == 8

    new = Fleet([DENSE], [DENSE])
    assert new.view.snapshot() == []
    assert new.router.depth(PROMPT) == new.reuse(PROMPT) == 0
    old.caches[0].evict(0, 1)
    ((rank, sequence, changes),) = old.deltas()
    with pytest.raises(PeerError):
        new.view.apply(rank, sequence, changes)
    new.serve(PROMPT)
    assert new.router.depth(PROMPT) == new.reuse(PROMPT) == 8


def test_a_lost_snapshot_is_less_depth_and_a_branch_is_no_event() -> None:
    """FS-79: store, branch off inside, drop only the snapshot, drop the blocks."""
    fleet = Fleet([DENSE, STATES], [DENSE])
    fleet.serve(PROMPT, points=(4, 8))
    longer = PROMPT[:8] + "yyz"
    assert fleet.router.depth(longer) == fleet.reuse(longer) == 8

    # A branch below an inner block: the common blocks get no event.
    events = len(fleet.router.events)
    branch = PROMPT[:4] + "qqr"
    fleet.serve(branch, points=(6,))
    (event,) = fleet.router.events[events:]
    assert event == BlockStored(keys_of(branch)[2], keys_of(branch)[1], event.tokens, "")
    assert fleet.router.depth(longer) == fleet.reuse(longer) == 8

    # Snapshots go one by one: the depth falls to the boundary that is left, blocks stay.
    depths = []
    for _ in range(3):
        fleet.evict(0, 1, 1)
        depths.append(fleet.router.depth(longer))
        assert depths[-1] == fleet.reuse(longer)
    assert sorted(depths, reverse=True) == depths
    assert depths[-1] == 0
    assert len(fleet.caches[0].view().keys[0]) == 5, "attention kept every block"
    assert fleet.router.parents == {}


def test_depth_falls_to_the_boundary_before_the_lost_one() -> None:
    """FS-79: the snapshot at 8 goes, the one at 4 stays."""
    fleet = Fleet([DENSE, STATES])
    fleet.serve(PROMPT[:4] + "x", points=(4,))
    fleet.serve(PROMPT, points=(4, 8))
    longer = PROMPT[:8] + "yyz"
    assert fleet.router.depth(longer) == fleet.reuse(longer) == 8
    fleet.reuse(PROMPT[:4] + "?")  # a use: the snapshot at 8 is the oldest now
    fleet.evict(0, 1, 1)
    assert fleet.router.depth(longer) == fleet.reuse(longer) == 4
    assert [type(event) for event in fleet.router.events[-2:]] == [BlockRemoved, BlockRemoved]


def test_a_prompt_that_leaves_between_two_boundaries_is_told_more_than_it_resumes() -> None:
    """The one over-estimate that the quorum documents: never beyond the next boundary's chain."""
    fleet = Fleet([DENSE, STATES], [DENSE])
    fleet.serve(PROMPT, points=(4, 8))
    leaving = PROMPT[:6] + "yyz"
    assert fleet.router.depth(leaving) == 6
    assert fleet.reuse(leaving) == 4


def test_salts_make_other_keys_and_losing_one_leaves_the_others() -> None:
    """FS-80"""
    fleet = Fleet([DENSE], [DENSE])
    salts = ("", "x", "y")
    for salt in salts:
        fleet.serve(PROMPT[:7], salt)
    keys = [set(keys_of(PROMPT[:7], salt)) for salt in salts]
    assert len(set.union(*keys)) == sum(map(len, keys)) == 9
    fleet.reuse(PROMPT[:7], "")
    fleet.reuse(PROMPT[:7], "y")
    fleet.evict(1, 0, 3)  # the oldest: those under "x"
    assert [fleet.router.depth(PROMPT[:7], salt) for salt in salts] == [6, 0, 6]


def test_a_router_that_forgot_everything_gets_it_again_without_new_blocks() -> None:
    """FS-82: a hot prompt that is always a full hit."""
    fleet = Fleet([DENSE], [DENSE])
    fleet.serve(PROMPT)
    before = len(fleet.router.events)
    fleet.serve(PROMPT)
    assert len(fleet.router.events) == before, "a full hit stores nothing"
    fresh = Router()
    fresh.follow(fleet.view.snapshot())
    assert fresh.depth(PROMPT) == 8


def test_moves_between_tiers_are_no_events() -> None:
    """FS-84, I3: what is announced is what can be loaded; the host tier's unit is one block."""
    fleet = Fleet([WITH_HOST], [DENSE])
    fleet.serve(PROMPT[:8] + "x")
    fleet.serve("11223344x")  # on rank 0 the first prompt moves to the host tier
    view = fleet.caches[0].view()
    assert view.host_cached[0] >= 3, "blocks were offloaded"
    assert all(isinstance(event, BlockStored) for event in fleet.router.events)
    version = fleet.caches[0].index_version
    for blocks in range(5):
        text = PROMPT[: blocks * BLOCK] + "??z"
        assert fleet.router.depth(text) == fleet.reuse(text) == blocks * BLOCK
    assert fleet.caches[0].index_version == version

    before = len(fleet.router.events)
    rid = fleet.open(PROMPT)  # onboards what it leased, offloads what was in the way
    assert fleet.caches[0].index_version == version
    fleet.publish(rid, len(PROMPT))
    fleet.free(rid)
    assert fleet.router.events[before:] == []


CHILD = """
import random
from wavepp_worker.cache.hashing import router_hash, scope_key, sequence_keys
draw = random.Random(5)
for number in range(100):
    tokens = b"".join(draw.randrange(1 << 17).to_bytes(4, "little") for _ in range(number))
    keys = sequence_keys(tokens, 4, scope_key("model", salt=str(number % 3)))
    print(keys.hex(), router_hash(keys[-32:]) if keys else 0)
"""


def test_keys_depend_on_content_only() -> None:
    """FS-85: 100 prompts under different hash seeds; one key, written down, for other hosts.

    Keys are made once, in the serving process, and sent to all ranks [A37]: stages cannot differ.
    """
    outputs = {
        subprocess.run(
            [sys.executable, "-c", CHILD],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4294967295")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 100
    written_down = "b63c52273cb099ec5348ddceb3330d42fa0c326a0b0e2adaad4529687c98d15c"
    assert sequence_keys(bytes(8), 2, scope_key("model", salt="x")).hex() == written_down


def test_a_collision_of_router_hashes_costs_time_only() -> None:
    """FS-86: ranks compare whole 256-bit keys; the router's 64 bits are a hint."""
    left = b"".join(keys_of("aabb"))
    right = b"".join(key[:8] + key[8:][::-1] for key in keys_of("aabb"))
    for at in range(0, len(left), KEY_BYTES):
        one, other = left[at : at + KEY_BYTES], right[at : at + KEY_BYTES]
        assert router_hash(one) == router_hash(other) and one != other
    cache = RankCache([DENSE], BLOCK, 0.0, 0, check_always=True)
    cache.learn(1, 5, left)
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    cache.materialize(1, 1)
    cache.publish(1, 5)
    cache.free(1)
    cache.learn(2, 5, right)
    assert cache.hint(2) == cache.acquire(2, 1, 4) == 0
    cache.learn(3, 5, left)
    assert cache.hint(3) == cache.acquire(3, 1, 4) == 4


def test_the_strength_of_a_key_is_documented() -> None:
    """FS-86: no content is compared on a hit, so the key is the only defence, and it says so."""
    text = " ".join((hashing.__doc__ or "").split())
    assert f"{KEY_BYTES * 8} bits" in text
    assert "only defence" in text


@pytest.mark.parametrize("tier", ["device", "host"])
def test_reuse_stays_within_a_salt(tier: str) -> None:
    """FS-87: the pair test: fails when isolation is broken, and when caching is."""
    fleet = Fleet([WITH_HOST if tier == "host" else DENSE], [DENSE])
    fleet.serve(PROMPT, "x")
    if tier == "host":
        fleet.serve("11223344x", "z")
        assert fleet.caches[0].view().host_cached[0] >= 3
    for salt, reused in (("x", 8), ("y", 0), ("", 0)):
        assert fleet.reuse(PROMPT, salt) == reused
        assert fleet.router.depth(PROMPT, salt) == reused
    salts = {event.salt for event in fleet.router.events if isinstance(event, BlockStored)}
    assert salts == ({"x", "z"} if tier == "host" else {"x"})
