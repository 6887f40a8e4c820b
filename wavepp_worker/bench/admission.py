"""`wavepp bench admission`: what admitting long, mostly cached prompts costs, and how it grows.

    two walks   the admission that the paper starts from (`two_walks`)
    ours        probe the index, agree in a round, one bounded walk, reserve, commit, materialise

Every configuration runs in a process of its own (`admission_cell`), both designs in the same one,
in turn, on equal caches.  Needs no GPU and no model.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError, PeerError
from wavepp_worker.bench.admission_cell import CellResult, CellTask
from wavepp_worker.bench.admission_load import AdmissionLoad
from wavepp_worker.bench.figures import Growth, Machine, growth_of, machine_facts

CELL_MODULE = "wavepp_worker.bench.admission_cell"
TABLE_BLOCKS = 20  # a prompt has so many blocks at least, or shares of it mean nothing
GROWTH_REQUESTS, GROWTH_RANKS, GROWTH_FAMILIES = 8, 2, 4  # so that the longest fit in memory


class AdmissionOptions(Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        concurrency: requests that are there at the same time.
        repeats: times that all of them come and go.
        arrivals: single arrivals among waiting requests.
        growth_tokens, growth_waiting: sizes of the growth tables; () leaves a table out.
        waiting_tokens: prompt length while the number of waiting requests grows.
    """

    tokens: int = 200_000
    concurrency: int = 64
    ranks: int = 4
    block_tokens: tuple[int, ...] = (64, 32)
    is_hybrid: bool = False
    repeats: int = 6
    arrivals: int = 300
    growth_tokens: tuple[int, ...] = (10_000, 30_000, 100_000, 300_000, 1_000_000)
    growth_waiting: tuple[int, ...] = (1, 8, 64, 512)
    waiting_tokens: int = 20_000
    seed: int = 1


class BlockReport(Struct, frozen=True, kw_only=True):
    """One block size.

    Attributes:
        work: durations of the steps of one request on one rank.
        local: rounds and discovery, all ranks in one process, their work added up.
        sockets: discovery, a process per rank, over the production transport.
    """

    block_tokens: int
    work: CellResult
    local: CellResult
    sockets: CellResult
    memory: CellResult


class AdmissionReport(Struct, frozen=True, kw_only=True):
    """Everything that one run measured; durations in microseconds.

    Attributes:
        by_tokens, by_waiting: how the medians grow with the prompt, and with how many wait.
    """

    command: str
    options: AdmissionOptions
    machine: Machine
    blocks: tuple[BlockReport, ...]
    by_tokens: dict[str, Growth]
    by_waiting: dict[str, Growth]


def quick(options: AdmissionOptions) -> AdmissionOptions:
    """Return small options that take seconds and show the same tables."""
    return msgspec.structs.replace(
        options,
        tokens=min(options.tokens, 8_000),
        concurrency=min(options.concurrency, 8),
        ranks=min(options.ranks, 2),
        repeats=2,
        arrivals=20,
        growth_tokens=(4_000, 16_000) if options.growth_tokens else (),
        growth_waiting=(1, 32) if options.growth_waiting else (),
        waiting_tokens=4_000,
    )


def check_options(options: AdmissionOptions) -> None:
    """Raise ConfigError unless the options can be measured."""
    if min(options.block_tokens, default=0) < 1:
        raise ConfigError("--block-tokens is a list of numbers above 0, as in 64,32")
    if min(options.ranks, options.concurrency) < 1:
        raise ConfigError("--ranks and --concurrency are at least 1")
    least = TABLE_BLOCKS * max(options.block_tokens)
    if options.tokens < least:
        raise ConfigError(f"--tokens is at least {least}: {TABLE_BLOCKS} blocks")


