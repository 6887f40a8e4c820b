"""Real stages push prompts into a peer that speaks vLLM's side: processes, ZeroMQ and NIXL.

What arrives is compared with the keys and values of transformers on the same weights.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import zmq
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integration.test_loop_process import LAYERS, SEED, Worker, prompt
from tests.integration.vllm_peer import SENTINEL, PeerProcess, VllmPeer
from wavepp_worker.base.errors import TransferError
from wavepp_worker.config.schema import Config
from wavepp_worker.model.load import DummySource
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime.vllm_pool import VllmPool
from wavepp_worker.vllm_decode.agreement import agree
from wavepp_worker.vllm_decode.side_channel import MetadataQuestion, SideChannel

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(170)]
HEADS, DIMS = 2, 16
THEIRS = 32  # tokens of a decode block
OURS = 64  # two of them
WAIT_S = 15.0
SUFFIX = "-0123abcd"


class Prefill:
    """All stages of a worker and serving's part of the hand-off."""

    def __init__(self, folder: Any, stages: int, **pool: Any) -> None:
        transfer = {"hold_s": pool.pop("hold_s", 30.0)}
        overrides: dict[str, object] = {
            "cache": {"block_tokens": OURS, "device_tokens": 64 * OURS},
            "planner": {"wave_tokens_max": OURS},
            "decode_pool": {"kind": "vllm-push", "block_tokens": THEIRS, **pool},
            "transfer": transfer,
        }
        self.worker = Worker(folder, stages, overrides)
        self.stages = stages
        tree = {
            "model": {"path": str(self.worker.model), "load_format": "dummy", "seed": SEED},
            "cluster": {"stages": stages},
            **overrides,
        }
        config = msgspec.convert(tree, Config)
        facts = read_facts(self.worker.model, load_format="dummy", seed=SEED)
        self.agreement = agree(config, facts)
        self.pool = VllmPool(config, self.agreement)
        self._rid = 0
        self._slot = 0

    def compute(self, tokens: list[int], blocks: list[int] | None = None) -> int:
        """Run a prompt through the stages; return its rid.  Its slots are not reused."""
        self._rid += 1
        if blocks is None:
            count = -(-len(tokens) // OURS)
            blocks = [(self._slot + at) * 5 % 61 for at in range(count)]  # scattered
            self._slot += count
        self.worker.install(self._rid, tokens, blocks)
        rid = self._rid
        self.worker.await_("the prompt", lambda: self.worker.is_complete(rid))
        return rid

    def hand_off(self, rid: int, request_id: str, tokens: int) -> dict[str, Any]:
        ready = self.worker.ready[rid]
        handoffs = [ready[stage].handoff for stage in range(self.stages)]
        return asyncio.run(self.pool.hand_off(handoffs, request_id, tokens))

    def await_freed(self, *rids: int) -> None:
        self.worker.await_("the end", lambda: all(map(self.worker.is_freed, rids)), WAIT_S)

    def stat(self, stage: int, name: str) -> float:
        self.worker.take()
        return self.worker.stats.get(stage, {}).get(name, 0.0)

    def await_stat(self, stage: int, name: str, wanted: float) -> None:
        self.worker.await_(name, lambda: self.stat(stage, name) == wanted, WAIT_S)

    def peer_shape(self, **changes: Any) -> dict[str, Any]:
        shape = {"layers": LAYERS, "heads": HEADS, "block_tokens": THEIRS, "dims": DIMS}
        return {"compatibility_hash": self.agreement.compatibility_hash, **shape, **changes}

    def close(self) -> None:
        self.pool.close()
        self.worker.close()


@pytest.fixture(scope="module", params=[1, 2])
def any_prefill(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefill]:
    made = Prefill(tmp_path_factory.mktemp("stages"), request.param, staging_tokens=3 * THEIRS)
    made.worker.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefill]:
    """Two stages whose deadlines are short; for faults that they outlive."""
    folder = tmp_path_factory.mktemp("faults")
    made = Prefill(folder, 2, staging_tokens=3 * THEIRS, hold_s=3.0, registration_s=2.0)
    made.worker.start()
    yield made
    made.close()


@pytest.fixture
def peers() -> Iterator[list[VllmPeer]]:
    made: list[VllmPeer] = []
    yield made
    for peer in made:
        peer.close()


def open_peer(peers: list[VllmPeer], prefill: Prefill, **changes: Any) -> VllmPeer:
    peers.append(VllmPeer(**prefill.peer_shape(**changes)))
    return peers[-1]


