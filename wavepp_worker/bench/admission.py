"""`wavepp bench admission`: what admitting one long prompt costs a rank, and how it grows.

    two walks   the design that the paper starts from: walk the tree to count the match, agree on
                the smallest, walk again to pin, then take blocks; one request at a time
    ours        probe the index, agree in a round, one bounded walk, reserve, commit, materialise

Both run in this process on the production cache, on the same prompts, in turn.  A probe is timed
by itself; a discovery is a whole round of P ranks: broadcast encoded and decoded, probes on every
rank, votes encoded and decoded, merged.  Sockets are not part of it: `wavepp bench idle` has them.
"""

from __future__ import annotations

import os
import platform
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from wavepp_worker.admission.commands import SendBroadcast, SendGathered, SendVote
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    GatheredReceived,
    OutsideEvent,
    Tick,
    VoteReceived,
)
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import KEY_BYTES, Instant, SequenceHash
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.mailbox import Announce
from wavepp_worker.wire.rounds import ROUNDS, RoundBcast, RoundGathered, RoundVote

SCOPE = scope_key("bench")
REUSE_SHARE = 0.9
FAMILIES = 4
RANK_LOSS_BLOCKS = 16  # every further rank holds so much less of each prefix
WAVE_TOKENS = 16_384
GROWTH_TOKENS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
GROWTH_WAITING = (1, 8, 64, 512)
ROUNDS_TIMED = 60


class AdmissionOptions(Struct, frozen=True, kw_only=True):
    """What to measure."""

    tokens: int = 200_000
    concurrency: int = 64
    ranks: int = 4
    block_tokens: tuple[int, ...] = (64, 32)
    is_hybrid: bool = False
    growth: bool = True
    growth_tokens: tuple[int, ...] = GROWTH_TOKENS
    growth_waiting: tuple[int, ...] = GROWTH_WAITING
    seed: int = 1


class Spread(Struct, frozen=True):
    """A distribution, in microseconds."""

    p10: float
    p50: float
    p90: float
    p99: float
    count: int


class SizeReport(Struct, frozen=True, kw_only=True):
    """One block size."""

    block_tokens: int
    two_walks: dict[str, Spread]
    ours: dict[str, Spread]
    discovery: Spread
    index_bytes_per_block: float


class AdmissionReport(Struct, frozen=True, kw_only=True):
    """Everything that one run measured."""

    sizes: tuple[SizeReport, ...]
    growth_tokens: dict[str, dict[str, float]]  # tokens -> step -> median, microseconds
    growth_waiting: dict[str, float]  # waiting requests -> median of a round, microseconds
    options: AdmissionOptions
    machine: dict[str, Any]


class _Prompt(Struct):
    rid: int
    tokens: int
    keys: bytes


