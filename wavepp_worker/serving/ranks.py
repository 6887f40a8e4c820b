"""The ranks as the serving process sees them: two ports, and how to start the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from wavepp_worker.config.derive import ModelFacts, Plan, derive, refuse_states
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.supervisor import RankSupervisor
from wavepp_worker.wire.mailbox import Announce, Fatal, ReportMessage


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
    refuse_states(facts)
    return facts, derive(config, facts)


async def launch(facts: ModelFacts, plan: Plan, config: Config, namespace: str) -> Launched:
    """Start the processes of every rank."""
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
