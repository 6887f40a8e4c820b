"""What every process of a worker is told at its start, and how it is tied to its parent.

The supervisor writes one `boot.json` into the worker's private run folder and starts
`python -m <module> --boot FILE --rank N` twice per rank.  A child begins with `begin_child`.
Imports nothing heavy: both halves of a rank use it.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError, check
from wavepp_worker.base.types import Rank
from wavepp_worker.config.derive import ModelFacts, Plan
from wavepp_worker.config.schema import Config

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ALIVE_INTERVAL_S = 1.0  # or a quarter of the silence that counts as a loss, if that is less


class Boot(Struct, frozen=True, kw_only=True):
    """Everything that the processes of one life of a worker share."""

    config: Config
    plan: Plan
    facts: ModelFacts
    epoch: int  # grows with every restart of the worker; the first host makes it
    group: str  # names this worker's ranks in Dynamo's discovery
    run_dir: str  # private folder (0700) that holds the ipc sockets
    report_address: str  # ZeroMQ endpoint of serving's PULL socket; every child PUSHes to it
    namespace: str  # Dynamo namespace
    parent_pid: int  # the supervisor's process
    ranks: tuple[int, ...] = ()  # those of this host; empty: all

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """Return the ranks of this host."""
        return self.ranks or tuple(range(self.config.cluster.stages))


def save_boot(boot: Boot, path: str | Path) -> None:
    """Write `boot` to `path` as JSON."""
    Path(path).write_bytes(msgspec.json.encode(boot))


def load_boot(path: str | Path) -> Boot:
    """Return the `Boot` in the JSON file `path`.

    Raises:
        ConfigError: the file is missing or is not a `Boot`.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Boot)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"boot file {path}: {error}") from error


def front_address(run_dir: str) -> str:
    """Return the PAIR endpoint serving ↔ WAVE0; serving binds it, WAVE0 connects."""
    return f"ipc://{run_dir}/front"


def loop_address(run_dir: str, rank: int) -> str:
    """Return the PAIR endpoint WAVE_s ↔ LOOP_s; WAVE binds it, LOOP connects."""
    return f"ipc://{run_dir}/loop{rank}"


def alive_interval_s(config: Config) -> float:
    """Return how often WAVE and LOOP of a rank tell each other `Alive`."""
    return min(ALIVE_INTERVAL_S, config.transport.collective_timeout_s / 4)


def begin_child(arguments: Sequence[str]) -> tuple[Boot, Rank]:
    """Parse `--boot FILE --rank N`, tie this process to its parent, set up logging.

    The first thing that a child's main does.  `arguments` excludes the program's name.

    Raises:
        ConfigError: the boot file cannot be used.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--boot", required=True)
    parser.add_argument("--rank", required=True, type=int)
    options = parser.parse_args(arguments)
    boot = load_boot(options.boot)
    die_with_parent(boot.parent_pid)
    stages = boot.config.cluster.stages
    check(0 <= options.rank < stages, "rank out of range", rank=options.rank, stages=stages)
    # The supervisor puts the time's owner (rank and role) in front of every line.
    logging.basicConfig(
        level=boot.config.obs.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    return boot, Rank(options.rank)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; leave Ctrl-C to the parent.

    The signal follows the *thread* that started us, so a supervisor spawns from its main thread.
    Exits at once if the parent is already gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died between our fork and the line above
        os._exit(1)