class _Bench:
    """Caches of P ranks that hold most of a few long prefixes, and prompts that extend them."""

    def __init__(self, options: AdmissionOptions, tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._rng = random.Random(f"{options.seed} {tokens} {block_tokens}")
        self._tokens = tokens
        self._rid = 0
        blocks = ceil_div(tokens, block_tokens)
        slots = (FAMILIES + 2) * blocks + 64
        states = (
            (WindowSpec(kind="recurrent", slots=FAMILIES * ceil_div(tokens, WAVE_TOKENS) + 64),)
            if options.is_hybrid
            else ()
        )
        self.caches = [
            RankCache((WindowSpec(slots=slots), *states), block_tokens, 0.1, 64)
            for _ in range(options.ranks)
        ]
        prefix = align_down(int(tokens * REUSE_SHARE), block_tokens)
        self._prefixes = [self._draw(prefix) for _ in range(FAMILIES)]
        for rank, cache in enumerate(self.caches):
            kept = max(block_tokens, prefix - rank * RANK_LOSS_BLOCKS * block_tokens)
            for prefix_tokens in self._prefixes:
                self._warm(cache, prefix_tokens[: 4 * kept])

    def _draw(self, count: int) -> bytes:
        return self._rng.randbytes(4 * count)

    def prompt(self) -> _Prompt:
        """Return a new prompt that extends one of the cached prefixes."""
        self._rid += 1
        prefix = self._prefixes[self._rid % FAMILIES]
        raw = prefix + self._draw(self._tokens - len(prefix) // 4)
        return _Prompt(self._rid, self._tokens, sequence_keys(raw, self.block_tokens, SCOPE))

    def _warm(self, cache: RankCache, raw: bytes) -> None:
        """Admit, publish and free one prompt."""
        self._rid += 1
        rid, tokens = self._rid, len(raw) // 4
        points = snapshot_points(tokens, self.block_tokens, WAVE_TOKENS)
        cache.learn(rid, tokens, sequence_keys(raw, self.block_tokens, SCOPE), points)
        cache.acquire(rid, 1, tokens)
        check(isinstance(cache.prepare(rid, no_floor=True), Prepared), "room for the prefix")
        cache.commit(rid, 0, no_floor=True)
        made = cache.materialize(rid, rid)
        stored = [point for states in made.states for point, _ in states.snapshots]
        cache.publish(rid, tokens, stored)
        cache.free(rid)
        cache.forget(rid)


def measure_admission(options: AdmissionOptions, note: Callable[[str], None]) -> AdmissionReport:
    """Run everything; the machine should do nothing else meanwhile."""
    sizes = []
    for block_tokens in options.block_tokens:
        note(f"{options.tokens} tokens, blocks of {block_tokens}")
        sizes.append(_measure_size(options, block_tokens))
    growth_tokens: dict[str, dict[str, float]] = {}
    growth_waiting: dict[str, float] = {}
    if options.growth:
        for tokens in options.growth_tokens:
            note(f"growth: {tokens} tokens")
            ours = _time_ours(_Bench(options, tokens, options.block_tokens[0]), 12)
            growth_tokens[str(tokens)] = {name: _spread(ns).p50 for name, ns in ours.items()}
        for waiting in options.growth_waiting:
            note(f"growth: {waiting} waiting requests")
            growth_waiting[str(waiting)] = _time_waiting(options, waiting)
    return AdmissionReport(
        sizes=tuple(sizes),
        growth_tokens=growth_tokens,
        growth_waiting=growth_waiting,
        options=options,
        machine={
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
    )


def _measure_size(options: AdmissionOptions, block_tokens: int) -> SizeReport:
    bench = _Bench(options, options.tokens, block_tokens)
    walks = _time_two_walks(bench, options.concurrency)
    ours = _time_ours(bench, options.concurrency)
    return SizeReport(
        block_tokens=block_tokens,
        two_walks={name: _spread(ns) for name, ns in walks.items()},
        ours={name: _spread(ns) for name, ns in ours.items()},
        discovery=_spread(_time_discovery(bench, options)),
        index_bytes_per_block=_index_bytes_per_block(),
    )


# ── the two designs ──────────────────────────────────────────────────────────────────────────


def _time_two_walks(bench: _Bench, count: int) -> dict[str, list[int]]:
    """Time the baseline on rank 0; the other ranks' walks are the same work on other machines."""
    times: dict[str, list[int]] = {"first walk": [], "second walk and pin": [], "take blocks": []}
    cache = bench.caches[0]
    pool: BlockPool = cache._pools[0]
    for _ in range(count):
        prompt = bench.prompt()
        keys = [
            SequenceHash(prompt.keys[at : at + KEY_BYTES])
            for at in range(0, len(prompt.keys), KEY_BYTES)
        ]
        began = time.perf_counter_ns()
        found = len(pool.tree.walk(keys, len(keys)))
        walked = time.perf_counter_ns()
        path = pool.tree.walk(keys, found)
        pool.pin(path)
        pinned = time.perf_counter_ns()
        copies: list[Any] = []
        taken = [
            pool.take(copies) for _ in range(ceil_div(prompt.tokens, bench.block_tokens) - found)
        ]
        ended = time.perf_counter_ns()
        pool.unpin(taken)
        pool.unpin(path)
        for name, ns in zip(times, (walked - began, pinned - walked, ended - pinned), strict=True):
            times[name].append(ns)
    return times


def _time_ours(bench: _Bench, count: int) -> dict[str, list[int]]:
    """Time every section of one request on rank 0."""
    names = ("probe", "lease", "prepare", "commit", "materialise", "publish", "free")
    times: dict[str, list[int]] = {name: [] for name in names}
    cache = bench.caches[0]
    for _ in range(count):
        prompt = bench.prompt()
        rid = prompt.rid
        points = snapshot_points(prompt.tokens, bench.block_tokens, WAVE_TOKENS)
        cache.learn(rid, prompt.tokens, prompt.keys, points)
        marks = [time.perf_counter_ns()]
        hint = cache.hint(rid)
        marks.append(time.perf_counter_ns())
        endpoint = cache.acquire(rid, 1, hint)
        marks.append(time.perf_counter_ns())
        prepared = cache.prepare(rid)
        marks.append(time.perf_counter_ns())
        committed = cache.commit(rid, endpoint)
        marks.append(time.perf_counter_ns())
        made = cache.materialize(rid, rid)
        marks.append(time.perf_counter_ns())
        check(isinstance(prepared, Prepared) and isinstance(committed, Committed), "room")
        stored = [point for states in made.states for point, _ in states.snapshots]
        cache.publish(rid, prompt.tokens, stored)
        marks.append(time.perf_counter_ns())
        cache.free(rid)
        marks.append(time.perf_counter_ns())
        cache.forget(rid)
        for name, first, last in zip(names, marks, marks[1:], strict=False):
            times[name].append(last - first)
    return times


# ── rounds ───────────────────────────────────────────────────────────────────────────────────


class _Fleet:
    """P ranks in this process; a round is run to its end, its messages encoded and decoded."""

    def __init__(self, caches: Sequence[RankCache], block_tokens: int) -> None:
        ranks = len(caches)
        self._now = 0.0
        self.ranks = [
            InlineRank(
                AdmissionSettings(
                    rank=rank,
                    stages=ranks,
                    epoch=1,
                    block_tokens=block_tokens,
                    snapshot_interval_tokens=align_down(WAVE_TOKENS, block_tokens),
                    headroom_tokens=0,
                    floor_fraction=0.1,
                    floor_headroom_blocks=64,
                    batch_requests_max=0,  # nothing is ever selected: discovery alone
                    queue_requests_max=4096,
                ),
                cache,
            )
            for rank, cache in enumerate(caches)
        ]

    def announce(self, prompt: _Prompt) -> None:
        """Hand a request to the leader."""
        announce = Announce(prompt.rid, prompt.tokens, prompt.keys, b"")
        self.ranks[0].handle(Announced(announce), Instant(self._now))

    def round(self) -> None:
        """Run one round."""
        self._now += 1.0
        due: list[tuple[int, OutsideEvent]] = [(0, Tick())]
        while due:
            rank, event = due.pop(0)
            for command in self.ranks[rank].handle(event, Instant(self._now)):
                due += self._deliver(command)

    def _deliver(self, command: object) -> list[tuple[int, OutsideEvent]]:
        followers = range(1, len(self.ranks))
        match command:
            case SendBroadcast(bcast=message) | SendGathered(gathered=message):
                frame = ROUNDS.encode(message)
                return [(rank, _event(ROUNDS.decode(frame))) for rank in followers]
            case SendVote(vote=vote):
                return [(0, _event(ROUNDS.decode(ROUNDS.encode(vote))))]
            case _:
                return []


def _event(message: RoundBcast | RoundVote | RoundGathered) -> OutsideEvent:
    match message:
        case RoundBcast():
            return BroadcastReceived(message)
        case RoundVote():
            return VoteReceived(message)
        case RoundGathered():
            return GatheredReceived(message)


def _time_discovery(bench: _Bench, options: AdmissionOptions) -> list[int]:
    """Time rounds that announce one request while `concurrency` others wait.

    All ranks' work is done here one after another; on their own machines it overlaps, so the
    figure divides the followers' share by their number.
    """
    fleet = _Fleet(bench.caches, bench.block_tokens)
    fleet.round()  # every rank has voted once
    for _ in range(options.concurrency):
        fleet.announce(bench.prompt())
    for _ in range(ceil_div(options.concurrency, 16) + 8):
        fleet.round()
    times = []
    for _ in range(ROUNDS_TIMED):
        fleet.announce(bench.prompt())
        began = time.perf_counter_ns()
        fleet.round()
        times.append((time.perf_counter_ns() - began) // options.ranks)
    return times


def _time_waiting(options: AdmissionOptions, waiting: int) -> float:
    """Return the median time of a round in which nothing happens and `waiting` requests wait."""
    bench = _Bench(options, 20_000, options.block_tokens[0])
    fleet = _Fleet(bench.caches, bench.block_tokens)
    fleet.round()
    for _ in range(waiting):
        fleet.announce(bench.prompt())
    for _ in range(ceil_div(waiting, 16) + 8):
        fleet.round()
    times = []
    for _ in range(ROUNDS_TIMED):
        began = time.perf_counter_ns()
        fleet.round()
        times.append((time.perf_counter_ns() - began) // options.ranks)
    return _spread(times).p50


# ── figures ──────────────────────────────────────────────────────────────────────────────────


def _index_bytes_per_block() -> float:
    """Return what one more block costs the hint index; its key belongs to the tree."""
    count = 50_000
    keys = [SequenceHash(number.to_bytes(KEY_BYTES, "little")) for number in range(count)]
    index = HintIndex(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for key in keys:
        index.stored(0, key)
    index.drain_changes()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / count


def _spread(times_ns: Sequence[int]) -> Spread:
    ordered = sorted(times_ns)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3

    return Spread(at(0.1), at(0.5), at(0.9), at(0.99), len(ordered))


def render(report: AdmissionReport) -> str:
    """Return the report as text."""
    lines = []
    for size in report.sizes:
        lines.append(f"{report.options.tokens} tokens, blocks of {size.block_tokens}; microseconds")
        lines.append(f"  {'step':24} {'p10':>9} {'p50':>9} {'p90':>9} {'p99':>9}")
        for title, table in (("two walks", size.two_walks), ("ours", size.ours)):
            lines.append(f"  {title}")
            lines += [_row(f"  {name}", spread) for name, spread in table.items()]
        lines.append(_row("discovery in a round", size.discovery))
        lines.append(f"  index: {size.index_bytes_per_block:.0f} bytes per block")
        walk, probe = size.two_walks["first walk"].p50, size.ours["probe"].p50
        lines.append(f"  probe against first walk: {walk / probe:.0f} times faster")
    if report.growth_tokens:
        lines.append("growth with the prompt, median microseconds")
        for tokens, steps in report.growth_tokens.items():
            parts = "  ".join(f"{name} {us:.0f}" for name, us in steps.items())
            lines.append(f"  {int(tokens):>9,} tokens  {parts}")
    if report.growth_waiting:
        lines.append("a round in which requests only wait, median microseconds per rank")
        parts = ", ".join(f"{n} waiting {us:.0f}" for n, us in report.growth_waiting.items())
        lines.append(f"  {parts}")
    return "\n".join(lines)


def _row(name: str, spread: Spread) -> str:
    return f"  {name:24} {spread.p10:9.1f} {spread.p50:9.1f} {spread.p90:9.1f} {spread.p99:9.1f}"
