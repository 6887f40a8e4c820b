"""The rounds plane over ZeroMQ: one ROUTER on the leader, one DEALER per follower, TCP.

A follower names itself by its routing id `epoch:rank` and joins with an empty frame, so that the
leader knows when it can reach everybody, and strangers and earlier lives are refused.  A lost
connection is noticed by the follower's socket monitor at once, and by the leader with its next
frame (ROUTER_MANDATORY), which heartbeats make at most T_quiet later.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Set

import zmq

from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.types import LEADER
from wavepp_worker.transport.rounds_base import FLUSH_S
from wavepp_worker.transport.sockets import Context, bind_tcp, open_socket, receive_all

logger = logging.getLogger(__name__)

JOIN = b""


class ZmqLeaderRounds:
    """The leader's end.  Bind first, publish `address`, wait until nobody is `missing`."""

    def __init__(self, context: Context, host: str, ranks: int, epoch: int) -> None:
        self._socket = open_socket(context, zmq.ROUTER, linger_ms=int(FLUSH_S * 1000))
        self._socket.router_mandatory = True
        self.address = bind_tcp(self._socket, host)
        self._rank_of = {_routing_id(epoch, rank): rank for rank in range(1, ranks)}
        self._routing_id_of = {rank: identity for identity, rank in self._rank_of.items()}
        self._missing = set(self._routing_id_of)

    def missing(self) -> Set[int]:
        return self._missing

    def send(self, rank: int, frame: bytes) -> None:
        check(rank in self._routing_id_of, "not a follower", rank=rank)
        try:
            self._socket.send_multipart((self._routing_id_of[rank], frame), zmq.DONTWAIT)
        except zmq.Again as error:
            raise PeerError(f"rounds queue to rank {rank} overflowed") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerError(f"rank {rank} closed its rounds link") from error

    def receive(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return frames
            rank = self._rank_of.get(parts[0])
            if rank is None or len(parts) != 2:
                logger.warning("rounds frame of a stranger refused: routing_id=%r", parts[0])
            elif rank not in self._missing:
                frames.append((rank, parts[1]))
            elif parts[1] == JOIN:
                self._missing.discard(rank)

    def fileno(self) -> int:
        return int(self._socket.fd)

    def close(self) -> None:
        self._socket.close()


class ZmqFollowerRounds:
    """A follower's end; joins the leader at `address`."""

    def __init__(self, context: Context, address: str, rank: int, epoch: int) -> None:
        check(rank != LEADER, "the leader does not follow", rank=rank)
        self._socket = open_socket(context, zmq.DEALER, linger_ms=int(FLUSH_S * 1000))
        self._socket.routing_id = _routing_id(epoch, rank)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_lost = False
        self._epoll = select.epoll()
        self._epoll.register(int(self._socket.fd), select.EPOLLIN)
        self._epoll.register(int(self._monitor.fd), select.EPOLLIN)
        self._socket.connect(address)
        self.send(LEADER, JOIN)

    def missing(self) -> Set[int]:
        return frozenset()

    def send(self, rank: int, frame: bytes) -> None:
        check(rank == LEADER, "a follower reaches only the leader", rank=rank)
        if self._is_lost:
            raise PeerError("the leader closed its rounds link")
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again as error:
            raise PeerError("rounds queue to the leader overflowed") from error

    def receive(self) -> list[tuple[int, bytes]]:
        # The monitor is read before the frames: what came ahead of the loss is then in the queue.
        self._is_lost = self._is_lost or bool(receive_all(self._monitor))
        frames = [(int(LEADER), frame) for frame in receive_all(self._socket)]
        if self._is_lost and not frames:
            raise PeerError("the leader closed its rounds link")
        return frames

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()


def _routing_id(epoch: int, rank: int) -> bytes:
    return b"%d:%d" % (epoch, rank)