def reference(prefill: Prefill, tokens: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return transformers' keys and values of each layer: [heads, tokens, dims]."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(prefill.worker.model)).eval()
    source = DummySource(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.get(name, tuple(parameter.shape)))
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def check_blocks(peer: VllmPeer, prefill: Prefill, tokens: list[int], blocks: list[int]) -> None:
    """The peer's blocks hold the tail of the prompt, and zeros after it."""
    skipped = -(-len(tokens) // THEIRS) - len(blocks)
    for layer, pair in enumerate(reference(prefill, tokens)):
        for at, block in enumerate(blocks, start=skipped):
            for got, wanted in zip(peer.keys_values(layer, block), pair, strict=True):
                rows = wanted[:, at * THEIRS : (at + 1) * THEIRS]
                used = rows.shape[1]
                torch.testing.assert_close(got[:, :used], rows, atol=1e-4, rtol=1e-3)
                assert torch.count_nonzero(got[:, used:]) == 0


def check_untouched(peer: VllmPeer, written: list[int]) -> None:
    others = [block for block in range(peer.pool.shape[1]) if block not in written]
    assert bool((peer.pool[:, others] == SENTINEL).all())


@pytest.mark.parametrize(
    ("length", "blocks"),
    [
        (1, [9]),
        (150, [9, 3, 11, 5, 6]),  # more than the staging area holds
        (128, [21, 22, 2, 4]),  # a multiple of both block sizes
        (150, [7, 30]),  # decode has the first three blocks
        (100, []),  # decode has all of it
    ],
)
def test_decode_gets_the_keys_and_values_of_transformers(
    any_prefill: Prefill, peers: list[VllmPeer], length: int, blocks: list[int]
) -> None:
    peer = open_peer(peers, any_prefill)
    tokens, name = prompt(length, length), f"cmpl-{length}-{len(blocks)}"
    rid = any_prefill.compute(tokens)
    params = any_prefill.hand_off(rid, name, length)
    assert params["pp_size"] == any_prefill.stages
    peer.register(name + SUFFIX, blocks, params)
    assert peer.is_filled(name + SUFFIX, any_prefill.stages, WAIT_S)
    check_blocks(peer, any_prefill, tokens, blocks)
    check_untouched(peer, blocks)
    any_prefill.await_freed(rid)


def test_slots_that_another_prompt_used_before_arrive_clean(
    any_prefill: Prefill, peers: list[VllmPeer]
) -> None:
    peer = open_peer(peers, any_prefill)
    for length, blocks in ((60, [1, 2]), (40, [3, 4])):
        tokens, name = prompt(length, length), f"again-{length}"
        rid = any_prefill.compute(tokens, [63])
        peer.register(name + SUFFIX, blocks, any_prefill.hand_off(rid, name, length))
        assert peer.is_filled(name + SUFFIX, any_prefill.stages, WAIT_S)
        any_prefill.await_freed(rid)
        check_blocks(peer, any_prefill, tokens, blocks)


def test_prompts_and_decode_engines_do_not_mix(any_prefill: Prefill, peers: list[VllmPeer]) -> None:
    engines = [open_peer(peers, any_prefill, engine_id=f"engine-{n}") for n in range(2)]
    begun = []
    for number in range(6):
        tokens = prompt(90 + number, 40 + number)
        rid, name = any_prefill.compute(tokens), f"many-{number}"
        begun.append((rid, name, tokens, any_prefill.hand_off(rid, name, len(tokens))))
    blocks = {n: [1 + 5 * (n // 2), 3 + 5 * (n // 2), 2 + 5 * (n // 2)] for n in range(6)}
    for number, (_, name, tokens, params) in enumerate(begun):
        count = -(-len(tokens) // THEIRS)
        assert count == 3
        engines[number % 2].register(name + SUFFIX, blocks[number], params)
    for number, (_, name, tokens, _) in enumerate(begun):
        engine = engines[number % 2]
        assert engine.is_filled(name + SUFFIX, any_prefill.stages, WAIT_S)
        check_blocks(engine, any_prefill, tokens, blocks[number])
    any_prefill.await_freed(*(rid for rid, *_ in begun))


# ── faults that the stages outlive ───────────────────────────────────────────────────────────


def push_one(prefill: Prefill, peer: VllmPeer, name: str, *, is_filled: bool = True) -> int:
    """Hand a prompt to the peer; return its rid."""
    rid = prefill.compute(prompt(70, 7))
    peer.register(name + SUFFIX, [4, 5, 6], prefill.hand_off(rid, name, 70))
    if is_filled:
        assert peer.is_filled(name + SUFFIX, 2, WAIT_S)
        check_blocks(peer, prefill, prompt(70, 7), [4, 5, 6])
    return rid


def test_a_prompt_that_nobody_asks_for_is_freed_at_its_deadline(prefill: Prefill) -> None:
    expired = 'wavepp_push_requests_total{outcome="expired"}'
    before = prefill.stat(0, expired)
    rid = prefill.compute(prompt(70, 1))
    prefill.hand_off(rid, "nobody", 70)
    began = time.monotonic()
    prefill.await_freed(rid)
    assert time.monotonic() - began < 6.0
    prefill.await_stat(0, expired, before + 1)
    prefill.await_stat(1, "wavepp_push_holds", 0)


def test_a_hold_that_ended_gives_no_parameters(prefill: Prefill) -> None:
    rid = prefill.compute(prompt(70, 2))
    prefill.await_freed(rid)  # nobody handed it out
    with pytest.raises(TransferError, match="holds the prompt no longer"):
        prefill.hand_off(rid, "late", 70)


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("incompatible", {}),
        ("layout", {"changes": {"block_size": 64}}),
        ("layout", {"changes": {"attn_backend_name": "FLASH_ATTN"}}),
        ("layout", {"changes": {"region_names": [f"other.{n}" for n in range(LAYERS)]}}),
        ("incompatible", {"changes": {"engine_id": "another"}}),
        ("refused", {"changes": {"agent_metadata": b"nonsense"}}),
    ],
)
def test_a_decode_that_does_not_fit_is_never_written_to(
    prefill: Prefill, peers: list[VllmPeer], cause: str, changes: dict[str, Any]
) -> None:
    failed = f'wavepp_push_handshakes_failed_total{{cause="{cause}"}}'
    before = [prefill.stat(stage, failed) for stage in range(2)]
    peer = open_peer(peers, prefill, engine_id=f"bad-{time.monotonic()}", **changes)
    if not changes:  # its own answer is of another vLLM; it takes ours
        peer._payload = peer._payload.replace(peer.hash.encode(), b"0" * len(peer.hash))
    rid = push_one(prefill, peer, f"bad-{time.monotonic()}", is_filled=False)
    for stage in range(2):
        prefill.await_stat(stage, failed, before[stage] + 1)
    prefill.await_freed(rid)
    check_untouched(peer, [])
    assert not peer.notices


def test_a_decode_that_answers_no_handshake_is_given_up(
    prefill: Prefill, peers: list[VllmPeer]
) -> None:
    peer = open_peer(peers, prefill, engine_id="silent", is_silent=True)
    rid = push_one(prefill, peer, "silent", is_filled=False)
    prefill.await_freed(rid)
    for stage in range(2):
        failed = 'wavepp_push_handshakes_failed_total{cause="unreachable"}'
        prefill.await_stat(stage, failed, 1)
    check_untouched(peer, [])


def test_a_decode_restarted_under_its_name_is_served_at_once(
    prefill: Prefill, peers: list[VllmPeer]
) -> None:
    first = open_peer(peers, prefill, engine_id="phoenix")
    done = [push_one(prefill, first, "before")]
    second = open_peer(peers, prefill, engine_id="phoenix")
    done.append(push_one(prefill, second, "after"))
    prefill.await_freed(*done)


def test_a_decode_killed_while_it_is_written_to_costs_its_own_requests_alone(
    prefill: Prefill, peers: list[VllmPeer]
) -> None:
    shape = prefill.peer_shape(engine_id="mortal")
    with PeerProcess(shape.pop("compatibility_hash"), **shape) as mortal:
        rid = prefill.compute(prompt(150, 8))
        params = prefill.hand_off(rid, "mortal", 150)
        mortal.ask("register", "warm" + SUFFIX, [1], params)  # connects both stages
        for stage in range(2):
            prefill.worker.await_(
                "a registration",
                lambda s=stage: prefill.stat(s, "wavepp_push_registrations_total") > 0,
            )
        mortal.ask("register", "mortal" + SUFFIX, [1, 2, 3, 4, 5], params)
        mortal.process.send_signal(signal.SIGKILL)
    prefill.await_freed(rid)
    other = open_peer(peers, prefill, engine_id="survivor")
    prefill.await_freed(push_one(prefill, other, "survivor"))
    for stage in range(2):
        prefill.await_stat(stage, "wavepp_push_holds", 0)
        prefill.await_stat(stage, "wavepp_push_writes", 0)


# ── faults of the stages ─────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_stage_that_dies_leaves_decode_without_its_notice(
    tmp_path: Any, peers: list[VllmPeer]
) -> None:
    prefill = Prefill(tmp_path, 2, staging_tokens=THEIRS)
    try:
        prefill.worker.start()
        peer = open_peer(peers, prefill)
        tokens = prompt(150, 3)
        rid, late = prefill.compute(tokens), prefill.compute(tokens)
        params = prefill.hand_off(rid, "dies", 150)
        prefill.worker.ranks[1].process.send_signal(signal.SIGSTOP)
        peer.register("dies" + SUFFIX, [1, 2, 3, 4, 5], params)
        prefill.worker.ranks[1].process.kill()
        assert not peer.is_filled("dies" + SUFFIX, 2, 2.0)
        assert peer.count("dies" + SUFFIX) <= 1
        assert bool((peer.pool[LAYERS // 2 :] == SENTINEL).all())  # the dead stage's layers
        began = time.monotonic()
        with pytest.raises(TransferError, match="does not answer"):
            prefill.hand_off(late, "late", 150)
        assert time.monotonic() - began < 10.0
    finally:
        prefill.close()


@pytest.mark.slow
def test_a_decode_that_stands_still_is_written_to_until_its_deadline_alone(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp, where the other side's help is needed; shared memory would not notice."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    prefill = Prefill(tmp_path, 2, staging_tokens=2 * THEIRS, registration_s=2.0)
    try:
        prefill.worker.start()
        shape = prefill.peer_shape(engine_id="sleepy")
        with PeerProcess(shape.pop("compatibility_hash"), **shape) as peer:
            warm, rid = prefill.compute(prompt(20, 1)), prefill.compute(prompt(150, 2))
            peer.ask("register", "warm" + SUFFIX, [1], prefill.hand_off(warm, "warm", 20))
            assert peer.ask("is_filled", "warm" + SUFFIX, 2, WAIT_S)
            params = prefill.hand_off(rid, "sleepy", 150)
            # Registers, and stands still before it could help the writes along.
            peer.ask("register_and_stop", "sleepy" + SUFFIX, [2, 3, 4, 5, 6], params)
            began = time.monotonic()
            prefill.await_freed(rid)
            assert 1.0 < time.monotonic() - began < 8.0
            for stage in range(2):
                expired = 'wavepp_push_requests_total{outcome="expired"}'
                prefill.await_stat(stage, expired, 1)
                prefill.await_stat(stage, "wavepp_push_writes", 0)
            peer.process.send_signal(signal.SIGCONT)
            assert not peer.ask("is_filled", "sleepy" + SUFFIX, 2, 1.0)
            assert peer.ask("count", "sleepy" + SUFFIX) == 0
            assert peer.ask("written", [4, 5, 6]) == []  # beyond the one piece under way
    finally:
        prefill.close()


# ── the side channel by itself ───────────────────────────────────────────────────────────────


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def ask(context: zmq.Context[Any], port: int, stage: int) -> zmq.Socket[Any]:
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVTIMEO, 5000)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send(msgspec.msgpack.encode((b"get_meta_msg", stage, 0)))
    return socket


def test_the_side_channel_answers_each_stage_and_ignores_the_rest(
    context: zmq.Context[Any],
) -> None:
    channel = SideChannel(context, "127.0.0.1", 0, {(0, 0): b"first", (1, 0): b"second"})
    unknown = ask(context, channel.port, 2)
    assert channel.socket.poll(5000)
    assert channel.poll(0.0) == 0
    for stage, payload in enumerate((b"first", b"second")):
        socket = ask(context, channel.port, stage)
        assert channel.socket.poll(5000)
        assert channel.poll(2.5) == 1
        answer, clock = socket.recv_multipart()
        assert (answer, msgspec.msgpack.decode(clock)) == (payload, 2.5)
        socket.close()
    assert not unknown.poll(0)
    unknown.close()
    channel.close()


def test_a_decode_that_does_not_answer_is_given_up_at_the_deadline(
    context: zmq.Context[Any],
) -> None:
    question = MetadataQuestion(context, "127.0.0.1", 1, 0, deadline=10.0)
    assert question.poll(9.9) is None
    with pytest.raises(TransferError, match="did not answer in time"):
        question.poll(10.0)
    assert question.socket.closed
