"""ZeroMQ sockets with the house rules: bounded, never blocking, nothing lingers by default.

A queue that reaches `MAILBOX_FRAMES_MAX` is fatal for the worker: the other side stopped reading.
"""

from __future__ import annotations

import zmq

from wavepp_worker.base.errors import PeerError
from wavepp_worker.base.limits import FRAME_BYTES_MAX, MAILBOX_FRAMES_MAX

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def open_socket(context: Context, kind: int, *, linger_ms: int = 0) -> Socket:
    """Return an unconnected socket of `kind` (zmq.PAIR, zmq.PUSH, …) with our limits set."""
    socket = context.socket(kind)
    socket.sndhwm = MAILBOX_FRAMES_MAX
    socket.rcvhwm = MAILBOX_FRAMES_MAX
    socket.linger = linger_ms
    socket.maxmsgsize = FRAME_BYTES_MAX
    return socket


def bind_tcp(socket: Socket, host: str) -> str:
    """Bind to a free port of `host`; return the endpoint `tcp://host:port`."""
    port = socket.bind_to_random_port(f"tcp://{host}")
    return f"tcp://{host}:{port}"


def send_now(socket: Socket, frame: bytes, peer: str) -> None:
    """Queue `frame` without blocking.

    Raises:
        PeerError: the queue is full or nobody is connected; names `peer`.
    """
    try:
        socket.send(frame, zmq.DONTWAIT)
    except zmq.Again as error:
        raise PeerError(f"mailbox to {peer} overflowed or has no reader") from error


def receive_all(socket: Socket) -> list[bytes]:
    """Return every frame that has arrived, without blocking."""
    frames: list[bytes] = []
    while True:
        try:
            frames.append(socket.recv(zmq.DONTWAIT))
        except zmq.Again:
            return frames
