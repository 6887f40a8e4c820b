"""Plant one-line faults in the core, one at a time, and show that a test sees each: `make mutants`.

The faults stand in mutants.toml: an exact piece of a file, what it becomes, and why that is wrong.
Each is planted in a copy of the tree, never in the tree itself; the suites of its package run, the
fastest first, until one fails.  First of all they run on a copy without a fault: where they fail
by themselves, nothing that they catch would count.

    SURVIVED   no test sees the fault: a test is missing
    STALE      the fault's text is not found exactly once: it must follow the code
    BROKEN     the suite did not run at all, as after a mistake in the planted text

Exit status: 0 all caught, 1 one of these, 2 the suites fail without a fault.

examples:
  make mutants                                     all of them, as many at a time as there are cores
  make mutants ARGS="no-solo head-bypassed"        two of them
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
COPIED = ("wavepp_worker", "kv_router_hooks", "components", "graphs", "configs", "docs", "tests")
SIMULATION = ["-m", "wavepp_worker", "sim", "--ranks", "3", "--seeds", "24", "--jobs", "1"]
SIMULATIONS = {"wavepp sim": SIMULATION, "wavepp sim --hybrid": [*SIMULATION, "--hybrid"]}
SUITES = {  # per package: directed tests, then what draws or enumerates cases
    "cache": ("tests/unit/cache", "tests/property/test_machines.py"),
    "admission": ("tests/unit/admission", "tests/property/test_explore.py"),
    "executor": ("tests/unit/executor", "tests/property/test_loop_world.py"),
    "planner": ("tests/unit/planner", "tests/property/test_loop_world.py"),
    "router": ("tests/unit/kv_router_hooks", "tests/property/test_quorum.py"),
}
TIMEOUT_S = 240  # of one suite; beyond it the fault made it hang, which counts as caught
TESTS_FAILED = 1  # pytest's status, and that of `wavepp sim` for a violation
NOT_CAUGHT = frozenset({"SURVIVED", "STALE", "BROKEN"})


@dataclass(frozen=True)
class Fault:
    """One line of the program made wrong."""

    name: str
    file: str
    old: str
    new: str
    why: str
    suite: str

    def planted(self, root: Path) -> str | None:
        """Return the file's text with the fault, or None if the fault is stale."""
        text = (root / self.file).read_text()
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None


@dataclass(frozen=True)
class Outcome:
    """What became of a fault."""

    fault: Fault
    verdict: str  # what caught it, or one of NOT_CAUGHT
    seconds: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return all faults of the data file."""
    with path.open("rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def runs_of(suite: str) -> list[tuple[str, list[str]]]:
    """Return (name, interpreter's arguments) of a package's suites, the fastest first."""
    directed, drawn = (
        (path, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path])
        for path in SUITES[suite]
    )
    return [directed, *SIMULATIONS.items(), drawn]


def try_fault(fault: Fault) -> Outcome:
    """Plant a fault in a copy of the tree and run its suites until one fails."""
    began = time.monotonic()
    with copied_tree() as copy:
        text = fault.planted(copy)
        if text is None:
            return Outcome(fault, "STALE", 0.0)
        (copy / fault.file).write_text(text)
        verdict = first_failure(runs_of(fault.suite), copy) or "SURVIVED"
    return Outcome(fault, verdict, time.monotonic() - began)


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of what the suites need; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="wavepp-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        yield copy


def first_failure(runs: Iterable[tuple[str, list[str]]], folder: Path) -> str:
    """Return which run failed and where, or nothing."""
    for name, arguments in runs:
        failure = _run(arguments, folder)
        if failure:
            return failure if failure in NOT_CAUGHT else f"{name}: {failure}"
    return ""


def _run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(folder),  # ahead of an installed wavepp_worker
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # so no bytecode outlives the text that it came from
    }
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hang"
    if done.returncode == 0:
        return ""
    found = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("FAILED", "VIOLATION", "NEVER"))
    ]
    if done.returncode != TESTS_FAILED or not found:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return "BROKEN"
    return found[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1][:70]


def clean_failure(suite: str) -> str:
    """Return what fails in a package's suites without any fault, or nothing."""
    with copied_tree() as copy:
        return first_failure(runs_of(suite), copy)


def main() -> int:
    """Run all faults, or those named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help="faults to plant; default: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    known = read_faults()
    unknown = set(args.name) - {fault.name for fault in known}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in known if not args.name or fault.name in args.name]
    began = time.monotonic()
    bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for failure in pool.map(clean_failure, sorted({fault.suite for fault in faults})):
            if failure:
                print(f"without any fault: {failure}", flush=True)
                return 2
        print(
            f"{'nothing planted':32} {time.monotonic() - began:5.0f} s  all suites pass", flush=True
        )
        for outcome in pool.map(try_fault, faults):
            is_bad = outcome.verdict in NOT_CAUGHT
            bad += is_bad
            print(
                f"{outcome.fault.name:32} {outcome.seconds:5.0f} s  {outcome.verdict}", flush=True
            )
            if is_bad:
                print(f"{'':32}          {outcome.fault.why}", flush=True)
    print(f"{len(faults) - bad} of {len(faults)} caught in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
