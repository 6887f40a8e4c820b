"""I1, I6 and I22 by name: the index is the tree, probing is free, a commitment is kept."""

from __future__ import annotations

import random

import pytest

from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.cache.window import WindowSpec

B = 4
SCOPE = scope_key("promises")
MIXES = {
    "dense": (WindowSpec(slots=24),),
    "host": (WindowSpec(slots=16, host_slots=6),),
    "hybrid": (WindowSpec(slots=20, host_slots=3), WindowSpec(kind="recurrent", slots=4)),
    "states": (WindowSpec(kind="recurrent", slots=3, host_slots=2),),
    "sliding": (WindowSpec(slots=24), WindowSpec(slots=16, span_tokens=6, chunk_tokens=8)),
}


class Walk:
    """Random requests on one cache."""

    def __init__(self, windows: tuple[WindowSpec, ...], seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = RankCache(windows, B, 0.0, 0, check_always=True)
        self.rid = self.ino = 0
        self.open: list[int] = []  # committed
        self.running: list[tuple[int, int]] = []
        self.text = bytes(self.rng.randrange(256) for _ in range(4 * 80))

    def learn(self) -> tuple[int, int]:
        self.rid += 1
        tokens = self.rng.randint(1, 56)
        raw = self.text[: 4 * tokens]
        if self.rng.random() < 0.4:
            cut = 4 * self.rng.randrange(tokens)
            raw = raw[:cut] + bytes(self.rng.randrange(256) for _ in range(4 * tokens - cut))
        keys = sequence_keys(raw, B, SCOPE)
        self.cache.learn(self.rid, tokens, keys, snapshot_points(tokens, B, 2 * B))
        return self.rid, tokens

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.4:
            rid, tokens = self.learn()
            endpoint = self.cache.acquire(rid, 1, self.rng.choice([0, tokens]))
            if not isinstance(self.cache.prepare(rid), Prepared):
                self.cache.forget(rid)
            elif isinstance(self.cache.commit(rid, endpoint), Committed):
                self.open.append(rid)
        elif choice < 0.7 and self.open:
            rid = self.open.pop(self.rng.randrange(len(self.open)))
            self.ino += 1
            made = self.cache.materialize(rid, self.ino)
            stored = [point for states in made.states for point, _ in states.snapshots]
            self.cache.publish(rid, self.cache._requests[rid].prompt_tokens, stored)  # type: ignore[index]
            self.running.append((rid, made.endpoint))
        elif choice < 0.9 and self.running:
            rid, _ = self.running.pop(self.rng.randrange(len(self.running)))
            self.cache.free(rid)
            self.cache.forget(rid)
        else:
            self.cache.evict(self.rng.randrange(len(self.cache.view().total)), 1)


@pytest.mark.parametrize("mix", MIXES)
def test_i22_what_is_committed_materialises_whatever_happened_since(mix: str) -> None:
    """I22: others lease, commit, run, publish, are evicted in between; it never fails."""
    done = 0
    for seed in range(12):
        walk = Walk(MIXES[mix], seed)
        for _ in range(120):
            walk.step()
        done += walk.ino
    assert done > 100


@pytest.mark.parametrize("mix", MIXES)
def test_i1_the_index_counts_what_the_trees_hold_on_any_tier(mix: str) -> None:
    """I1, I3: rebuilt from every change ever reported, and from the view of the tree."""
    walk = Walk(MIXES[mix], 99)
    held: list[set[bytes]] = [set() for _ in MIXES[mix]]
    for _ in range(150):
        walk.step()
        for is_stored, window, key in walk.cache.drain_changes():
            assert (key in held[window]) != is_stored
            held[window] ^= {key}
        assert held == [set(keys) for keys in walk.cache.view().keys]
    assert any(held)


@pytest.mark.parametrize("mix", MIXES)
def test_i6_a_probe_takes_nothing_and_changes_nothing(mix: str) -> None:
    """I6: views, counters of capacity and the index are the same before and after."""
    walk = Walk(MIXES[mix], 5)
    for _ in range(80):
        walk.step()
    walk.cache.drain_changes()
    for _ in range(40):
        rid, tokens = walk.learn()
        cache = walk.cache
        before = (cache.view(), cache.capacity_generation, cache.index_version)
        hint = cache.hint(rid, walk.rng.choice([None, 8, 200]))
        assert 0 <= hint < tokens and hint % B == 0
        assert (cache.view(), cache.capacity_generation, cache.index_version) == before
        assert cache.drain_changes() == ()
        cache.forget(rid)
