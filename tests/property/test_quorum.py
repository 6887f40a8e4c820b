"""The router's view against a model ten times simpler, under random trees and random delays.

Every (rank, window) is a simulated tree with a FIFO of deltas that are delivered some time later.
After every delivered change the replayed events must equal the intersection of what was delivered.
"""

from __future__ import annotations

import itertools
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_router_hooks.catalog import TokenCatalog
from kv_router_hooks.quorum import Quorum
from kv_router_hooks.router_view import BlockRemoved, BlockStored, RouterEvent, RouterView

BLOCK = 2
DEPTH = 4
# Every path of a binary tree: a prompt is a path, a block's key names its path from the root.
PATHS = [p for depth in range(1, DEPTH + 1) for p in itertools.product((0, 1), repeat=depth)]
LAYOUTS = ((1,), (1, 1), (1, 1, 1), (2, 1))

Path = tuple[int, ...]


def key_of(path: Path) -> bytes:
    return bytes(path).ljust(32, b"\xff")


def tokens_of(path: Path) -> bytes:
    return b"".join(int(step + 10).to_bytes(4, "little") * BLOCK for step in path)


def keys_of(path: Path) -> list[bytes]:
    return [key_of(path[: depth + 1]) for depth in range(len(path))]


def parent_of(path: Path) -> bytes | None:
    return key_of(path[:-1]) if len(path) > 1 else None


