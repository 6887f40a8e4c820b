"""A reader's connection to one hold desk: questions out, answers in by a deadline."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

import zmq

from wavepp_worker.base.errors import PeerError, TransferError
from wavepp_worker.transfer.desk_wire import FROM_DESK, TO_DESK, DeskReply, DeskRequest

LINGER_MS = 2000  # lets a last Close leave, also on a busy machine
IDLE_PER_DESK_MAX = 8
DESKS_MAX = 256


class DeskLink:
    """One DEALER socket.  Used by one thread at a time; close it in the end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.address = address
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransferError(f"hold desk {address}: {error}") from error
        self._ask = 0

    def next_ask(self) -> int:
        """Return the number of the next question."""
        self._ask += 1
        return self._ask

    def send(self, request: DeskRequest) -> None:
        """Send a question; its answer is fetched by `receive`.

        Raises:
            TransferError: the desk takes no more messages.
        """
        try:
            self._socket.send(TO_DESK.encode(request), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TransferError(f"hold desk {self.address}: {error}") from error

    def receive(self, ask: int, deadline: float) -> DeskReply:
        """Wait for the answer to question `ask` until `deadline` (time.monotonic).

        Raises:
            TransferError: no answer in time, or nonsense.
        """
        while True:
            wait_ms = int(1000 * max(0.0, deadline - time.monotonic()))
            if not self._socket.poll(wait_ms, zmq.POLLIN):
                raise TransferError(f"hold desk {self.address} does not answer")
            try:
                reply = FROM_DESK.decode(self._socket.recv(zmq.NOBLOCK))
            except PeerError as error:
                raise TransferError(f"hold desk {self.address}: {error}") from error
            if reply.ask == ask:
                return reply

    def close(self) -> None:
        """Close the socket.  Idempotent."""
        self._socket.close()


class LinkPool:
    """Idle links by desk, so that a fetch need not connect first.  Shared by threads."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, list[DeskLink]] = OrderedDict()

    def take(self, address: str) -> DeskLink:
        """Return a link for the caller alone; `give` it back, or close it.

        Raises:
            TransferError: the address cannot be connected to.
        """
        with self._lock:
            links = self._idle.get(address)
            if links:
                return links.pop()
        return DeskLink(self._context, address)

    def give(self, link: DeskLink) -> None:
        """Take back a link whose questions were all answered."""
        surplus: list[DeskLink] = []
        with self._lock:
            links = self._idle.setdefault(link.address, [])
            self._idle.move_to_end(link.address)
            (links if len(links) < IDLE_PER_DESK_MAX else surplus).append(link)
            if len(self._idle) > DESKS_MAX:
                surplus += self._idle.popitem(last=False)[1]
        for unused in surplus:
            unused.close()

    def close(self) -> None:
        """Close every idle link.  Idempotent."""
        with self._lock:
            links = [link for links in self._idle.values() for link in links]
            self._idle.clear()
        for link in links:
            link.close()
