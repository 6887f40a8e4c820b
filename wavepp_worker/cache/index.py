"""The hint index: what a rank's tree holds, as counters without references.  [algorithms 4]

It follows every attach and detach in mutation order; moves between tiers and changes of age
leave it alone [I3].  The same stream, kept until drained, is what the router's quorum sees, so
the rank and the router cannot be told different stories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import SequenceHash

Change = tuple[bool, int, bytes]  # (is_stored, window, key)


class HintIndex:
    """Counters per (window, key): how many attached blocks carry the key."""

    def __init__(self, windows_count: int) -> None:
        self._counts: list[dict[SequenceHash, int]] = [{} for _ in range(windows_count)]
        self._changes: list[Change] = []
        self.version = 0
        """Grows with every change; an unchanged version means unchanged hints."""

    def stored(self, window: int, key: SequenceHash) -> None:
        """A block was attached; parents come before children.  [I2]"""
        counts = self._counts[window]
        counts[key] = counts.get(key, 0) + 1
        self._changes.append((True, window, key))
        self.version += 1

    def removed(self, window: int, key: SequenceHash) -> None:
        """A block was detached; children come before parents.  [I2]"""
        counts = self._counts[window]
        left = counts.get(key, 0) - 1
        check(left >= 0, "index counter below zero", window=window, key=key)
        if left:
            counts[key] = left
        else:
            del counts[key]
        self._changes.append((False, window, key))
        self.version += 1

    @property
    def windows(self) -> Sequence[Mapping[SequenceHash, int]]:
        """Live mapping key -> count per window; absent keys have no entry."""
        return self._counts

    def drain_changes(self) -> tuple[Change, ...]:
        """Return the changes since the last call, in mutation order."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes
