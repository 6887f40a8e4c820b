"""What the router may know, found from scratch: an oracle beside `RouterView`.

It sees the same deltas at the same moments.  Now and then it asks of every block of every prompt
whether all ranks could resume after it, with what they have told so far; the router must know the
chains to those blocks, all of them and nothing else.  [I-PUBLISH]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kv_router_hooks.window_rule import WindowRule
from wavepp_worker.base.errors import check

DELTAS_BETWEEN = 192  # two looks; more where a look costs more
WORK_PER_DELTA = 8


class RouterWatch:
    """The oracle of one epoch.

    Args:
        windows: the rules of each rank's windows.
    """

    def __init__(self, windows: Sequence[Sequence[WindowRule]]) -> None:
        self._places = [
            (rank, window, rule)
            for rank, rules in enumerate(windows)
            for window, rule in enumerate(rules)
        ]
        self._present: dict[tuple[int, int], Counter[bytes]] = {
            (rank, window): Counter() for rank, window, _ in self._places
        }
        self._blocks: dict[bytes, tuple[bytes | None, int]] = {}  # parent, depth; parents first
        self._deltas = 0

    def learn(self, keys: Sequence[bytes]) -> None:
        """A prompt is known."""
        parent: bytes | None = None
        for depth, key in enumerate(keys, 1):
            self._blocks.setdefault(key, (parent, depth))
            parent = key

    def apply(self, rank: int, changes: Iterable[tuple[bool, int, bytes]]) -> bool:
        """A delta is delivered; return whether it is time to look."""
        for is_stored, window, key in changes:
            self._present[rank, window][key] += 1 if is_stored else -1
        self._deltas += 1
        between = max(DELTAS_BETWEEN, len(self._blocks) * len(self._places) // WORK_PER_DELTA)
        return self._deltas % between == 0

    def compare(self, told: Iterable[bytes]) -> None:
        """Hold what the router knows against what can be resumed."""
        published, allowed = set(told), self._allowed()
        check(
            published <= allowed,
            "the router knows a block that some rank cannot resume [I-PUBLISH]",
            count=len(published - allowed),
        )
        check(
            allowed <= published,
            "the router was not told of a block that all ranks can resume [I-PUBLISH]",
            count=len(allowed - published),
        )

    def _allowed(self) -> set[bytes]:
        """Return all blocks on the chains to the ends that every window of every rank holds."""
        ends = set(self._blocks)
        for rank, window, rule in self._places:
            ends &= self._ends(self._present[rank, window], rule)
        allowed: set[bytes] = set()
        for end in ends:
            at: bytes | None = end
            while at is not None and at not in allowed:
                allowed.add(at)
                at = self._blocks[at][0]
        return allowed

    def _ends(self, present: Counter[bytes], rule: WindowRule) -> set[bytes]:
        """Return the blocks after which one window could go on."""
        runs: dict[bytes | None, int] = {None: 0}  # blocks in a row up to here
        ends = set()
        for key, (parent, depth) in self._blocks.items():
            runs[key] = runs[parent] + 1 if present[key] > 0 else 0
            needed = depth if rule.needed_blocks is None else min(depth, rule.needed_blocks)
            if runs[key] >= needed:
                ends.add(key)
        return ends
