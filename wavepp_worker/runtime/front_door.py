"""The serving process's two sockets to its ranks: the front mailbox and the reports.

Lives on the serving process's asyncio loop.  Neither side waits for the other: what is sent is
queued by ZeroMQ, and reports queue there until somebody reads them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import zmq

from wavepp_worker.runtime.boot import front_address
from wavepp_worker.transport.sockets import Context, bind_tcp, open_socket, send_now
from wavepp_worker.wire.mailbox import (
    FRONT,
    REPORTS,
    Announce,
    Cancel,
    FrontMessage,
    ReportMessage,
    Shutdown,
    ViewRequest,
)


class FrontDoor:
    """Sends to WAVE0 and reads the reports of every rank.

    Args:
        run_dir: the supervisor's private run folder.
        host: address that the report socket binds to.

    Attributes:
        report_address: ZeroMQ endpoint of the report socket; goes into `Boot`.
    """

    def __init__(self, run_dir: str, host: str) -> None:
        self._context: Context = zmq.Context()
        self._front = open_socket(self._context, zmq.PAIR)
        self._front.bind(front_address(run_dir))
        self._reports = open_socket(self._context, zmq.PULL)
        self.report_address = bind_tcp(self._reports, host)

    def announce(self, announce: Announce) -> None:
        """Hand a request to the leader.  PeerError if the leader stopped reading, as below."""
        self._send(announce)

    def cancel(self, rid: int) -> None:
        """Say that nobody waits for `rid` any more; at most once per request.  [I49]"""
        self._send(Cancel(rid))

    def request_view(self, number: int) -> None:
        """Ask every rank for a `CacheView` with this number."""
        self._send(ViewRequest(number))

    def shutdown(self, reason: str) -> None:
        """Ask the ranks to end in order; the supervisor's `stop` then waits for them."""
        self._send(Shutdown(reason))

    async def next_report(self) -> ReportMessage:
        """Return the next report of any process.  One caller at a time.

        Raises:
            PeerError: a frame is not a report.
        """
        while True:
            try:
                return REPORTS.decode(self._reports.recv(zmq.DONTWAIT))
            except zmq.Again:
                await self._wait_readable()

    async def __aiter__(self) -> AsyncIterator[ReportMessage]:
        while True:
            yield await self.next_report()

    def close(self) -> None:
        """Drop both sockets.  Idempotent."""
        self._context.destroy(linger=0)

    def _send(self, message: FrontMessage) -> None:
        send_now(self._front, FRONT.encode(message), "wave0")

    async def _wait_readable(self) -> None:
        # The descriptor stays readable until the socket is read, so it is watched only here.
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        descriptor = int(self._reports.fd)
        loop.add_reader(descriptor, _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(descriptor)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
