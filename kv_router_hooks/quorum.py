"""Which blocks a whole pipeline can resume: the intersection of all stages' trees.  Pure.

A router that is told of a prefix which only some stages hold sends requests to the wrong worker.
So a block counts as stored once *every* window of *every* rank holds it, and as removed as soon
as one does not:

    published  =  { key : all windows hold key, and its parent is published or it has none }

Every change is answered with the changes of that set, parents stored before children and children
removed before parents, so the set is closed under parents after each of them.  Events of
different ranks arrive in any relative order; the set is never ahead of any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from wavepp_worker.base.errors import check


class Stored(Struct, frozen=True):
    """The pipeline can resume after this block from now on."""

    key: bytes
    parent: bytes | None  # None: first block of a prompt


class Removed(Struct, frozen=True):
    """Some window lost this block."""

    key: bytes


Change = Stored | Removed


class Quorum:
    """Counts the holders of every block.

    Args:
        window_counts: windows of each rank; index = rank.

    A key's place in its chain is told by `learn`, in any order with the events: what is held but
    not learned is not published yet.
    """

    def __init__(self, window_counts: Sequence[int]) -> None:
        check(bool(window_counts) and min(window_counts) >= 1, "every rank has a window")
        self._first_bits = [sum(window_counts[:rank]) for rank in range(len(window_counts))]
        self._window_counts = tuple(window_counts)
        self._all_holders = (1 << sum(window_counts)) - 1
        self._holders: dict[bytes, int] = {}  # key → one bit per window that holds it
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, set[bytes]] = {}  # learned children only
        self._published: dict[bytes, None] = {}  # in order of publication: parents first

    def learn(self, key: bytes, parent: bytes | None) -> list[Change]:
        """Tell the block before `key`; a no-op when it is known."""
        if key in self._parents:
            return []
        self._parents[key] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        return self._publish_from(key)

    def forget(self, key: bytes) -> None:
        """Undo `learn`.  The block must not be published."""
        check(key not in self._published, "a published block is forgotten", key=key.hex())
        parent = self._parents.pop(key)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def store(self, rank: int, window: int, key: bytes) -> list[Change]:
        """One window now holds `key`; a no-op when it did before."""
        self._holders[key] = self._holders.get(key, 0) | self._bit(rank, window)
        return self._publish_from(key)

    def remove(self, rank: int, window: int, key: bytes) -> list[Change]:
        """One window no longer holds `key`; a no-op when it did not."""
        left = self._holders.get(key, 0) & ~self._bit(rank, window)
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)
        return self._retract_from(key)

    def is_held(self, key: bytes) -> bool:
        """Return whether any window holds `key`."""
        return key in self._holders

    def published(self) -> Iterator[Stored]:
        """Iterate over the published blocks, parents first."""
        for key in self._published:
            yield Stored(key, self._parents[key])

    def __len__(self) -> int:
        return len(self._published)

    def _bit(self, rank: int, window: int) -> int:
        check(
            0 <= rank < len(self._window_counts) and 0 <= window < self._window_counts[rank],
            "no such window",
            rank=rank,
            window=window,
        )
        return 1 << (self._first_bits[rank] + window)

    def _publish_from(self, key: bytes) -> list[Change]:
        """Publish `key` and what waited for it below."""
        changes: list[Change] = []
        waiting = [key]
        while waiting:
            key = waiting.pop()
            if key in self._published or key not in self._parents:
                continue
            parent = self._parents[key]
            has_parent = parent is None or parent in self._published
            if has_parent and self._holders.get(key) == self._all_holders:
                self._published[key] = None
                changes.append(Stored(key, parent))
                waiting.extend(self._children.get(key, ()))
        return changes

    def _retract_from(self, key: bytes) -> list[Change]:
        """Retract `key` and all that was published below, deepest first."""
        if key not in self._published:
            return []
        doomed = [key]
        for block in doomed:  # grows while it is walked: parents before children
            doomed.extend(c for c in self._children.get(block, ()) if c in self._published)
        doomed.reverse()
        for block in doomed:
            del self._published[block]
        return [Removed(block) for block in doomed]
