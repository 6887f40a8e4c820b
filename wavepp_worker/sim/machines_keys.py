"""The prefix tree and the hint index under any order of calls, against sets and counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import BlockId, SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.index import Change, HintIndex
from wavepp_worker.cache.tree import PrefixTree
from wavepp_worker.sim.machines_choice import Choose

Path = tuple[int, ...]  # which child at each step down from the root
WIDTH, DEPTH_MAX = 3, 6


@dataclass
class TreeDriver:
    """A tree and its index; the model is the set of attached paths."""

    make_tree: Callable[[int, HintIndex], PrefixTree]
    paths: dict[Path, Block] = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.index = HintIndex(1)
        self.tree = self.make_tree(0, self.index)
        self.told: set[Path] = set()  # by the index's changes

    def attach(self, choose: Choose) -> None:
        """A block is attached below the root or any attached block, where there is room."""
        parents = [(), *(path for path in self.paths if len(path) < DEPTH_MAX)]
        path = (*choose(parents), choose(range(WIDTH)))
        if path in self.paths:
            return
        parent = self.paths[path[:-1]] if path[:-1] else self.tree.root
        block = Block(self.number, BlockId(self.number))
        self.number += 1
        self.tree.attach(block, parent, _key(path))
        self.paths[path] = block

    def detach(self, choose: Choose) -> None:
        """A block goes with all below it, children first."""
        if not self.paths:
            return
        top = choose(sorted(self.paths))
        below = self.tree.subtree(self.paths[top])
        expected = {path for path in self.paths if path[: len(top)] == top}
        check({id(block) for block in below} == {id(self.paths[p]) for p in expected}, "subtree")
        for block in reversed(below):
            self.tree.detach(block)
            check(block.parent is None and not block.children, "is detached", of=block.number)
        for path in expected:
            del self.paths[path]

    def walk(self, choose: Choose) -> None:
        """A walk finds the longest attached prefix, and no more than it is asked for."""
        path = tuple(choose(range(WIDTH)) for _ in range(DEPTH_MAX))
        limit = choose(range(DEPTH_MAX + 1))
        keys = [_key(path[: depth + 1]) for depth in range(DEPTH_MAX)]
        found = self.tree.walk(keys, limit)
        depths = range(1, limit + 1)
        expected = next((d - 1 for d in depths if path[:d] not in self.paths), limit)
        blocks = [self.paths[path[:depth]] for depth in range(1, expected + 1)]
        check(found == blocks, "walk", found=len(found), expected=expected)

    def compare(self) -> None:
        """Links, order of changes and counters follow the set of paths.  [I1, I2]"""
        self.tree.check_invariants()
        check(self.tree.attached_count == len(self.paths), "attached count [I1]")
        for change in self.index.drain_changes():
            self._follow(change)
        check(self.told == self.paths.keys(), "changes tell the tree [I1]", told=self.told)
        expected = dict.fromkeys((_key(path) for path in self.paths), 1)
        check(self.index.windows[0] == expected, "index [I1]")

    def _follow(self, change: Change) -> None:
        """At every instant the present depths of a chain are a prefix.  [I2]"""
        is_stored, _, key = change
        path = tuple(key)
        if is_stored:
            check(not path[:-1] or path[:-1] in self.told, "parents come first [I2]", path=path)
            self.told.add(path)
        else:
            check(not any(other[:-1] == path for other in self.told), "children go first [I2]")
            self.told.remove(path)


@dataclass
class IndexDriver:
    """The hint index alone; the model is one counter per window."""

    make_index: Callable[[int], HintIndex]
    windows_count: int = 2

    def __post_init__(self) -> None:
        self.index = self.make_index(self.windows_count)
        self.counts: list[Counter[SequenceHash]] = [Counter() for _ in range(self.windows_count)]
        self.changes: list[Change] = []
        self.version = self.index.version

    def store(self, choose: Choose) -> None:
        """A block is attached; several may carry one key."""
        window, key = choose(range(self.windows_count)), _key((choose(range(4)),))
        self.index.stored(window, key)
        self.counts[window][key] += 1
        self._note(True, window, key)

    def remove(self, choose: Choose) -> None:
        """A block that is there is detached."""
        present = [(w, key) for w, counts in enumerate(self.counts) for key in sorted(counts)]
        if not present:
            return
        window, key = choose(present)
        self.index.removed(window, key)
        self.counts[window][key] -= 1
        self.counts[window] = +self.counts[window]
        self._note(False, window, key)

    def drain(self, choose: Choose) -> None:
        """The changes are those since the last time, in order."""
        check(self.index.drain_changes() == tuple(self.changes), "changes in order")
        self.changes.clear()
        check(self.index.version == self.version, "draining is no change")

    def _note(self, is_stored: bool, window: int, key: SequenceHash) -> None:
        check(self.index.version > self.version, "every change is a new version")
        self.version = self.index.version
        self.changes.append((is_stored, window, key))

    def compare(self) -> None:
        """No zero entries; membership is a count above zero.  [I1]"""
        found = [dict(counts) for counts in self.index.windows]
        check(found == [dict(counts) for counts in self.counts], "counters [I1]", found=found)


def _key(path: Path) -> SequenceHash:
    return SequenceHash(bytes(path))
