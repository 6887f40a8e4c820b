"""The driver on a scripted NIXL and clock: when slots come back, whatever the writes do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq

from wavepp_worker.vllm_decode.agreement import Agreement, region_name
from wavepp_worker.vllm_decode.desk_wire import FROM_PUSH, TO_PUSH, Assign, Assigned
from wavepp_worker.vllm_decode.driver import PushDriver, PushStage
from wavepp_worker.vllm_decode.protocol import AgentMetadata, encode_payload
from wavepp_worker.vllm_decode.push import PushSettings
from wavepp_worker.vllm_decode.staging import Staging
from wavepp_worker.vllm_decode.versions import BlockLayout

B = 2
TERMS = Agreement(
    layout=BlockLayout.KEYS_TRANSPOSED,
    attention_backend="CPU_ATTN",
    kv_cache_layout="LBHNC",
    block_tokens=B,
    compatibility_hash="h",
    is_checked=True,
)


class nixlBackendError(Exception):
    """Named as NIXL names its own."""


class Transfer:
    def __init__(self, agent: ScriptedAgent, rows: list[int], notice: bytes) -> None:
        self._agent, self.rows, self.notice = agent, rows, notice
        self.is_released = False

    def release(self) -> None:
        if not self._agent.can_release:
            raise nixlBackendError("cannot be cancelled")
        self.is_released = True


class ScriptedAgent:
    metadata = b"ours"

    def __init__(self) -> None:
        self.notices: dict[str, list[bytes]] = {}
        self.posted: list[Transfer] = []
        self.told: list[bytes] = []
        self.forgotten: list[str] = []
        self.state: bool | Exception = False
        self.can_release = True

    def load_peer(self, metadata: bytes) -> str:
        return metadata.decode()

    def forget_peer(self, name: str) -> None:
        self.forgotten.append(name)

    def local_rows(self, *layout: int) -> Any:
        return layout

    def peer_regions(self, name: str, memory: str, regions: Any) -> Any:
        return name

    def make_write(
        self, local: Any, local_rows: Any, remote: Any, remote_rows: Any, notice: bytes
    ) -> Transfer:
        return Transfer(self, list(map(int, remote_rows)), notice)

    def post(self, transfer: Transfer) -> bool:
        self.posted.append(transfer)
        return False

    def is_done(self, transfer: Transfer) -> bool:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def notify(self, name: str, notice: bytes) -> None:
        self.told.append(notice)

    def take_notices(self) -> dict[str, list[bytes]]:
        taken, self.notices = self.notices, {}
        return taken

    def close(self) -> None: ...


class Bench:
    """A stage of two layers with room for two blocks, and decode's side channel."""

    def __init__(self) -> None:
        self.now = 0.0
        self.agent = ScriptedAgent()
        self.context: zmq.Context[Any] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.staging = Staging(torch.randn(8, 2, 2, 1, B, 4), TERMS.layout, B, 2)
        settings = PushSettings(engine_id="life", stages=1, hold_s=10.0, registration_s=5.0)
        stage = PushStage(layers=range(2), agreement=TERMS, settings=settings, host="127.0.0.1")
        self.driver = PushDriver(stage, self.agent, self.staging, self.context, lambda: self.now)
        self.serving = self.context.socket(zmq.DEALER)
        self.serving.connect(self.driver.address)

    def turn(self) -> list[int]:
        ended = self.driver.turn()
        self.driver.check_invariants()
        return ended

    def store(self, rid: int, name: str, tokens: int = 6) -> None:
        self.driver.offer(rid, f"hold {rid}", list(range(3)), tokens, self.now)
        self.serving.send(TO_PUSH.encode(Assign(rid, f"hold {rid}", name)))
        assert self.driver.socket.poll(5000)
        assert self.turn() == []
        assert self.serving.poll(5000)
        assert isinstance(FROM_PUSH.decode(self.serving.recv()), Assigned)

    def register(self, name: str, blocks: list[int], sender: str = "agent") -> None:
        registration = {
            "request_id": f"{name}-0123abcd",
            "decode_engine_id": "decode",
            "decode_host": "127.0.0.1",
            "decode_port": self.port,
            "decode_tp_size": 1,
            "local_block_ids": [blocks],
            "remote_engine_id": "life",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_tp_size": 1,
            "remote_pp_size": 1,
        }
        self.agent.notices = {sender: [b"PUSH_REG:" + msgspec.msgpack.encode(registration)]}

    def answer_handshake(self, agent: str = "agent") -> None:
        """Let the driver ask, and decode answer."""
        assert self.turn() == []
        assert self.router.poll(5000)
        identity, _, _ = self.router.recv_multipart()
        metadata = AgentMetadata(
            engine_id="decode",
            agent_metadata=agent.encode(),
            kv_caches_base_addr=(0, 1000),
            device_id=0,
            num_blocks=16,
            block_lens=(self.staging.layer_bytes,) * 2,
            block_strides=(self.staging.layer_bytes,) * 2,
            kv_cache_layout="LBHNC",
            block_size=B,
            attn_backend_name="CPU_ATTN",
            region_names=tuple(map(region_name, range(2))),
        )
        self.router.send_multipart([identity, b"", encode_payload(metadata, "h"), b"\0"])
        (question,) = self.driver.sockets()[1:]
        assert question.poll(5000)

    def stat(self, name: str) -> float:
        return self.driver.stats()[name]

    def close(self) -> None:
        self.driver.close()
        for socket in (self.serving, self.router):
            socket.close(linger=0)
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def begin(bench: Bench) -> None:
    bench.store(1, "a")
    bench.register("a", [7, 4, 9])
    bench.answer_handshake()
    assert bench.turn() == []


