"""One configuration of `wavepp bench admission`, measured in a process of its own.

    sections   two walks and ours in turn, on equal caches; all requests arrive together
    waiting    what a round costs while requests only wait, and what one more arrival costs
    sockets    discovery among real processes: arrivals one by one, then all together
    memory     bytes per cached block

Run as a module: the task on standard input, the figures on standard output.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from random import Random
from typing import Literal

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import LEADER
from wavepp_worker.bench.admission_fleets import LocalFleet, SocketFleet
from wavepp_worker.bench.admission_load import AdmissionLoad, BenchPrompt, PromptMaker
from wavepp_worker.bench.figures import Spread, spread_us
from wavepp_worker.bench.two_walks import STEPS, WalkFleet
from wavepp_worker.cache.hashing import TOKEN_BYTES, sequence_keys

Kind = Literal["sections", "waiting", "sockets", "memory"]
NAMES = {
    "learn": "learn keys",
    "hint": "probe",
    "acquire": "lease walk",
    "prepare": "escrow prepare",
    "commit": "escrow commit",
    "materialize": "materialise",
    "publish": "publish",
    "free": "free",
}
BURSTS = 5
ARRIVAL_GAP_S = 0.01  # longest pause before a single arrival: anywhere between two rounds


class CellTask(Struct, frozen=True, kw_only=True):
    """What a process measures.

    Attributes:
        repeats: sections: times that all requests come and go; waiting: rounds; sockets: single
            arrivals.
    """

    kind: Kind
    load: AdmissionLoad
    repeats: int


class CellResult(Struct, frozen=True):
    """Distributions by name, and single numbers by name."""

    spreads: dict[str, Spread] = {}
    numbers: dict[str, float] = {}


def measure(task: CellTask) -> CellResult:
    """Measure one configuration here."""
    match task.kind:
        case "sections":
            return _sections(task)
        case "waiting":
            return _waiting(task)
        case "sockets":
            return _sockets(task)
        case "memory":
            return _memory(task)


def _sections(task: CellTask) -> CellResult:
    load = task.load
    maker, walks, fleet = PromptMaker(load), WalkFleet(load), LocalFleet(load)
    steps: dict[str, list[int]] = {name: [] for name in STEPS}
    known: list[int] = []
    reused = 0.0
    for repeat in range(task.repeats + 1):
        is_noted = repeat > 0  # the first one fills the pools, so that later ones evict
        families = maker.new_families()
        walks.prepare(families)
        fleet.prepare(families)
        # So many ranks in one process are more objects than a rank's collector ever sees.
        gc.collect()
        gc.freeze()
        times = walks.run(maker.fresh(load.requests))
        prompts = maker.fresh(load.requests)
        if is_noted:
            for name in STEPS:
                steps[name] += times.steps_ns[name]
            known += times.known_ns
        for rank in fleet.ranks:
            rank.cache.is_noting = is_noted
        fleet.admit(prompts)
        installs = fleet.ranks[LEADER].installs
        reused = statistics.mean(installs[prompt.rid].endpoint for prompt in prompts)
        for rank in fleet.ranks:
            for prompt in prompts:
                rank.publish(prompt.rid, prompt.tokens)
        fleet.end([prompt.rid for prompt in prompts])
        for rank in fleet.ranks:
            rank.cache.is_noting = False
    fleet.close()
    spreads = {f"two walks: {name}": spread_us(samples) for name, samples in steps.items()}
    spreads["two walks: match known, all at once"] = spread_us(known)
    for section, name in NAMES.items():
        samples = [ns for rank in fleet.ranks for ns in rank.cache.samples_ns[section]]
        spreads[f"ours: {name}"] = spread_us(samples)
    spreads["hash of a prompt"] = spread_us(_hash_times(load, 2 * load.requests))
    return CellResult(spreads, {"reused tokens of a request, mean": reused})


def _hash_times(load: AdmissionLoad, count: int) -> list[int]:
    """Time what the serving process does once per prompt, or two walks once per rank."""
    times = []
    for number in range(count):
        tokens = Random(number).randbytes(TOKEN_BYTES * load.tokens)
        started = time.perf_counter_ns()
        sequence_keys(tokens, load.block_tokens, bytes(32))
        times.append(time.perf_counter_ns() - started)
    return times


def _waiting(task: CellTask) -> CellResult:
    load = task.load
    maker, fleet = PromptMaker(load), LocalFleet(load)
    fleet.prepare(maker.new_families())
    leader = fleet.ranks[LEADER]
    arrivals = maker.fresh(load.requests)
    gc.collect()
    gc.freeze()
    burst = _time_discovery(fleet, arrivals)
    rounds = [fleet.round() for _ in range(task.repeats)]
    check(not leader.installs.keys() - set(range(1, load.families + 1)), "all of them wait")
    single: list[int] = []
    for _ in range(task.repeats):
        arrivals = maker.fresh(1)
        single += _time_discovery(fleet, arrivals)
        leader.cancel(arrivals[0].rid)
        fleet.round()  # the cancel record; the ranks vote gone in the same round
        check(arrivals[0].rid in leader.gone, "a waiting request ends in one round")
    fleet.close()
    return CellResult(
        {
            "round, leader": spread_us([cost.leader_ns for cost in rounds]),
            "round, follower": spread_us([cost.follower_ns for cost in rounds]),
            "discovery, one arrival, ranks in turn": spread_us(single),
            "discovery, all at once, ranks in turn": spread_us(burst),
        }
    )


def _time_discovery(fleet: LocalFleet, prompts: Sequence[BenchPrompt]) -> list[int]:
    """Announce all at once; return, per request, when every rank knew its candidate."""
    started = time.perf_counter_ns()
    for prompt in prompts:
        fleet.ranks[LEADER].announce(prompt)
    fleet.until(
        lambda: all(prompt.rid in rank.hinted_ns for rank in fleet.ranks for prompt in prompts)
    )
    return [max(rank.hinted_ns[prompt.rid] for rank in fleet.ranks) - started for prompt in prompts]


def _sockets(task: CellTask) -> CellResult:
    load, pauses = task.load, Random(task.load.seed)
    maker, fleet = PromptMaker(load), SocketFleet(load)
    leader = fleet.leader
    announced: dict[str, dict[int, int]] = {"one arrival": {}, "all at once": {}}

    def arrive(prompts: Sequence[BenchPrompt], name: str) -> None:
        for prompt in prompts:
            announced.setdefault(name, {})[prompt.rid] = time.perf_counter_ns()
            leader.announce(prompt)
        fleet.until(lambda: all(prompt.rid in leader.hinted_ns for prompt in prompts))

    def leave(rids: Sequence[int]) -> None:
        for rid in rids:
            leader.cancel(rid)
        fleet.until(lambda: leader.gone >= set(rids))

    try:
        fleet.prepare(maker.new_families())
        waiting = maker.fresh(load.requests - 1)
        arrive(waiting, "the others")
        for _ in range(task.repeats):
            arrivals = maker.fresh(1)
            fleet.run_for(pauses.uniform(0.0, ARRIVAL_GAP_S))
            arrive(arrivals, "one arrival")
            leave([prompt.rid for prompt in arrivals])
        leave([prompt.rid for prompt in waiting])
        for _ in range(BURSTS):
            arrivals = maker.fresh(load.requests)
            arrive(arrivals, "all at once")
            leave([prompt.rid for prompt in arrivals])
        hinted = fleet.close()
    finally:
        fleet.kill()
    spreads = {}
    for name in ("one arrival", "all at once"):
        at = announced[name]
        everywhere = [max(times[rid] for times in hinted) - at[rid] for rid in at]
        spreads[f"discovery, {name}"] = spread_us([hinted[LEADER][rid] - at[rid] for rid in at])
        spreads[f"discovery, {name}, on all ranks"] = spread_us(everywhere)
    return CellResult(spreads)


def _memory(task: CellTask) -> CellResult:
    """Return what a cached block costs; traced, so nothing is timed here."""
    load = msgspec.structs.replace(task.load, ranks=1, requests=1)
    maker = PromptMaker(load)
    families = maker.new_families()
    gc.collect()
    tracemalloc.start()
    fleet = LocalFleet(load)
    slots = sum(fleet.ranks[LEADER].cache.view().total)
    empty = tracemalloc.get_traced_memory()[0]
    fleet.prepare(families)
    fleet.until(lambda: not fleet.ranks[LEADER].installs)
    gc.collect()
    filled = tracemalloc.take_snapshot()
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    blocks = sum(len(keys) for keys in fleet.ranks[LEADER].cache.view().keys)
    index = filled.filter_traces([tracemalloc.Filter(inclusive=True, filename_pattern="*index.py")])
    index_bytes = sum(trace.size for trace in index.traces)
    fleet.close()
    return CellResult(
        numbers={
            "index bytes per block": index_bytes / blocks,
            "key, tree and index bytes per block": (full - empty) / blocks,
            "bytes per slot of the pool": empty / slots,
        }
    )


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=CellTask)
    sys.stdout.buffer.write(msgspec.json.encode(measure(given)))
