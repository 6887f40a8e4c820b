"""The router's view against an oracle that starts from scratch, under random trees and delays.

Every (rank, window) is a simulated tree with a FIFO of deltas that are delivered some time later.
After every delivered change the replayed events must equal what the oracle finds in the delivered
state: ranks with dense, sliding and recurrent windows in any mixture.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Set

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_router_hooks.catalog import TokenCatalog
from kv_router_hooks.quorum import Change, Quorum, Stored
from kv_router_hooks.router_view import BlockRemoved, BlockStored, RouterEvent, RouterView
from kv_router_hooks.window_rule import DENSE, RECURRENT, WindowRule

BLOCK = 2
DEPTH = 4
# Every path of a binary tree: a prompt is a path, a block's key names its path from the root.
PATHS = [p for depth in range(1, DEPTH + 1) for p in itertools.product((0, 1), repeat=depth)]

Path = tuple[int, ...]
Window = tuple[int, int]  # (rank, window)
Layout = tuple[tuple[WindowRule, ...], ...]

DENSE_LAYOUTS: tuple[Layout, ...] = (
    ((DENSE,),),
    ((DENSE,), (DENSE,)),
    ((DENSE,), (DENSE,), (DENSE,)),
    ((DENSE, DENSE), (DENSE,)),
)
RULES = (DENSE, RECURRENT, WindowRule(2), WindowRule(3))
LAYOUT = st.one_of(
    st.sampled_from(DENSE_LAYOUTS),
    st.lists(
        st.lists(st.sampled_from(RULES), min_size=1, max_size=2).map(tuple), min_size=1, max_size=3
    ).map(tuple),
)


def windows_of(layout: Layout) -> dict[Window, WindowRule]:
    return {(r, w): rule for r, rules in enumerate(layout) for w, rule in enumerate(rules)}


def resumable(
    windows: Mapping[Window, WindowRule], held: Mapping[Window, Set[Path]], known: Set[Path]
) -> set[Path]:
    """The definition, from scratch: blocks on a prefix after which every window can resume."""

    def can_resume(path: Path) -> bool:
        for window, rule in windows.items():
            first = 1 if rule.needed_blocks is None else max(1, len(path) - rule.needed_blocks + 1)
            if any(path[:depth] not in held[window] for depth in range(first, len(path) + 1)):
                return False
        return True

    ends = [path for path in known if can_resume(path)]
    return {path[:depth] for path in ends for depth in range(1, len(path) + 1)}


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
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rules = windows_of(layout)
        self.windows = list(self.rules)
        self.view = RouterView(layout, BLOCK)
        self.router = Replay()
        self.trees: dict[Window, set[Path]] = {w: set() for w in self.windows}
        self.delivered: dict[Window, set[Path]] = {w: set() for w in self.windows}
        self.queues: list[deque[tuple[bool, int, Path]]] = [deque() for _ in layout]
        self.sequences = [0] * len(layout)
        self.live: dict[int, Path] = {}
        self.known: set[Path] = set()  # blocks whose tokens the view must have
        self.last_rid = 0

    def open(self, path: Path) -> None:
        self.last_rid += 1
        self.live[self.last_rid] = path
        self.known.update(path[: depth + 1] for depth in range(len(path)))
        self.router.follow(self.view.open(self.last_rid, keys_of(path), tokens_of(path)))

    def close(self, choice: int) -> None:
        if self.live:
            rid = sorted(self.live)[choice % len(self.live)]
            del self.live[rid]
            self.view.close(rid)
            self.forget_unneeded()

    def forget_unneeded(self) -> None:
        """Keep what a live request pins and what leads to a block that a window holds."""
        pinned = set(self.live.values())
        held = set.union(*self.delivered.values()) & self.known
        ends = pinned | held
        self.known = {end[: depth + 1] for end in ends for depth in range(len(end))}

    def attach(self, window: Window, path: Path) -> None:
        """A live request publishes a block in one tree; in a dense one it follows its parent."""
        tree = self.trees[window]
        is_live = any(live[: len(path)] == path for live in self.live.values())
        is_reached = not self.rules[window].is_dense or len(path) == 1 or path[:-1] in tree
        if is_live and path not in tree and is_reached:
            tree.add(path)
            self.queues[window[0]].append((True, window[1], path))

    def serve(self, path: Path) -> None:
        """A request publishes its whole prompt on all ranks; snapshots only at its end."""
        self.open(path)
        for window, rule in self.rules.items():
            first = len(path) if rule == RECURRENT else 1
            for depth in range(first, len(path) + 1):
                self.attach(window, path[:depth])

    def detach(self, window: Window, path: Path) -> None:
        """Eviction; in a dense tree a block takes its descendants along, deepest first."""
        tree = self.trees[window]
        is_dense = self.rules[window].is_dense
        doomed = [p for p in tree if p == path or (is_dense and p[: len(path)] == path)]
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
            held = self.delivered[rank, window]
            (held.add if stored else held.discard)(path)
            if not stored:
                self.forget_unneeded()
        self.router.follow(self.view.apply(rank, self.sequences[rank], changes))

    def check(self) -> None:
        wanted = resumable(self.rules, self.delivered, self.known)
        assert set(self.router.blocks) == {key_of(path) for path in wanted}
        assert set(self.view.published_keys()) == set(self.router.blocks)
        assert self.view.published_count == len(wanted)
        assert self.view.catalog_count == len(self.known)
        snapshot = Replay()
        snapshot.follow(self.view.snapshot())
        assert snapshot.blocks == self.router.blocks
        for rank, rules in enumerate(self.layout):
            own = {w: rule for w, rule in self.rules.items() if w[0] == rank}
            held = [map(key_of, self.delivered[rank, w]) for w in range(len(rules))]
            is_dense = all(rule.is_dense for rule in rules)
            known = set(PATHS) if is_dense else self.known
            alone = {key_of(path) for path in resumable(own, self.delivered, known)}
            assert self.view.resumable_keys(rank, held) == alone
            assert alone >= set(self.router.blocks)


STEP = st.tuples(
    st.sampled_from(["open", "close", "serve", "serve", "attach", "detach", "deliver", "deliver"]),
    st.integers(0, 7),
    st.integers(0, len(PATHS) - 1),
)


@settings(max_examples=300, deadline=None)
@given(layout=LAYOUT, steps=st.lists(STEP, min_size=30, max_size=120))
def test_the_view_is_what_all_windows_of_all_ranks_can_resume(
    layout: Layout, steps: list[tuple[str, int, int]]
) -> None:
    """FS-74, FS-76, FS-82: exact after every delta, gapless, and to be had again at any time."""
    world = World(layout)
    for kind, choice, index in steps:
        window = world.windows[choice % len(world.windows)]
        path = PATHS[index]
        match kind:
            case "open":
                world.open(path)
            case "close":
                world.close(choice)
            case "serve":
                world.serve(path)
            case "attach":
                world.attach(window, path)
            case "detach":
                world.detach(window, path)
            case "deliver":
                world.deliver(window[0], 1 + choice % 4)
        world.check()

    # At rest, with every prefix asked for again, the view is exact.
    for rank in range(len(layout)):
        world.deliver(rank, 10_000)
    for path in PATHS:
        world.open(path)
    world.check()
    assert world.known == set(PATHS)

    # Memory ends with the blocks and the requests.
    while world.live:
        world.close(0)
    world.check()
    for window in world.windows:
        for path in PATHS:
            world.detach(window, path)
    for rank in range(len(layout)):
        world.deliver(rank, 10_000)
    assert world.router.blocks == {}
    assert world.view.catalog_count == 0
    quorum = vars(world.view._quorum)
    assert not any(quorum[name] for name in ("_holders", "_blocks", "_published"))


@settings(max_examples=200, deadline=None)
@given(
    layout=LAYOUT,
    steps=st.lists(
        st.tuples(
            st.sampled_from(["learn", "store", "store all", "store all", "remove"]),
            st.integers(0, 5),
            st.sampled_from(PATHS),
        ),
        min_size=20,
        max_size=80,
    ),
)
def test_the_quorum_is_exact_even_if_trees_are_not_closed(
    layout: Layout, steps: list[tuple[str, int, Path]]
) -> None:
    """Any subset of blocks in any window, learned before or after; each event's changes."""
    quorum = Quorum(layout)
    rules = windows_of(layout)
    windows = list(rules)
    held: dict[Window, set[Path]] = {w: set() for w in windows}
    known: set[Path] = set()
    told: dict[bytes, bytes | None] = {}

    def learn(path: Path) -> list[Change]:
        known.add(path)
        return quorum.learn(key_of(path), parent_of(path))

    def store(window: Window, path: Path) -> list[Change]:
        held[window].add(path)
        return quorum.store(*window, key_of(path))

    def remove(window: Window, path: Path) -> list[Change]:
        held[window].discard(path)
        return quorum.remove(*window, key_of(path))

    def follow(changes: list[Change]) -> None:
        for change in changes:
            if isinstance(change, Stored):
                assert change.key not in told
                assert change.parent is None or change.parent in told
                told[change.key] = change.parent
            else:
                assert change.key not in told.values()
                del told[change.key]
        assert set(told) == {key_of(path) for path in resumable(rules, held, known)}
        assert {stored.key: stored.parent for stored in quorum.published()} == told

    for kind, choice, path in steps:
        match kind:
            case "learn":
                for depth in range(1, len(path) + 1):
                    follow(learn(path[:depth]))
            case "store":
                follow(store(windows[choice % len(windows)], path))
            case "store all":
                for window in windows:
                    for depth in range(max(1, len(path) - choice), len(path) + 1):
                        follow(store(window, path[:depth]))
            case "remove":
                follow(remove(windows[choice % len(windows)], path))


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