def test_a_long_prompt_goes_in_pieces_and_the_last_one_tells_decode(bench: Bench) -> None:
    begin(bench)
    assert [transfer.rows for transfer in bench.agent.posted] == [[7, 23]]  # one of two slots
    bench.agent.state = True
    ended = [rid for _ in range(4) for rid in bench.turn()]
    assert [transfer.rows for transfer in bench.agent.posted] == [[7, 23], [4, 20], [9, 25]]
    assert [transfer.notice for transfer in bench.agent.posted] == [b"", b"", b"a-0123abcd:1"]
    assert all(transfer.is_released for transfer in bench.agent.posted)
    assert ended == [1]
    assert bench.stat("wavepp_push_bytes_total") == 3 * 2 * bench.staging.layer_bytes


def test_slots_stay_held_while_nixl_cannot_let_go(bench: Bench) -> None:
    begin(bench)
    bench.agent.can_release = False
    bench.now = 5.0  # decode's blocks are trusted no longer
    for _ in range(3):
        assert bench.turn() == []
    assert len(bench.agent.posted) == 1, "nothing is begun any more"
    bench.agent.can_release = True
    assert bench.turn() == [1]
    assert bench.stat('wavepp_push_requests_total{outcome="expired"}') == 1


def test_a_cancelled_write_is_released_and_tells_nothing(bench: Bench) -> None:
    begin(bench)
    bench.driver.withdraw(1)
    assert bench.turn() == [1]
    assert bench.agent.posted[0].is_released
    assert [transfer.notice for transfer in bench.agent.posted] == [b""]


def test_a_failed_write_costs_its_prompt_and_connects_anew(bench: Bench) -> None:
    begin(bench)
    bench.agent.state = nixlBackendError("remote disconnected")
    assert bench.turn() == [1]
    assert bench.agent.forgotten == ["agent"]
    assert bench.stat("wavepp_push_write_errors_total") == 1
    bench.agent.state = True
    bench.store(2, "b", tokens=2)
    bench.register("b", [3])
    bench.answer_handshake()
    assert [rid for _ in range(2) for rid in bench.turn()] == [2]


def test_packing_past_the_deadline_posts_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack_slowly(*_: object) -> None:
        bench.now = 5.0

    monkeypatch.setattr(bench.staging, "pack", pack_slowly)
    bench.store(1, "a")
    bench.register("a", [7, 4, 9])
    bench.answer_handshake()
    assert bench.turn() == [1]
    assert bench.agent.posted == []


def test_a_side_channel_of_another_agent_is_not_written_to(bench: Bench) -> None:
    bench.store(1, "a")
    bench.register("a", [7], sender="agent")
    bench.answer_handshake(agent="stranger")
    bench.turn()
    assert bench.agent.forgotten == ["stranger"]
    assert bench.stat('wavepp_push_handshakes_failed_total{cause="refused"}') == 1
    assert bench.agent.posted == []


def test_a_full_prefix_hit_is_told_without_data(bench: Bench) -> None:
    bench.store(1, "a")
    bench.register("a", [])
    bench.answer_handshake()
    assert bench.turn() == [1]
    assert (bench.agent.posted, bench.agent.told) == ([], [b"a-0123abcd:1"])


def test_offers_that_nobody_names_end_at_their_deadline(bench: Bench) -> None:
    bench.driver.offer(1, "hold", [0], 2, bench.now)
    assert bench.turn() == []
    bench.now = 10.0
    assert bench.turn() == [1]
    bench.driver.offer(2, "other", [0], 2, bench.now)
    bench.driver.withdraw(2)
    assert bench.turn() == [2]
