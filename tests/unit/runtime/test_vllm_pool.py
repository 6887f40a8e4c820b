"""Serving's part of hand-offs to vLLM, with stages that answer from a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from wavepp_worker.base.errors import ConfigError, PeerError, TransferError
from wavepp_worker.config.schema import (
    CacheConfig,
    ClusterConfig,
    Config,
    DecodePoolConfig,
    ModelConfig,
)
from wavepp_worker.runtime import vllm_pool
from wavepp_worker.runtime.vllm_pool import VllmPool
from wavepp_worker.vllm_decode.agreement import Agreement
from wavepp_worker.vllm_decode.desk_wire import FROM_PUSH, TO_PUSH, Assigned, Unknown
from wavepp_worker.vllm_decode.versions import BlockLayout
from wavepp_worker.wire.mailbox import StageHandoff

TERMS = Agreement(
    layout=BlockLayout.KEYS_TRANSPOSED,
    attention_backend="CPU_ATTN",
    kv_cache_layout="LBHNC",
    block_tokens=32,
    compatibility_hash="h",
    is_checked=True,
)


class Desk:
    """A stage that knows its holds by what it is to answer: a life, or nothing."""

    def __init__(self, context: zmq.Context[Any], stage: int, holds: dict[str, str | None]) -> None:
        self.stage, self.holds = stage, holds
        self.asked: list[tuple[str, str]] = []
        self._socket = context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def handoff(self, hold: str) -> StageHandoff:
        return StageHandoff(self.stage, (self.stage, self.stage + 1), self.address, hold)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        self._socket.close(linger=0)

    def _serve(self) -> None:
        while not self._is_closing:
            if not self._socket.poll(10):
                continue
            reader, frame = self._socket.recv_multipart()
            question = TO_PUSH.decode(frame)
            self.asked.append((question.hold, question.request_id))
            life = self.holds.get(question.hold, "silent")
            if life == "silent":
                continue
            payload = f"stage {self.stage}".encode()
            reply = Unknown(question.ask) if life is None else Assigned(question.ask, life, payload)
            self._socket.send_multipart([reader, FROM_PUSH.encode(reply)])


def make_config(port: int = 0) -> Config:
    return Config(
        model=ModelConfig(path="/models/tiny"),
        cluster=ClusterConfig(stages=2),
        cache=CacheConfig(block_tokens=64),
        decode_pool=DecodePoolConfig(kind="vllm-push", block_tokens=32, side_channel_port=port),
    )


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def desks(context: zmq.Context[Any]) -> Iterator[list[Desk]]:
    second = {"a": "life", "ended": None, "old": "another life"}
    made = [
        Desk(context, 0, dict.fromkeys(("a", "ended", "old", "silent"), "life")),
        Desk(context, 1, second),
    ]
    yield made
    for desk in made:
        desk.close()


@pytest.fixture
def pool() -> Iterator[VllmPool]:
    made = VllmPool(make_config(), TERMS)
    yield made
    made.close()


async def hand_off(pool: VllmPool, desks: list[Desk], hold: str) -> dict[str, Any]:
    return await pool.hand_off([desk.handoff(hold) for desk in desks], "request", 70)


async def test_every_stage_learns_the_name_before_decode_gets_every_key(
    pool: VllmPool, desks: list[Desk]
) -> None:
    assert await hand_off(pool, desks, "a") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[0, 1, 2]],
        "remote_engine_id": "life",
        "remote_request_id": "request",
        "remote_host": "127.0.0.1",
        "remote_port": pool.port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 2,
        "remote_num_tokens": 70,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "push",
    }
    assert [desk.asked for desk in desks] == [[("a", "request")]] * 2


async def test_the_side_channel_answers_for_each_stage_once_parameters_are_out(
    pool: VllmPool, desks: list[Desk], context: zmq.Context[Any]
) -> None:
    await hand_off(pool, desks, "a")
    for stage in range(2):
        with context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{pool.port}")
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", stage, 0)))
            assert socket.poll(5000)
            assert socket.recv_multipart()[0] == f"stage {stage}".encode()


@pytest.mark.parametrize(
    ("hold", "reason"),
    [
        ("ended", "stage 1 holds the prompt no longer"),
        ("old", "different lives of the worker"),
        ("silent", "stage 1 does not answer"),
    ],
)
async def test_without_every_stage_there_are_no_parameters(
    pool: VllmPool, desks: list[Desk], hold: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_pool, "ASSIGN_S", 0.3)
    began = time.monotonic()
    with pytest.raises(TransferError, match=reason):
        await hand_off(pool, desks, hold)
    assert time.monotonic() - began < 5.0
    assert await hand_off(pool, desks, "a"), "the next one is served"


async def test_a_closed_pool_makes_no_hand_offs(pool: VllmPool, desks: list[Desk]) -> None:
    pool.close()
    with pytest.raises(PeerError, match="closed"):
        await hand_off(pool, desks, "a")


def test_a_port_in_use_is_named(pool: VllmPool) -> None:
    with pytest.raises(ConfigError, match=r"decode_pool\.side_channel_port: cannot listen on"):
        VllmPool(make_config(pool.port), TERMS)
