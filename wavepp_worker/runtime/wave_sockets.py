"""The mailboxes of one WAVE process: reports to serving, this rank's LOOP, rank 0's front door."""

from __future__ import annotations

import time
from typing import TypeVar

import zmq

from wavepp_worker.base.errors import PeerError
from wavepp_worker.base.types import LEADER, Rank
from wavepp_worker.runtime.boot import Boot, front_address, loop_address
from wavepp_worker.transport.sockets import Context, open_socket, receive_all, send_now
from wavepp_worker.wire.mailbox import (
    FROM_LOOP,
    FRONT,
    REPORTS,
    TO_LOOP,
    FrontMessage,
    LoopInbound,
    LoopOutbound,
    ReportMessage,
)

M = TypeVar("M")

LAST_WORDS_MS = 1000  # how long the last messages may take to leave at exit


class WaveSockets:
    """Sends at once or raises PeerError; receives what is there.

    Attributes:
        context: for the rounds link, which shares its I/O thread.
    """

    def __init__(self, boot: Boot, rank: Rank) -> None:
        self._rank = rank
        self.context: Context = zmq.Context()
        self._reports = open_socket(self.context, zmq.PUSH, linger_ms=LAST_WORDS_MS)
        self._reports.connect(boot.report_address)
        self._loop = open_socket(self.context, zmq.PAIR, linger_ms=LAST_WORDS_MS)
        self._loop.bind(loop_address(boot.run_dir, rank))
        self._front = open_socket(self.context, zmq.PAIR) if rank == LEADER else None
        if self._front is not None:
            self._front.connect(front_address(boot.run_dir))

    def report(self, message: ReportMessage) -> None:
        """Send a report to the serving process."""
        send_now(self._reports, REPORTS.encode(message), "serving")

    def send_loop(self, message: LoopInbound) -> None:
        """Send to this rank's LOOP."""
        send_now(self._loop, TO_LOOP.encode(message), f"loop{self._rank}")

    def await_loop(self, kind: type[M], deadline: float) -> M:
        """Return LOOP's next message, which must be a `kind` and come before `deadline`.

        Args:
            deadline: seconds on the monotonic clock.
        """
        remaining_s = max(0.0, deadline - time.monotonic())
        if not self._loop.poll(int(remaining_s * 1000)):
            raise PeerError(f"loop{self._rank} sent no {kind.__name__} in time")
        message = FROM_LOOP.decode(self._loop.recv(zmq.DONTWAIT))
        if not isinstance(message, kind):
            raise PeerError(f"loop{self._rank} sent {message} instead of {kind.__name__}")
        return message

    def receive_loop(self) -> list[LoopOutbound]:
        """Return what LOOP has sent."""
        return [FROM_LOOP.decode(frame) for frame in receive_all(self._loop)]

    def receive_front(self) -> list[FrontMessage]:
        """Return what serving has sent; nothing on followers."""
        if self._front is None:
            return []
        return [FRONT.decode(frame) for frame in receive_all(self._front)]

    def descriptors(self) -> list[int]:
        """Return what turns readable when something may have arrived; see `RoundsLink.fileno`."""
        sockets = [self._loop] if self._front is None else [self._loop, self._front]
        return [int(socket.fd) for socket in sockets]

    def close(self) -> None:
        """Flush what was sent, for `LAST_WORDS_MS` at most."""
        self.context.destroy(linger=LAST_WORDS_MS)
