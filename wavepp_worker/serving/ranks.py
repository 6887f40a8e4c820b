"""The ranks as the serving process sees them: two ports, and how to start the real thing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts, Plan, derive
from wavepp_worker.config.schema import Config, first_host_ranks
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.host_door import HostDoor
from wavepp_worker.runtime.host_line import shared_digests
from wavepp_worker.runtime.supervisor import RankSupervisor
from wavepp_worker.wire.hosts import Welcome
from wavepp_worker.wire.mailbox import Announce, Fatal, ReportMessage

HOSTS_LEAVE_S = 2.0  # for other hosts to end after a failure


class RanksPort(Protocol):
    """The ranks' processes."""

    exited: asyncio.Future[str]
    """Set to the reason when a process failed; the worker then fails as a unit."""

    def note_fatal(self, fatal: Fatal) -> None:
        """Take a `Fatal` report."""

    async def stop(self, grace_s: float = ...) -> bool:
        """End in order, after `FrontDoorPort.shutdown`; idempotent."""

    async def kill(self) -> None:
        """End at once; idempotent."""


class FrontDoorPort(Protocol):
    """The mailboxes to and from the ranks.  Every method but `next_report` returns at once."""

    def announce(self, announce: Announce) -> None: ...

    def cancel(self, rid: int) -> None: ...

    def request_view(self, number: int) -> None: ...

    def shutdown(self, reason: str) -> None: ...

    async def next_report(self) -> ReportMessage: ...

    def close(self) -> None: ...


class Launched(Struct, frozen=True):
    """Started ranks; they are ready once `WorkerReady` was reported."""

    facts: ModelFacts
    plan: Plan
    ranks: RanksPort
    front: FrontDoorPort


Launch = Callable[[Config, str], Awaitable[Launched]]


def read_plan(config: Config) -> tuple[ModelFacts, Plan]:
    """Read the model's description and derive the plan; starts nothing.

    Raises:
        ConfigError: the model cannot be served as configured.
    """
    model = config.model
    facts = read_facts(model.path, model.dtype, model.load_format, seed=model.seed)
    return facts, derive(config, facts)


class SpreadFront(FrontDoor):
    """A front door that tells the other hosts of an orderly end before their ranks hear of it."""

    def __init__(self, run_dir: str, host: str) -> None:
        super().__init__(run_dir, host)
        self.door: HostDoor | None = None

    def shutdown(self, reason: str) -> None:
        """Ask all hosts and ranks to end in order."""
        if self.door is not None:
            self.door.end(reason, failed=False)
        super().shutdown(reason)


class SpreadRanks:
    """The ranks of several hosts: ours by their supervisor, the others' by the host door."""

    def __init__(self, ours: RankSupervisor, door: HostDoor) -> None:
        self._ours, self._door = ours, door
        self.exited = ours.exited
        self.note_fatal = ours.note_fatal
        self.exited.add_done_callback(self._on_exited)

    async def stop(self, grace_s: float = 5.0) -> bool:
        """End our ranks, then wait until the other hosts have left."""
        is_orderly = await self._ours.stop(grace_s)
        await self._door.close(grace_s)
        return is_orderly

    async def kill(self) -> None:
        """End at once; the other hosts notice.  Idempotent."""
        await self._ours.kill()
        await self._door.close(HOSTS_LEAVE_S)

    def _on_exited(self, exited: asyncio.Future[str]) -> None:
        if not exited.cancelled():
            self._door.end(f"a rank was lost: {exited.result()}", failed=True)


async def launch(facts: ModelFacts, plan: Plan, config: Config, namespace: str) -> Launched:
    """Start the processes of every rank of this host, and let other hosts run the others.

    Raises:
        ConfigError: the ranks of several hosts could not meet, or nobody could join.
    """
    count = first_host_ranks(config.cluster)
    if count < config.cluster.stages:
        return await _launch_spread(facts, plan, config, namespace, count)
    ranks = RankSupervisor(config, plan, facts, namespace)
    front: FrontDoor | None = None
    try:
        front = FrontDoor(ranks.run_dir, config.cluster.host)
        await ranks.start(front.report_address)
    except BaseException:
        await ranks.kill()
        if front is not None:
            front.close()
        raise
    return Launched(facts, plan, ranks, front)


async def _launch_spread(
    facts: ModelFacts, plan: Plan, config: Config, namespace: str, count: int
) -> Launched:
    cluster = config.cluster
    if os.environ.get("DYN_DISCOVERY_BACKEND") == "kubernetes":
        raise ConfigError(
            "cluster.first_host_stages: with Kubernetes discovery all ranks of a worker run in "
            "one pod; use etcd to spread them over hosts"
        )
    ranks = RankSupervisor(config, plan, facts, namespace, ranks=tuple(range(count)))
    front: SpreadFront | None = None
    try:
        front = SpreadFront(ranks.run_dir, cluster.host)
        welcome = Welcome(ranks.epoch, namespace, front.report_address)
        others = set(range(count, cluster.stages))
        digests = shared_digests(config, plan)
        door = front.door = HostDoor(welcome, cluster.group, digests, others, ranks.fail)
        try:
            await door.open(cluster.host, cluster.join_port)
        except OSError as error:
            where = f"{cluster.host}:{cluster.join_port}"
            raise ConfigError(f"cluster.join_port: cannot listen on {where}: {error}") from error
        await ranks.start(front.report_address)
    except BaseException:
        await ranks.kill()
        if front is not None:
            if front.door is not None:
                await front.door.close(0.0)
            front.close()
        raise
    return Launched(facts, plan, SpreadRanks(ranks, door), front)
