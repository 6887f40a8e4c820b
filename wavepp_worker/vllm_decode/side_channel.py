"""vLLM's side channel over ZeroMQ: answering decode's question for our ranks, and asking decode's.

Neither waits: both are driven by their owner's poller.  vLLM asks with a REQ socket and answers
from a ROUTER, so every message has an empty frame before its content.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
import zmq

from wavepp_worker.base.errors import TransferError
from wavepp_worker.vllm_decode.protocol import (
    PAYLOAD_BYTES_MAX,
    REQUEST_FRAME_BYTES_MAX,
    decode_request,
    encode_request,
)

logger = logging.getLogger(__name__)

REQUESTS_PER_POLL = 64
Socket = zmq.Socket[bytes]


class SideChannel:
    """Serves one payload for each (pp rank, tp rank); other ranks get no answer, as in vLLM.

    Args:
        payloads: made by `protocol.encode_payload`.
        port: 0 chooses a free one.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        host: str,
        port: int,
        payloads: Mapping[tuple[int, int], bytes],
    ) -> None:
        self._payloads = dict(payloads)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_FRAME_BYTES_MAX)
        self.socket.bind(f"tcp://{host}:{port or '*'}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def offer(self, payloads: Mapping[tuple[int, int], bytes]) -> None:
        """Answer with these from now on."""
        self._payloads = dict(payloads)

    def poll(self, now: float) -> int:
        """Answer what waits; return how many questions were answered.

        Args:
            now: seconds of a monotonic clock; sent along, as vLLM does.
        """
        answered = 0
        for _ in range(REQUESTS_PER_POLL):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            answered += self._serve(frames, now)
        return answered

    def close(self) -> None:
        """Stop answering.  Idempotent."""
        self.socket.close()

    def _serve(self, frames: list[bytes], now: float) -> bool:
        if len(frames) != 3 or frames[1]:
            logger.warning("dropped a side-channel message of %d frames", len(frames))
            return False
        try:
            payload = self._payloads.get(decode_request(frames[2]))
        except TransferError as error:
            logger.warning("dropped a side-channel message: %s", error)
            return False
        if payload is None:
            logger.warning("decode asked for a rank that there is not")
            return False
        reply = [frames[0], b"", payload, msgspec.msgpack.encode(now)]
        try:
            self.socket.send_multipart(reply, zmq.NOBLOCK)
        except zmq.ZMQError as error:  # decode is gone; its handshake ends by its own timeout
            logger.warning("could not answer a handshake: %s", error)
            return False
        return True


class MetadataQuestion:
    """One question to decode's side channel; `poll` until the payload is there or time is up.

    Args:
        deadline: seconds, on the clock that `poll` is given.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        host: str,
        port: int,
        tp_rank: int,
        deadline: float,
    ) -> None:
        self._deadline = deadline
        self._address = f"tcp://{host}:{port}"
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        try:
            self.socket.connect(self._address)
            self.socket.send_multipart([b"", encode_request(0, tp_rank)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.socket.close()
            raise TransferError(f"cannot ask decode at {self._address}: {error}") from error

    def poll(self, now: float) -> bytes | None:
        """Return the payload, or None while it has not come; then close.

        Raises:
            TransferError: the deadline has come, or the answer is not one.
        """
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if now < self._deadline:
                return None
            self.close()
            raise TransferError(f"decode at {self._address} did not answer in time") from None
        self.close()
        if len(frames) != 3 or frames[0]:
            raise TransferError(f"decode at {self._address} answered {len(frames)} frames")
        return frames[1]

    def close(self) -> None:
        """Give up the question.  Idempotent."""
        self.socket.close()
