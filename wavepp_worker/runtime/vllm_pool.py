"""Hand-offs to stock vLLM decode workers, as the serving process sees them.

    answer ready ─▶ Assign to every stage ─▶ all Assigned ─▶ kv_transfer_params
    decode's handshakes ─▶ side channel: one payload for each stage

An answer is given only when every stage waits for decode: what vLLM is promised must come, because
its request has no deadline of its own.  One thread owns the sockets; asyncio asks it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import zmq

from wavepp_worker.base.errors import ConfigError, PeerError, TransferError, describe
from wavepp_worker.config.schema import Config
from wavepp_worker.transport.sockets import Context, Socket, open_socket, receive_all
from wavepp_worker.vllm_decode.agreement import Agreement
from wavepp_worker.vllm_decode.desk_wire import FROM_PUSH, TO_PUSH, Assign, Assigned
from wavepp_worker.vllm_decode.protocol import TransferParams, encode_params
from wavepp_worker.vllm_decode.side_channel import SideChannel
from wavepp_worker.wire.mailbox import StageHandoff

logger = logging.getLogger(__name__)

ASSIGN_S = 5.0
CLOSE_S = 5.0


@dataclass(slots=True)
class _Asked:
    """One request on its way to the stages."""

    request_id: str
    handoffs: tuple[StageHandoff, ...]
    answer: Future[str]  # the engine's id
    deadline: float
    engine_ids: dict[int, str] = field(default_factory=dict)  # by stage


class VllmPool:
    """See the module's text.

    Raises:
        ConfigError: the side channel's port cannot be bound.
    """

    def __init__(self, config: Config, agreement: Agreement) -> None:
        self._host, self._stages = config.cluster.host, config.cluster.stages
        self._block_tokens = agreement.block_tokens
        self._context: Context = zmq.Context()
        port = config.decode_pool.side_channel_port
        try:
            self._channel = SideChannel(self._context, self._host, port, {})
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"decode_pool.side_channel_port: cannot listen on {self._host}:{port}: {error}"
            ) from error
        self.port = self._channel.port
        self._asked: deque[_Asked] = deque()
        self._open: dict[int, tuple[_Asked, int]] = {}  # by ask: the request and the stage
        self._asks = itertools.count(1)
        self._desks: dict[str, Socket] = {}
        self._payloads: dict[tuple[int, int], bytes] = {}
        self._is_closing = False
        name = f"inproc://vllm-pool-{secrets.token_hex(8)}"
        self._wake = open_socket(self._context, zmq.PAIR)
        self._wake.bind(name)
        self._woken = open_socket(self._context, zmq.PAIR)
        self._woken.connect(name)
        self._thread = threading.Thread(target=self._run, name="vllm-pool", daemon=True)
        self._thread.start()

    async def hand_off(
        self, handoffs: Sequence[StageHandoff], request_id: str, tokens: int
    ) -> dict[str, Any]:
        """Return `kv_transfer_params` of a finished prompt; its stages wait for decode.

        Args:
            request_id: what decode calls the request, without vLLM's suffix.
            tokens: of the prompt.

        Raises:
            TransferError: a stage's hold has ended, or a stage does not answer.
            PeerError: hand-offs can no longer be made.
        """
        if self._is_closing:
            raise PeerError("the side channel to vLLM is closed")
        answer: Future[str] = Future()
        asked = _Asked(request_id, tuple(handoffs), answer, time.monotonic() + ASSIGN_S)
        self._asked.append(asked)
        self._wake.send(b"", zmq.DONTWAIT)
        engine_id = await asyncio.wrap_future(answer)
        blocks = -(-tokens // self._block_tokens)
        return encode_params(
            TransferParams(
                remote_block_ids=(tuple(range(blocks)),),
                remote_engine_id=engine_id,
                remote_request_id=request_id,
                remote_host=self._host,
                remote_port=self.port,
                pp_size=self._stages,
                remote_num_tokens=tokens,
                transfer_mode="push",
            )
        )

    def close(self) -> None:
        """Stop answering.  Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.send(b"", zmq.DONTWAIT)
        self._thread.join(CLOSE_S)
        self._wake.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except Exception as error:  # the thread's top: no hand-off can be made any more
            logger.exception("the side channel to vLLM failed")
            self._is_closing = True
            self._fail_all(describe(error))
        else:
            self._fail_all("the worker is shutting down")
        for socket in (*self._desks.values(), self._woken):
            socket.close()
        self._channel.close()

    def _turn(self) -> None:
        poller = zmq.Poller()
        for socket in (self._channel.socket, self._woken, *self._desks.values()):
            poller.register(socket, zmq.POLLIN)
        poller.poll(self._timeout_ms())
        receive_all(self._woken)
        while self._asked:
            self._ask(self._asked.popleft())
        for socket in self._desks.values():
            for frame in receive_all(socket):
                self._take(frame)
        now = time.monotonic()
        for number, (asked, stage) in list(self._open.items()):
            if now >= asked.deadline:
                del self._open[number]
                _fail(asked, f"stage {stage} does not answer")
        self._channel.poll(now)

    def _timeout_ms(self) -> int | None:
        deadline = min((asked.deadline for asked, _ in self._open.values()), default=None)
        if deadline is None:
            return None
        return max(0, int(1e3 * (deadline - time.monotonic())) + 1)

    def _ask(self, asked: _Asked) -> None:
        for handoff in asked.handoffs:
            number = next(self._asks)
            self._open[number] = (asked, handoff.stage)
            frame = TO_PUSH.encode(Assign(number, handoff.hold, asked.request_id))
            try:
                self._desk(handoff.control_address).send(frame, zmq.DONTWAIT)
            except zmq.ZMQError as error:
                _fail(asked, f"stage {handoff.stage} cannot be asked: {error}")

    def _desk(self, address: str) -> Socket:
        """Return the socket to a stage's desk; there are as many as stages."""
        if address not in self._desks:
            socket = open_socket(self._context, zmq.DEALER)
            socket.connect(address)
            self._desks[address] = socket
        return self._desks[address]

    def _take(self, frame: bytes) -> None:
        try:
            reply = FROM_PUSH.decode(frame)
        except PeerError as error:
            logger.warning("dropped an answer of a stage: %s", error)
            return
        asked, stage = self._open.pop(reply.ask, (None, 0))
        if asked is None:
            return
        if not isinstance(reply, Assigned):
            _fail(asked, f"stage {stage} holds the prompt no longer")
            return
        self._payloads[stage, 0] = reply.payload
        self._channel.offer(self._payloads)
        asked.engine_ids[stage] = reply.engine_id
        if len(asked.engine_ids) < self._stages or asked.answer.done():
            return
        engine_ids = set(asked.engine_ids.values())
        if len(engine_ids) == 1:
            asked.answer.set_result(engine_ids.pop())
        else:
            _fail(asked, "the stages are of different lives of the worker")

    def _fail_all(self, reason: str) -> None:
        for asked in [*self._asked, *(asked for asked, _ in self._open.values())]:
            _fail(asked, reason)


def _fail(asked: _Asked, reason: str) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(TransferError(f"no hand-off to vLLM: {reason}"))
