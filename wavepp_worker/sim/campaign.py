"""Many worlds: seeds over processes, what they found, and the shortest command that shows it.

The worlds know nothing of processes; only this module and `command` do.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec
from msgspec import Struct, field

from wavepp_worker.base import marks
from wavepp_worker.sim.knobs import FAULTS, SimOptions
from wavepp_worker.sim.world import Violation, World, WorldReport

SEEDS_PER_TASK = 8
SHRINK_RUNS_MAX = 60
EXPLAINED_MAX = 5  # findings of a campaign with the shortest command and stories
STORIES_SHOWN = 4


class Finding(Struct, frozen=True):
    """A world that was stopped by a violation."""

    seed: int
    text: str
    command: str = ""
    story: str = ""


class Batch(Struct, frozen=True):
    """What some seeds showed."""

    reports: tuple[WorldReport, ...]
    findings: tuple[Finding, ...]
    hits: dict[str, int]  # coverage marks


class Totals(Struct, kw_only=True):
    """A campaign so far.  Equal for equal seeds and options."""

    seeds: int = 0
    requests: int = 0
    rounds: int = 0
    steps: int = 0
    epochs: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    read_handoffs: int = 0
    lost_handoffs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Add what some seeds showed."""
        self.seeds += len(batch.reports) + len(batch.findings)
        self.findings += batch.findings
        self.marks.update(batch.hits)
        for report in batch.reports:
            for name in ("requests", "rounds", "steps", "epochs", "reused_tokens",
                         "computed_tokens", "read_handoffs", "lost_handoffs"):  # fmt: skip
                setattr(self, name, getattr(self, name) + getattr(report, name))
            self.ends.update(report.ends)
            self.verdicts.update(report.verdicts)


def run_world(world: World) -> Batch:
    """Run one world; without the collector of cycles, which finds nothing until its end."""
    before = dict(marks.hits)
    gc.disable()
    reports: tuple[WorldReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    try:
        reports = (world.run(),)
    except Violation as violation:
        findings = (Finding(world.seed, str(violation)),)
    finally:
        gc.enable()
    hits = {name: marks.hits[name] - before[name] for name in marks.MARKS}
    return Batch(reports, findings, hits)


def run_batch(seeds: tuple[int, ...], options: SimOptions) -> list[Batch]:
    """Run some seeds in this process."""
    return [run_world(World(seed, options, storyteller=False)) for seed in seeds]


def run_seeds(
    first_seed: int, count: int, options: SimOptions, jobs: int, note: Callable[[int], None]
) -> Totals:
    """Run `count` seeds on `jobs` processes.

    Args:
        note: told how many seeds are done; in order, so that output does not depend on timing.
    """
    totals = Totals()
    for batches in _batches(first_seed, count, options, jobs):
        for batch in batches:
            totals.add(batch)
        note(totals.seeds)
    return totals


def _batches(first_seed: int, count: int, options: SimOptions, jobs: int) -> Iterator[list[Batch]]:
    seeds = range(first_seed, first_seed + count)
    tasks = [tuple(seeds[at : at + SEEDS_PER_TASK]) for at in range(0, count, SEEDS_PER_TASK)]
    if jobs == 1 or len(tasks) == 1:
        for task in tasks:
            yield run_batch(task, options)
        return
    with ProcessPoolExecutor(jobs, initializer=_leave_signals_to_the_parent) as pool:
        # Not map(): it cancels its futures when it is left, and the pool's own thread, which then
        # finds its children gone, cannot fail what is cancelled and says so at length.
        futures = [pool.submit(run_batch, task, options) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        except BaseException:  # Ctrl-C above all: what is queued is of no interest any more
            for child in multiprocessing.active_children():
                child.terminate()
            raise


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def default_jobs() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


# ── what a finding needs ─────────────────────────────────────────────────────────────────────


def explain_all(findings: list[Finding], options: SimOptions) -> list[Finding]:
    """Add a command to every finding, and to the first ones the shortest and their stories."""
    return [
        explain(finding, options)
        if number < EXPLAINED_MAX
        else msgspec.structs.replace(finding, command=command_of(finding.seed, options))
        for number, finding in enumerate(findings)
    ]


def explain(finding: Finding, options: SimOptions) -> Finding:
    """Add the shortest command that still shows a violation, and the stories of that world."""
    smaller = shrink(finding.seed, options)
    world = World(finding.seed, smaller)
    return _told(finding, world, command_of(finding.seed, smaller))


def explain_trace(
    finding: Finding, world: World, make: Callable[[int, bool], World], command: str
) -> Finding:
    """Do the same for a world of recorded requests: those that had come are enough.

    Args:
        make: makes the world again with fewer requests, and with stories.
        command: its beginning.
    """
    requests = max(1, world.clients.arrived_count)
    rest = f"--seed {finding.seed} {_flags(world.options, requests)}"
    return _told(finding, make(requests, True), f"{command} {rest}")


def _told(finding: Finding, world: World, command: str) -> Finding:
    """Run a world that is known to end in a violation once more, for its stories."""
    text = finding.text
    try:
        world.run()
    except Violation as violation:
        text = str(violation)
    known = world.story_rids()
    named = {int(rid) for rid in re.findall(r"\b(?:rid|older|younger)=(\d+)", text)}
    story = world.story(sorted(named & set(known)) or known[-STORIES_SHOWN:])
    return Finding(finding.seed, text, command, story)


def shrink(seed: int, options: SimOptions) -> SimOptions:
    """Return smaller options under which this seed still ends in a violation."""
    runs = 0

    def fails(candidate: SimOptions) -> bool:
        nonlocal runs
        runs += 1
        if runs > SHRINK_RUNS_MAX:
            return False
        try:
            World(seed, candidate, storyteller=False).run()
        except Violation:
            return True
        return False

    best = options
    for fault in FAULTS:
        without = tuple(name for name in best.faults if name != fault)
        candidate = msgspec.structs.replace(best, faults=without)
        if fault in best.faults and fails(candidate):
            best = candidate
    for switch in ("has_host", "is_hybrid"):
        candidate = msgspec.structs.replace(best, **{switch: False})
        if candidate != best and fails(candidate):
            best = candidate
    for name in ("ranks", "requests"):
        for value in (1, 2, 3, 4, 6, 8, 12, 16):
            if value >= getattr(best, name):
                break
            candidate = msgspec.structs.replace(best, **{name: value})
            if fails(candidate):
                best = candidate
                break
    return best


def command_of(seed: int, options: SimOptions) -> str:
    """Return the command line that runs one seed under these options."""
    return f"wavepp sim --seed {seed} {_flags(options, options.requests)} --story all"


def _flags(options: SimOptions, requests: int) -> str:
    words = [f"--ranks {options.ranks} --requests {requests}"]
    words += ["--hybrid"] * options.is_hybrid + ["--no-host"] * (not options.has_host)
    words += [f"--mode {options.mode}"] * (options.mode != "leases")
    is_all = set(options.faults) == set(FAULTS)
    words.append(f"--faults {'all' if is_all else ','.join(options.faults) or 'none'}")
    return " ".join(words)