class Replay:
    """A router: follows the events and refuses what a real one would refuse."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes | None] = {}

    def follow(self, events: list[RouterEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                path = tuple(event.key.rstrip(b"\xff"))
                assert event.key not in self.blocks, "stored twice"
                assert event.parent == parent_of(path)
                assert event.parent is None or event.parent in self.blocks, "child before parent"
                assert event.tokens == tokens_of(path)[-BLOCK * 4 :]
                self.blocks[event.key] = event.parent
            else:
                assert isinstance(event, BlockRemoved)
                assert event.key in self.blocks, "removed what was not stored"
                assert event.key not in self.blocks.values(), "parent before child"
                del self.blocks[event.key]


class World:
    def __init__(self, layout: tuple[int, ...]) -> None:
        self.layout = layout
        self.windows = [(r, w) for r, count in enumerate(layout) for w in range(count)]
        self.view = RouterView(layout, BLOCK)
        self.router = Replay()
        self.trees: dict[tuple[int, int], set[Path]] = {w: set() for w in self.windows}
        self.delivered: dict[tuple[int, int], set[Path]] = {w: set() for w in self.windows}
        self.queues: list[deque[tuple[bool, int, Path]]] = [deque() for _ in layout]
        self.sequences = [0] * len(layout)
        self.live: dict[int, Path] = {}
        self.last_rid = 0

    def open(self, path: Path) -> None:
        self.last_rid += 1
        self.live[self.last_rid] = path
        self.router.follow(self.view.open(self.last_rid, keys_of(path), tokens_of(path)))

    def close(self, choice: int) -> None:
        if self.live:
            rid = sorted(self.live)[choice % len(self.live)]
            del self.live[rid]
            self.view.close(rid)

    def attach(self, window: tuple[int, int], path: Path) -> None:
        """A live request publishes its next block in one tree."""
        tree = self.trees[window]
        is_live = any(live[: len(path)] == path for live in self.live.values())
        if is_live and path not in tree and (len(path) == 1 or path[:-1] in tree):
            tree.add(path)
            self.queues[window[0]].append((True, window[1], path))

    def detach(self, window: tuple[int, int], path: Path) -> None:
        """Eviction of a block takes its descendants along, deepest first."""
        tree = self.trees[window]
        doomed = [p for p in tree if p[: len(path)] == path]
        for victim in sorted(doomed, key=len, reverse=True):
            tree.discard(victim)
            self.queues[window[0]].append((False, window[1], victim))

    def deliver(self, rank: int, count: int) -> None:
        queue = self.queues[rank]
        batch = [queue.popleft() for _ in range(min(count, len(queue)))]
        if not batch:
            return
        self.sequences[rank] += 1
        changes = [(stored, window, key_of(path)) for stored, window, path in batch]
        for stored, window, path in batch:
            self.apply_to_model((rank, window), stored, path)
        self.router.follow(self.view.apply(rank, self.sequences[rank], changes))

    def apply_to_model(self, window: tuple[int, int], stored: bool, path: Path) -> None:
        (self.delivered[window].add if stored else self.delivered[window].discard)(path)

    def resumable(self) -> set[bytes]:
        return {key_of(p) for p in set.intersection(*self.delivered.values())}

    def check(self) -> None:
        published = set(self.router.blocks)
        assert published == set(self.view.published_keys())
        assert published <= self.resumable(), "the router is told too much"
        # What is missing is only what was reported after its last request had gone.
        live = {key for path in self.live.values() for key in keys_of(path)}
        missing = self.resumable() - published
        assert not missing & {k for k in live if parent_of_key(k) in published | {None}}
        snapshot = Replay()
        snapshot.follow(self.view.snapshot())
        assert snapshot.blocks == self.router.blocks


def parent_of_key(key: bytes) -> bytes | None:
    return parent_of(tuple(key.rstrip(b"\xff")))


STEP = st.tuples(
    st.sampled_from(["open", "close", "attach", "attach", "attach", "detach", "deliver"]),
    st.integers(0, 7),
    st.integers(0, len(PATHS) - 1),
)


@settings(max_examples=200, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), steps=st.lists(STEP, max_size=120))
def test_the_view_is_the_intersection_of_all_trees(
    layout: tuple[int, ...], steps: list[tuple[str, int, int]]
) -> None:
    world = World(layout)
    for kind, choice, index in steps:
        window = world.windows[choice % len(world.windows)]
        path = PATHS[index]
        match kind:
            case "open":
                world.open(path)
            case "close":
                world.close(choice)
            case "attach":
                for depth in range(1, len(path) + 1):
                    world.attach(window, path[:depth])
            case "detach":
                world.detach(window, path)
            case "deliver":
                world.deliver(window[0], 1 + choice)
        world.check()

    # At rest, with every prefix asked for again, the view is exact.
    for rank in range(len(layout)):
        world.deliver(rank, 10_000)
    for path in PATHS:
        world.open(path)
    world.check()
    assert set(world.router.blocks) == {key_of(p) for p in set.intersection(*world.trees.values())}

    # Memory ends with the blocks and the requests.
    while world.live:
        world.close(0)
    held = set.union(*world.trees.values())
    assert world.view.catalog_count == len(held)
    for window in world.windows:
        for root in ((0,), (1,)):
            world.detach(window, root)
    for rank in range(len(layout)):
        world.deliver(rank, 10_000)
    assert world.router.blocks == {}
    assert world.view.catalog_count == 0
    assert not any(vars(world.view._quorum)[name] for name in ("_holders", "_parents", "_children"))


@settings(max_examples=100, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    changes=st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.sampled_from(PATHS))),
)
def test_the_quorum_is_closed_under_parents_even_if_trees_are_not(
    layout: tuple[int, ...], changes: list[tuple[bool, int, Path]]
) -> None:
    quorum = Quorum(layout)
    windows = [(r, w) for r, count in enumerate(layout) for w in range(count)]
    for path in PATHS:
        quorum.learn(key_of(path), parent_of(path))
    held: dict[tuple[int, int], set[bytes]] = {w: set() for w in windows}
    for is_stored, choice, path in changes:
        window = windows[choice % len(windows)]
        if is_stored:
            quorum.store(*window, key_of(path))
            held[window].add(key_of(path))
        else:
            quorum.remove(*window, key_of(path))
            held[window].discard(key_of(path))
        everywhere = set.intersection(*held.values())
        want = {key_of(path) for path in PATHS if all(key in everywhere for key in keys_of(path))}
        assert {stored.key for stored in quorum.published()} == want


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(PATHS), st.integers(0, 5)), max_size=60))
def test_the_catalog_keeps_exactly_what_is_pinned(steps: list[tuple[bool, Path, int]]) -> None:
    catalog = TokenCatalog(BLOCK)
    pinned: dict[int, Path] = {}
    for rid, (is_pin, path, choice) in enumerate(steps):
        if is_pin:
            known = {key for other in pinned.values() for key in keys_of(other)}
            fresh = catalog.pin(rid, keys_of(path), tokens_of(path) + b"\1\0\0\0", "")
            assert fresh == [key for key in keys_of(path) if key not in known]
            pinned[rid] = path
        elif pinned:
            gone = sorted(pinned)[choice % len(pinned)]
            del pinned[gone]
            for key in catalog.unpin(gone):
                catalog.drop(key)
        want = {key for path in pinned.values() for key in keys_of(path)}
        assert len(catalog) == len(want)
        assert all(not catalog.is_loose(key) for key in want)
