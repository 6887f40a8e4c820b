"""States and blocks of three stages, read by one decode worker over real NIXL.

One stage keeps states alone, one blocks alone, one both; the reader has all of them in one place.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.state_store import StateStore
from wavepp_worker.transfer.desk import HoldDesk
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.transfer.reader import StateReader
from wavepp_worker.wire.mailbox import StateSlots

pytestmark = pytest.mark.nixl

RECURRENT = (0, 1, 3)
CUTS = ((0, 2), (2, 3), (3, 5))
B, PROMPT = 16, 40
THEIRS, OURS = (3, 1, 2), (5, 0, 7)  # block of each of the prompt's three
THEIR_SLOT, OUR_SLOT = 4, 2


def blocks_of(layers: int, blocks: int) -> KvStore:
    return KvStore(
        layers=layers, blocks=blocks, planes=2, kv_heads=2, block_tokens=B, head_dim=16,
        dtype=torch.float32, device="cpu", host_blocks=0,
    )  # fmt: skip


def states_of(layers: int, slots: int, kernel: int = 4) -> StateStore | None:
    spec = DeltaSpec(
        layers=RECURRENT, key_heads=2, value_heads=4, key_dim=8, value_dim=8, kernel=kernel
    )
    if not layers:
        return None
    return StateStore(spec, layers=layers, slots=slots, dtype=torch.float32, device="cpu")


class Stages:
    """The exporting side, polled by a thread of its own."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.blocks, self.states, self.desks = [], [], []
        for rank, (first, stop) in enumerate(CUTS):
            recurrent = sum(first <= layer < stop for layer in RECURRENT)
            blocks = blocks_of(stop - first - recurrent, 9)
            states = states_of(recurrent, 5)
            if blocks.pool.numel():
                blocks.pool.normal_()
            if states is not None:
                states.pool.random_(0, 255)
            self.blocks.append(blocks)
            self.states.append(states)
            self.desks.append(
                HoldDesk(
                    TransferConfig(),
                    "127.0.0.1",
                    blocks,
                    rank=rank,
                    layers=(first, stop),
                    block_tokens=B,
                    dtype="float32",
                    fingerprint="f",
                    states=states,
                )
            )
        self._rid = 0
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def hand_off(self) -> Handoff:
        self._rid += 1
        stages = []
        for desk, blocks, states in zip(self.desks, self.blocks, self.states, strict=True):
            tables: list[tuple[int, ...]] = [THEIRS] if blocks.block_bytes else []
            slots: tuple[StateSlots, ...] = ()
            if states is not None:
                slots = (StateSlots(len(tables), THEIR_SLOT),)
                tables.append(())
            stages.append(
                desk.open_hold(self._rid, tuple(tables), PROMPT, slots, time.monotonic())  # type: ignore[arg-type]
            )
        return Handoff(
            fingerprint="f", prompt_tokens=PROMPT, block_tokens=B, first_token=1,
            stages=tuple(stages),
        )  # fmt: skip

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join()
        for desk in self.desks:
            desk.close()

    def _serve(self) -> None:
        while not self._is_ending.wait(0.003):
            for desk in self.desks:
                desk.poll(time.monotonic())  # type: ignore[arg-type]


@pytest.fixture
def stages() -> Iterator[Stages]:
    made = Stages()
    yield made
    made.close()


def read(stages: Stages, blocks: KvStore, states: StateStore | None) -> None:
    handoff = stages.hand_off()
    stages.start()
    reader = StateReader(
        TransferConfig(), blocks, layers=5, block_tokens=B, dtype="float32", fingerprint="f",
        states=states, recurrent=RECURRENT if states else (), fetches_max=1,
    )  # fmt: skip
    try:
        slot = OUR_SLOT if states else None
        asyncio.run(reader.fetch(handoff, OURS, lambda: True, slot))
    finally:
        reader.close()


def test_blocks_and_states_arrive_where_they_belong(stages: Stages) -> None:
    blocks, states = blocks_of(2, 8), states_of(3, 4)
    assert states is not None
    read(stages, blocks, states)
    split = 2 * states.layer_bytes
    first, _, last = stages.states
    assert first is not None and last is not None
    assert torch.equal(states.pool[OUR_SLOT, :split], first.pool[THEIR_SLOT])
    assert torch.equal(states.pool[OUR_SLOT, split:], last.pool[THEIR_SLOT])
    others = [slot for slot in range(4) if slot != OUR_SLOT]
    assert not states.pool[others].any()
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(blocks.pool[ours, 0], stages.blocks[1].pool[theirs, 0])
        assert torch.equal(blocks.pool[ours, 1], stages.blocks[2].pool[theirs, 0])


def test_a_state_of_another_shape_is_refused_before_a_byte_is_read(stages: Stages) -> None:
    blocks, states = blocks_of(2, 8), states_of(3, 4, kernel=3)
    assert states is not None
    with pytest.raises(IncompatibleError, match="exports a state with"):
        read(stages, blocks, states)
    assert not states.pool.any()
    assert not blocks.pool.any()


def test_a_reader_without_recurrent_layers_is_refused(stages: Stages) -> None:
    with pytest.raises(IncompatibleError):
        read(stages, blocks_of(5, 8), None)
