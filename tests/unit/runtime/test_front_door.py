"""Serving's sockets to its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from wavepp_worker.base.errors import PeerError
from wavepp_worker.runtime.boot import front_address
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.transport.sockets import Context, Socket
from wavepp_worker.wire.mailbox import (
    FRONT,
    REPORTS,
    Announce,
    Cancel,
    Gone,
    Shutdown,
    ViewRequest,
)


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[FrontDoor]:
    front = FrontDoor(str(tmp_path), "127.0.0.1")
    yield front
    front.close()


@pytest.fixture
def reports(context: Context, front: FrontDoor) -> Iterator[Socket]:
    with context.socket(zmq.PUSH) as socket:
        socket.connect(front.report_address)
        yield socket


@pytest.fixture
def leader(context: Context, front: FrontDoor, tmp_path: Path) -> Iterator[Socket]:
    with context.socket(zmq.PAIR) as socket:
        socket.connect(front_address(str(tmp_path)))
        yield socket


async def test_messages_reach_the_leader_in_order(front: FrontDoor, leader: Socket) -> None:
    announce = Announce(1, 3, b"", b"\0" * 12)
    async with asyncio.timeout(5):
        while True:  # until the leader's connection is there
            try:
                front.announce(announce)
                break
            except PeerError:
                await asyncio.sleep(0.01)
    front.cancel(1)
    front.request_view(2)
    front.shutdown("bye")
    received = [FRONT.decode(leader.recv()) for _ in range(4)]
    assert received == [announce, Cancel(1), ViewRequest(2), Shutdown("bye")]


def test_send_without_a_leader_does_not_block(front: FrontDoor) -> None:
    with pytest.raises(PeerError, match="wave0"):
        front.cancel(1)


async def test_reports_come_in_order_and_wake_the_reader(front: FrontDoor, reports: Socket) -> None:
    waiting = asyncio.ensure_future(front.next_report())
    await asyncio.sleep(0)
    assert not waiting.done()
    for rid in range(500):
        reports.send(REPORTS.encode(Gone(rid)))
    assert await asyncio.wait_for(waiting, 5) == Gone(0)
    rids = []
    async with asyncio.timeout(5):
        async for report in front:
            assert isinstance(report, Gone)
            rids.append(report.rid)
            if len(rids) == 499:
                break
    assert rids == list(range(1, 500))


async def test_cancelled_reader_loses_nothing(front: FrontDoor, reports: Socket) -> None:
    waiting = asyncio.ensure_future(front.next_report())
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    reports.send(REPORTS.encode(Gone(7)))
    assert await asyncio.wait_for(front.next_report(), 5) == Gone(7)


async def test_garbage_is_a_peer_error(front: FrontDoor, reports: Socket) -> None:
    reports.send(b"garbage")
    with pytest.raises(PeerError):
        await asyncio.wait_for(front.next_report(), 5)


def test_close_is_idempotent(front: FrontDoor) -> None:
    front.close()
    front.close()