def measure_admission(
    options: AdmissionOptions, command: str, note: Callable[[str], None]
) -> AdmissionReport:
    """Run everything; nothing else should run on the machine meanwhile.

    Raises:
        ConfigError: the options make no sense.
        PeerError: a measuring process failed.
    """
    check_options(options)
    machine = machine_facts()
    return AdmissionReport(
        command=command,
        options=options,
        machine=machine,
        blocks=tuple(_block_report(options, size, note) for size in options.block_tokens),
        by_tokens=_by_tokens(options, note),
        by_waiting=_by_waiting(options, note),
    )


def _block_report(
    options: AdmissionOptions, block_tokens: int, note: Callable[[str], None]
) -> BlockReport:
    load = AdmissionLoad(
        tokens=options.tokens,
        block_tokens=block_tokens,
        requests=options.concurrency,
        ranks=options.ranks,
        is_hybrid=options.is_hybrid,
        seed=options.seed,
    )
    crowded = msgspec.structs.replace(load, is_crowded=True)
    note(f"blocks of {block_tokens}: sections, two walks and ours")
    work = run_cell(CellTask(kind="sections", load=load, repeats=options.repeats))
    note(f"blocks of {block_tokens}: rounds in one process")
    local = run_cell(CellTask(kind="waiting", load=crowded, repeats=options.arrivals))
    note(f"blocks of {block_tokens}: rounds between {options.ranks} processes")
    sockets = run_cell(CellTask(kind="sockets", load=crowded, repeats=options.arrivals))
    note(f"blocks of {block_tokens}: memory")
    memory = run_cell(CellTask(kind="memory", load=load, repeats=1))
    return BlockReport(
        block_tokens=block_tokens, work=work, local=local, sockets=sockets, memory=memory
    )


def _by_tokens(options: AdmissionOptions, note: Callable[[str], None]) -> dict[str, Growth]:
    medians: list[dict[str, float]] = []
    for tokens in options.growth_tokens:
        note(f"growth: prompts of {tokens:,} tokens")
        load = AdmissionLoad(
            tokens=tokens,
            block_tokens=options.block_tokens[0],
            is_hybrid=options.is_hybrid,
            seed=options.seed,
            requests=GROWTH_REQUESTS,
            ranks=GROWTH_RANKS,
            families=GROWTH_FAMILIES,
        )
        crowded = msgspec.structs.replace(load, is_crowded=True)
        work = run_cell(CellTask(kind="sections", load=load, repeats=options.repeats))
        local = run_cell(CellTask(kind="waiting", load=crowded, repeats=options.arrivals // 10))
        medians.append(_medians(work) | _medians(local))
    return _growth(options.growth_tokens, medians)


def _by_waiting(options: AdmissionOptions, note: Callable[[str], None]) -> dict[str, Growth]:
    medians: list[dict[str, float]] = []
    for count in options.growth_waiting:
        note(f"growth: {count} waiting requests")
        load = AdmissionLoad(
            tokens=options.waiting_tokens,
            block_tokens=options.block_tokens[0],
            requests=count,
            ranks=options.ranks,
            is_hybrid=options.is_hybrid,
            is_crowded=True,
            seed=options.seed,
        )
        figures = _medians(run_cell(CellTask(kind="waiting", load=load, repeats=options.arrivals)))
        medians.append({name: us for name, us in figures.items() if "all at once" not in name})
    return _growth(options.growth_waiting, medians)


def _medians(result: CellResult) -> dict[str, float]:
    return {name: spread.p50 for name, spread in result.spreads.items()}


def _growth(sizes: Sequence[int], medians: Sequence[Mapping[str, float]]) -> dict[str, Growth]:
    if len(sizes) < 2:
        return {}
    return {name: growth_of(sizes, [figures[name] for figures in medians]) for name in medians[0]}


def run_cell(task: CellTask) -> CellResult:
    """Measure one configuration in a fresh process.

    Raises:
        PeerError: that process failed; what it wrote is in the text.
    """
    done = subprocess.run(
        [sys.executable, "-m", CELL_MODULE],
        input=msgspec.json.encode(task),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise PeerError(f"measuring {task} failed:\n{done.stderr.decode(errors='replace')}")
    return msgspec.json.decode(done.stdout, type=CellResult)
