"""Starts the 2P processes of a worker, watches them, and ends them together.

Used by the serving process on its asyncio loop.  A child that exits before `stop` was called, or
that reports `Fatal`, takes all others with it: `exited` then says who, how and why.  If the
serving process itself dies, the kernel kills every child (`boot.die_with_parent`).

    supervisor = RankSupervisor(config, plan, facts, namespace)
    front = FrontDoor(supervisor.run_dir, config.cluster.host)
    await supervisor.start(front.report_address)
    …  every Fatal report goes to supervisor.note_fatal; await supervisor.exited elsewhere  …
    front.shutdown("done"); await supervisor.stop(); front.close()
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from wavepp_worker.base.errors import check
from wavepp_worker.config.derive import ModelFacts, Plan
from wavepp_worker.config.schema import Config
from wavepp_worker.runtime.boot import Boot, save_boot
from wavepp_worker.runtime.child import Child
from wavepp_worker.runtime.folders import PrivateFolder
from wavepp_worker.wire.mailbox import Fatal

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.2  # what explains a failure may arrive this much later than its first sign
TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL
FOLDER_CHARACTERS_MAX = 70  # an ipc socket's whole path has 107 characters at most
ROLES = {
    "wave": "wavepp_worker.runtime.wave_process",
    "loop": "wavepp_worker.runtime.loop_process",
}
# Settings of the serving process's own Dynamo runtime: fixed ports that a rank must not claim too.
PRIVATE_VARIABLES = ("DYN_SYSTEM_PORT", "DYN_SYSTEM_ENABLED", "DYN_TCP_RPC_PORT")


class RankSupervisor:
    """One life of a host's ranks.  Construct and use on one asyncio loop in the main thread.

    Args:
        ranks: those to start; empty: all.
        epoch: of the worker's life, given by the first host; 0: this is the first host.
        roles: module to run per role; tests put scripted processes in.

    Attributes:
        epoch: grows with every restart of the worker.
        run_dir: private folder of this life; removed by `stop`, `kill` and at exit.
        exited: set to the reason when the worker failed; stays pending in an ordered stop.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        facts: ModelFacts,
        namespace: str,
        *,
        ranks: tuple[int, ...] = (),
        epoch: int = 0,
        roles: dict[str, str] | None = None,
    ) -> None:
        self._config, self._plan, self._facts = config, plan, facts
        self._namespace = namespace
        self._ranks = ranks or tuple(range(config.cluster.stages))
        self.epoch = epoch or time.time_ns() // 1_000_000
        self._roles = ROLES if roles is None else roles
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[str] = self._loop.create_future()
        folder = tempfile.gettempdir()
        if len(folder) > FOLDER_CHARACTERS_MAX:
            folder = "/tmp"
        self._folder = PrivateFolder("run", folder)
        self.run_dir = self._folder.path
        atexit.register(self._remove_run_dir)
        self._children: list[Child] = []
        self._exits: list[Child] = []  # in order of notice, before we killed anybody
        self._fatals: list[Fatal] = []
        self._causes: list[str] = []  # what happened outside this host
        self._is_failing = False
        self._is_killing = False
        self._is_stopping = False

    async def start(self, report_address: str) -> None:
        """Start every process.  They are ready when WAVE0 reports `WorkerReady`."""
        # PR_SET_PDEATHSIG follows the spawning thread, which must live as long as the process.
        check(threading.current_thread() is threading.main_thread(), "spawn from the main thread")
        boot = Boot(
            config=self._config,
            plan=self._plan,
            facts=self._facts,
            epoch=self.epoch,
            group=self._config.cluster.group or f"wavepp-{secrets.token_hex(6)}",
            run_dir=self.run_dir,
            report_address=report_address,
            namespace=self._namespace,
            parent_pid=os.getpid(),
            ranks=self._ranks,
        )
        boot_file = Path(self.run_dir) / "boot.json"
        save_boot(boot, boot_file)
        environment = self._environment()
        for rank in self._ranks:
            for role, module in self._roles.items():
                command = [sys.executable, "-m", module, "--boot", str(boot_file)]
                command += ["--rank", str(rank)]
                child = Child(f"{role}{rank}", command, environment, self._on_exit)
                self._children.append(child)
        pids = " ".join(f"{child.name}={child.pid}" for child in self._children)
        logger.info("ranks started: epoch=%d group=%s %s", boot.epoch, boot.group, pids)

    def note_fatal(self, fatal: Fatal) -> None:
        """Take a `Fatal` report: the worker fails, with this text in the reason."""
        self._fatals.append(fatal)
        self._fail()

    def fail(self, cause: str) -> None:
        """End the ranks because of something outside this host; `cause` comes first in the reason.

        A no-op in an ordered stop.
        """
        self._causes.append(cause)
        self._fail()

    async def stop(self, grace_s: float = 5.0) -> bool:
        """End the ranks after `FrontDoor.shutdown`; return whether all ended by themselves.

        Waits `grace_s`, then sends SIGTERM, then SIGKILL.  Null-safe and idempotent.
        """
        self._is_stopping = True
        try:
            is_orderly = await self._all_exit_within(grace_s)
            if not is_orderly:
                names = [child.name for child in self._children if child.status is None]
                logger.warning("ranks did not end in %g s: %s", grace_s, " ".join(names))
                self._signal_all(signal.SIGTERM)
                await self._all_exit_within(TERM_GRACE_S)
        finally:
            await self.kill()
        return is_orderly

    async def kill(self) -> None:
        """SIGKILL every process that is left and remove the run folder.  Idempotent."""
        self._is_stopping = True
        self._kill_all()
        try:
            await self._all_exit_within(TERM_GRACE_S)
        finally:
            self._remove_run_dir()

    def _environment(self) -> dict[str, str]:
        """Return the ranks' environment: ours without what only one process of a host may have.

        Kubernetes discovery knows one instance per pod, and that is the serving process; ranks
        that registered too would take its place.  They meet in the run folder instead.
        """
        environment = {k: v for k, v in os.environ.items() if k not in PRIVATE_VARIABLES}
        environment["PYTHONUNBUFFERED"] = "1"
        if environment.get("DYN_DISCOVERY_BACKEND") == "kubernetes":
            environment["DYN_DISCOVERY_BACKEND"] = "file"
            environment["DYN_FILE_KV"] = str(Path(self.run_dir) / "store")
        return environment

    def _on_exit(self, child: Child) -> None:
        if not self._is_killing:  # after that an exit says nothing about its cause
            self._exits.append(child)
        if self._is_stopping and child.status != 0:
            logger.warning("%s", child.obituary())
        self._fail()

    def _fail(self) -> None:
        """End all ranks, unless that is under way.

        A victim's neighbours may be noticed before the victim, and a reporter before it exits,
        so the others are left alone for a moment in which the cause comes to light.
        """
        if not self._is_stopping and not self._is_failing:
            self._is_failing = True
            self._loop.call_later(LAST_WORDS_S, self._kill_all)
            self._loop.call_later(2 * LAST_WORDS_S, self._conclude)

    def _conclude(self) -> None:
        """Tell why the worker failed: a death by signal first, lost neighbours last."""
        exits = sorted(self._exits, key=lambda child: (child.status or 0) >= 0)
        fatals = sorted(self._fatals, key=lambda fatal: fatal.text.startswith("PeerError"))
        parts = self._causes[:1] + [child.obituary() for child in exits[:1]]
        parts += [f"{fatal.role}{fatal.rank} reported: {fatal.text}" for fatal in fatals[:4]]
        parts += [f"last output of {child.name}: {child.tail()}" for child in exits[:1]]
        self._remove_run_dir()
        if not self.exited.done():
            self.exited.set_result("; ".join(parts))

    async def _all_exit_within(self, timeout_s: float) -> bool:
        waits = [child.gone for child in self._children]
        if waits:
            await asyncio.wait(waits, timeout=timeout_s)
        return all(wait.done() for wait in waits)

    def _signal_all(self, number: int) -> None:
        for child in self._children:
            child.send_signal(number)

    def _kill_all(self) -> None:
        self._is_killing = True
        self._signal_all(signal.SIGKILL)

    def _remove_run_dir(self) -> None:
        self._folder.remove()
        atexit.unregister(self._remove_run_dir)
