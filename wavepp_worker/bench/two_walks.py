"""The admission that the paper starts from, for comparison: two tree walks, one request at a time.

    for every request, in order:
        on every rank   walk the whole prompt through the tree: how much matches
        agree           the smallest match                              [no messages: costs nothing]
        on every rank   walk again up to there and pin, then take the blocks of the rest

It runs on the production tree and pool, with keys computed once, so that only the order of work
differs.  A rank has no hints, no lease that can be cut, and no promise before it allocates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Struct, field

from wavepp_worker.base.types import SequenceHash
from wavepp_worker.base.units import ceil_div, endpoint_max
from wavepp_worker.bench.admission_load import AdmissionLoad, BenchPrompt
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.wire.mailbox import Copy

STEPS = ("first walk", "second walk and pin", "take blocks")


class WalkTimes(Struct):
    """Durations of every request on every rank, and what a queue of requests adds up to.

    Attributes:
        steps_ns: per step.
        known_ns: per request, from the arrival of all until its match is agreed on, if every rank
            is a machine of its own: requests before it are admitted first.
    """

    steps_ns: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in STEPS})
    known_ns: list[int] = field(default_factory=list)


class WalkRank:
    """One rank's tree and pool."""

    def __init__(self, load: AdmissionLoad) -> None:
        self._load = load
        self._index = HintIndex(1)
        self._pool = BlockPool(0, load.windows()[0].slots, 0, self._index)

    def match(self, keys: Sequence[SequenceHash], limit: int) -> int:
        """Return how many leading blocks the tree holds."""
        return len(self._pool.tree.walk(keys, limit))

    def pin(self, keys: Sequence[SequenceHash], limit: int) -> list[Block]:
        """Walk again and reference the blocks."""
        path = self._pool.tree.walk(keys, limit)
        self._pool.pin(path)
        return path

    def take(self, count: int) -> list[Block]:
        """Allocate, evicting what is in the way."""
        copies: list[Copy] = []
        return [self._pool.take(copies) for _ in range(count)]

    def end(self, keys: Sequence[SequenceHash], table: list[Block], stop: int) -> None:
        """Publish the first `stop` blocks of a request and give all of them back."""
        node = self._pool.tree.root
        for position in range(stop):
            key = keys[position]
            present = node.children.get(key)
            if present is None:
                present = table[position]
                self._pool.tree.attach(present, node, key)
            node = present
        self._pool.unpin(table)
        self._index.drain_changes()


class WalkFleet:
    """P ranks, one after another in this process."""

    def __init__(self, load: AdmissionLoad) -> None:
        self._load = load
        self.ranks = [WalkRank(load) for _ in range(load.ranks)]

    def prepare(self, families: Sequence[BenchPrompt]) -> None:
        """Let every rank hold its part of the families."""
        for number, rank in enumerate(self.ranks):
            stop = self._load.cached_tokens(number) // self._load.block_tokens
            for prompt in families:
                keys = split_keys(prompt.keys)
                rank.end(keys, rank.take(stop), stop)

    def run(self, prompts: Sequence[BenchPrompt]) -> WalkTimes:
        """Admit all, then publish and free all."""
        times = WalkTimes()
        elapsed_ns = 0
        tables: list[tuple[list[SequenceHash], list[list[Block]]]] = []
        for prompt in prompts:
            keys = split_keys(prompt.keys)
            limit = endpoint_max(prompt.tokens, self._load.block_tokens) // self._load.block_tokens
            found, first_ns = self._first_walk(keys, limit, times)
            elapsed_ns += first_ns
            times.known_ns.append(elapsed_ns)
            count = ceil_div(prompt.tokens, self._load.block_tokens) - found
            table, second_ns = self._allocate(keys, found, count, times)
            elapsed_ns += second_ns
            tables.append((keys, table))
        for keys, table in tables:
            for rank, blocks in zip(self.ranks, table, strict=True):
                rank.end(keys, blocks, len(keys))
        return times

    def _first_walk(
        self, keys: list[SequenceHash], limit: int, times: WalkTimes
    ) -> tuple[int, int]:
        """Return (blocks that all ranks hold, time of the slowest rank)."""
        found, slowest = limit, 0
        for rank in self.ranks:
            started = time.perf_counter_ns()
            found = min(found, rank.match(keys, limit))
            spent = time.perf_counter_ns() - started
            times.steps_ns["first walk"].append(spent)
            slowest = max(slowest, spent)
        return found, slowest

    def _allocate(
        self, keys: list[SequenceHash], found: int, count: int, times: WalkTimes
    ) -> tuple[list[list[Block]], int]:
        """Return (per rank, the block table; time of the slowest rank)."""
        tables, slowest = [], 0
        for rank in self.ranks:
            started = time.perf_counter_ns()
            path = rank.pin(keys, found)
            pinned = time.perf_counter_ns()
            table = path + rank.take(count)
            ended = time.perf_counter_ns()
            times.steps_ns["second walk and pin"].append(pinned - started)
            times.steps_ns["take blocks"].append(ended - pinned)
            slowest = max(slowest, ended - started)
            tables.append(table)
        return tables, slowest
