"""The other side of `HostDoor`: joins a worker from another host and runs some of its ranks."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from wavepp_worker.base.errors import ConfigError, PeerError
from wavepp_worker.config.derive import ModelFacts, Plan
from wavepp_worker.config.schema import Config
from wavepp_worker.runtime.host_line import BEAT_S, SILENCE_S, HostLine, shared_digests
from wavepp_worker.runtime.supervisor import RankSupervisor
from wavepp_worker.wire.hosts import (
    LINE_BYTES_MAX,
    REASON_CHARS_MAX,
    Beat,
    End,
    Join,
    Lost,
    Refused,
    Welcome,
)

logger = logging.getLogger(__name__)

AGAIN_S = 0.5  # between attempts to reach a first host that does not listen yet
FAREWELL_S = 1.0  # for the first host to answer that we leave


async def join_line(config: Config, leader: tuple[str, int]) -> HostLine:
    """Connect to the first host, from `cluster.host`; wait for it as long as a start may take.

    Raises:
        PeerError: nobody listened within `cluster.start_timeout_s`.
    """
    host, port = leader
    try:
        async with asyncio.timeout(config.cluster.start_timeout_s):
            while True:
                try:
                    reader, writer = await asyncio.open_connection(
                        host, port, limit=LINE_BYTES_MAX, local_addr=(config.cluster.host, 0)
                    )
                    return HostLine(reader, writer)
                except OSError as error:
                    logger.debug("no first host yet: %s", error)
                    await asyncio.sleep(AGAIN_S)
    except TimeoutError:
        waited = f"{config.cluster.start_timeout_s:g} s (cluster.start_timeout_s)"
        raise PeerError(f"no first host at {host}:{port} within {waited}") from None


async def run_host(
    config: Config,
    plan: Plan,
    facts: ModelFacts,
    ranks: tuple[int, ...],
    *,
    leader: tuple[str, int],
    epoch: int = 0,
) -> None:
    """Run `ranks` until the worker ends in order, or SIGINT or SIGTERM comes.

    Args:
        leader: address and port (cluster.join_port) of the first host.
        epoch: the only life of the worker to join; 0: whichever runs.

    Raises:
        ConfigError: the first host refuses us.
        PeerError: the worker failed, here or elsewhere.
    """
    line = await join_line(config, leader)
    name = f"the first host {leader[0]}:{leader[1]}"
    try:
        digests = shared_digests(config, plan)
        line.send(Join(config.cluster.group, epoch, ranks, config.cluster.host, digests))
        answer = await line.receive()
        if isinstance(answer, Refused):
            raise ConfigError(f"{name} refuses: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise PeerError(f"{name} gave no answer")
        supervisor = RankSupervisor(
            config, plan, facts, answer.namespace, ranks=ranks, epoch=answer.epoch
        )
        try:
            await _stay(supervisor, answer, line, name)
        finally:
            await supervisor.kill()
    finally:
        line.close()


async def _stay(supervisor: RankSupervisor, welcome: Welcome, line: HostLine, name: str) -> None:
    loop = asyncio.get_running_loop()
    asked: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _ask, asked, number.name)
    await supervisor.start(welcome.report_address)
    beats = loop.create_task(_beat(line))
    end = loop.create_task(_await_end(line, name))
    try:
        waits: list[asyncio.Future[Any]] = [end, supervisor.exited, asked]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not end.done():
            reason = (
                f"it was asked to stop ({asked.result()})"
                if asked.done()
                else (supervisor.exited.result())
            )
            line.send(Lost(reason[:REASON_CHARS_MAX]))
            await line.flush()
            if asked.done():
                logger.info("stopping: %s", reason)
                await asyncio.wait([end], timeout=FAREWELL_S)
                return
            raise PeerError(reason)
        message = end.result()
        if message.failed:
            raise PeerError(f"{name} ended the worker: {message.reason}")
        logger.info("the worker ends: %s", message.reason)
        await supervisor.stop()
    finally:
        beats.cancel()
        end.cancel()


async def _await_end(line: HostLine, name: str) -> End:
    while True:
        try:
            message = await line.receive(SILENCE_S)
        except PeerError as error:
            raise PeerError(f"{name} was lost: {error}") from error
        if isinstance(message, End):
            return message


async def _beat(line: HostLine) -> None:
    while True:
        line.send(Beat())
        await asyncio.sleep(BEAT_S)


def _ask(asked: asyncio.Future[str], name: str) -> None:
    if not asked.done():
        asked.set_result(name)
