"""Plant one-line faults in the core, one at a time, and show that a test sees each: `make mutants`.

The faults stand in mutants.toml: an exact piece of a file, what it becomes, and why that is wrong.
Each is planted in a copy of the tree, never in the tree itself; the suites of its package run
until the first failure.  A fault that no test sees is a missing test; a fault whose text is not
found exactly once is stale.  Exit status: 0 all caught, 1 a survivor or a stale fault.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FAULTS = Path(__file__).with_suffix(".toml")
COPIED = ("wavepp_worker", "kv_router_hooks", "components", "graphs", "configs", "docs", "tests")
SIMULATION = ["-m", "wavepp_worker", "sim", "--ranks", "3", "--seeds", "24", "--jobs", "1"]
SUITES = {
    "cache": ["tests/unit/cache", "tests/property/test_machines.py"],
    "admission": ["tests/unit/admission", "tests/property/test_explore.py"],
    "executor": ["tests/unit/executor", "tests/property/test_loop_world.py"],
    "planner": ["tests/unit/planner"],
    "router": ["tests/unit/kv_router_hooks", "tests/property/test_quorum.py"],
}
TIMEOUT_S = 240


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
    """What became of a fault; `caught_by` is empty for a survivor."""

    fault: Fault
    caught_by: str
    seconds: float


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """Return all faults of the data file."""
    with path.open("rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def try_fault(fault: Fault) -> Outcome:
    """Plant a fault in a copy of the tree and run its suites until one fails."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wavepp-mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        text = fault.planted(copy)
        if text is None:
            return Outcome(fault, "STALE", 0.0)
        (copy / fault.file).write_text(text)
        environment = os.environ | {
            "PYTHONPATH": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        runs = [(f"{suite}", ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", suite])
                for suite in SUITES[fault.suite]]  # fmt: skip
        runs += [("wavepp sim", SIMULATION), ("wavepp sim --hybrid", [*SIMULATION, "--hybrid"])]
        for name, arguments in runs:
            caught = _run(arguments, copy, environment)
            if caught:
                return Outcome(fault, f"{name}: {caught}", time.monotonic() - began)
    return Outcome(fault, "", time.monotonic() - began)


def _run(arguments: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return what showed the fault, or nothing."""
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
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    lines += [line for line in done.stdout.splitlines() if line.startswith("VIOLATION")]
    return (lines or ["failed"])[0].removeprefix("FAILED ").split(" - ")[0].split("::")[-1][:70]


def main() -> int:
    """Run all faults, or those named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="*", help="faults to plant; default: all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    faults = [f for f in read_faults() if not args.name or f.name in args.name]
    began = time.monotonic()
    bad = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(try_fault, faults):
            is_bad = outcome.caught_by in {"", "STALE"}
            bad += is_bad
            verdict = outcome.caught_by or "SURVIVED"
            print(f"{outcome.fault.name:32} {outcome.seconds:5.0f} s  {verdict}", flush=True)
            if is_bad:
                print(f"{'':32}          {outcome.fault.why}", flush=True)
    print(f"{len(faults) - bad} of {len(faults)} caught in {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
