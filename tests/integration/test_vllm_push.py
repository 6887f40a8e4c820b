"""Two stages push a prompt to a peer that speaks decode's side: real ZeroMQ, memory in process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq

from tests.integration.vllm_peer import VllmPeer
from wavepp_worker.base.errors import TransferError
from wavepp_worker.vllm_decode import protocol
from wavepp_worker.vllm_decode.pack import pack_tokens
from wavepp_worker.vllm_decode.push import (
    Connect,
    Event,
    Outcome,
    PeerConnected,
    PeerLost,
    PromptStored,
    PushMachine,
    PushSettings,
    Registered,
    Release,
    Write,
    WriteEnded,
)
from wavepp_worker.vllm_decode.side_channel import MetadataQuestion, SideChannel
from wavepp_worker.vllm_decode.versions import BlockLayout

HEADS, BLOCK_TOKENS, DIMS, TOKENS, LAYERS = 2, 2, 4, 7, 4
BLOCK_BYTES = HEADS * BLOCK_TOKENS * 2 * DIMS * 4
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def peer() -> Iterator[VllmPeer]:
    made = VllmPeer("h", LAYERS, 16, BLOCK_BYTES)
    yield made
    made.close()


class Stage:
    """Drives one machine: real handshakes, WRITEs as copies between bytearrays."""

    def __init__(self, context: zmq.Context[Any], peer: VllmPeer, layers: range) -> None:
        self.machine = PushMachine(
            PushSettings(engine_id="wavepp", stages=2, hold_s=60.0, registration_s=60.0)
        )
        self._context, self._peer, self._layers = context, peer, layers
        self.blocks: dict[int, list[bytes]] = {}  # by layer, block after block
        self.released: list[Release] = []
        self._regions: tuple[int, ...] = ()

    def tell(self, event: Event) -> None:
        for command in self.machine.handle(event, time.monotonic()):
            match command:
                case Connect():
                    self.tell(self._connect(command))
                case Write(rid, _, pairs, notice):
                    for layer, region in zip(self._layers, self._regions, strict=True):
                        for ours, theirs in pairs:
                            start = theirs * BLOCK_BYTES
                            pool = self._peer.pools[region]
                            pool[start : start + BLOCK_BYTES] = self.blocks[layer][ours]
                    self._peer.notify(notice)
                    self.tell(WriteEnded(rid, True))
                case Release():
                    self.released.append(command)

    def _connect(self, command: Connect) -> Event:
        deadline = time.monotonic() + 5.0
        question = MetadataQuestion(self._context, command.host, command.port, 0, deadline)
        self._peer.serve()
        question.socket.poll(5000)
        try:
            payload = question.poll(time.monotonic())
            assert payload is not None
            metadata = protocol.decode_payload(payload, "h")
        except TransferError:
            return PeerLost(command.engine_id)
        names = [NAMES[layer] for layer in self._layers]
        self._regions = protocol.regions_of(
            metadata, names, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES
        )
        return PeerConnected(command.engine_id, metadata.num_blocks)


def params() -> dict[str, Any]:
    return protocol.encode_params(
        protocol.TransferParams(
            remote_block_ids=((0, 1, 2, 3),),
            remote_engine_id="wavepp",
            remote_request_id="cmpl-a-0",
            remote_host="127.0.0.1",
            remote_port=5700,
            pp_size=2,
            remote_num_tokens=TOKENS,
            transfer_mode="push",
        )
    )


def fill(stage: Stage, layers: range) -> None:
    for layer in layers:
        generator = torch.Generator().manual_seed(layer)
        k, v = (torch.randn(HEADS, TOKENS, DIMS, generator=generator) for _ in range(2))
        packed = pack_tokens(k, v, BLOCK_TOKENS, BlockLayout.KEYS_TRANSPOSED)
        stage.blocks[layer] = [block.numpy().tobytes() for block in packed]


@pytest.mark.parametrize("prompt_first", [False, True])
@pytest.mark.parametrize("theirs", [[9, 3, 11, 5], [6, 2]])
def test_both_stages_fill_what_decode_lacks_and_decode_counts_two(
    context: zmq.Context[Any], peer: VllmPeer, theirs: list[int], prompt_first: bool
) -> None:
    cuts = (range(2), range(2, 4))
    stages = [Stage(context, peer, layers) for layers in cuts]
    full_id = "cmpl-a-0-0123abcd"
    registration = Registered(
        protocol.decode_registration(peer.register(full_id, theirs, params()))
    )
    stored = PromptStored(1, "cmpl-a-0", (0, 1, 2, 3))
    for count, (stage, layers) in enumerate(zip(stages, cuts, strict=True), start=1):
        fill(stage, layers)
        for event in (stored, registration) if prompt_first else (registration, stored):
            stage.tell(event)
        assert peer.notices[full_id] == count
        assert stage.released == [Release(1, Outcome.WRITTEN)]
    assert peer.notices[full_id] == protocol.completions_expected(2, 1, 1)
    for layer in range(LAYERS):
        blocks = stages[layer // 2].blocks[layer][-len(theirs) :]
        expected = bytearray(16 * BLOCK_BYTES)
        for block, data in zip(theirs, blocks, strict=True):
            expected[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = data
        assert peer.pools[layer] == expected


def test_decode_of_another_hash_is_never_written_to(context: zmq.Context[Any]) -> None:
    peer = VllmPeer("another", LAYERS, 16, BLOCK_BYTES)
    try:
        stage = Stage(context, peer, range(2))
        stage.tell(PromptStored(1, "a", (0,)))
        notification = peer.register("a-0123abcd", [4], params())
        stage.tell(Registered(protocol.decode_registration(notification)))
        assert not peer.notices and not any(map(any, peer.pools))
    finally:
        peer.close()


def test_the_side_channel_answers_each_stage_and_ignores_the_rest(
    context: zmq.Context[Any], peer: VllmPeer
) -> None:
    channel = SideChannel(context, "127.0.0.1", 0, {(0, 0): b"first", (1, 0): b"second"})
    unknown = peer.ask(channel.port, 2)
    assert channel.socket.poll(5000)
    assert channel.poll(0.0) == 0
    for pp_rank, payload in enumerate((b"first", b"second")):
        socket = peer.ask(channel.port, pp_rank)
        assert channel.socket.poll(5000)
        assert channel.poll(2.5) == 1
        answer, clock = socket.recv_multipart()
        assert (answer, msgspec.msgpack.decode(clock)) == (payload, 2.5)
    assert not unknown.poll(0)
    channel.close()


def test_a_decode_that_does_not_answer_is_given_up_at_the_deadline(
    context: zmq.Context[Any],
) -> None:
    question = MetadataQuestion(context, "127.0.0.1", 1, 0, deadline=10.0)
    assert question.poll(9.9) is None
    with pytest.raises(TransferError, match="did not answer in time"):
        question.poll(10.0)
    assert question.socket.closed
