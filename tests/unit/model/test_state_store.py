"""The layout of state slots, the copies between them, and the batch that addresses them."""

from __future__ import annotations

import random

import pytest
import torch

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.state_store import StateStore
from wavepp_worker.wire.mailbox import Copy

DELTA = DeltaSpec(layers=(0, 1, 3), key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=4)


def make_store(dtype: torch.dtype = torch.bfloat16) -> StateStore:
    return StateStore(DELTA, layers=3, slots=7, dtype=dtype, device="cpu", host_slots=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_slot_is_one_range_of_bytes_layer_by_layer(dtype: torch.dtype) -> None:
    """State 2 * 4 * 3 * 4 = 96 bytes, tail 3 rows of 2 * 1 * 4 + 2 * 3 = 14, up to 16 bytes."""
    layer_bytes = {torch.bfloat16: 96 + 84 + 12, torch.float32: 96 + 168 + 8}[dtype]
    store = make_store(dtype)
    assert DELTA.layer_bytes(dtype.itemsize) == layer_bytes
    assert store.slot_bytes == 3 * layer_bytes == store.pool.stride(0)
    state, tail = torch.rand(2, 4, 3), torch.rand(3, 14).to(dtype)
    store.write(1, 4, state, tail)
    row = store.pool[4]
    held = row[layer_bytes : layer_bytes + 96].view(torch.float32)
    assert torch.equal(held, state.flatten())
    held = row[layer_bytes + 96 : layer_bytes + 96 + 42 * dtype.itemsize].view(dtype)
    assert torch.equal(held, tail.flatten())
    assert not store.pool[[0, 1, 2, 3, 5, 6]].any()
    assert not row[:layer_bytes].any()
    assert not row[2 * layer_bytes :].any()


def test_the_size_of_kimi_linears_layers_is_the_published_one() -> None:
    """20 layers of 32 heads of 128 x 128: 40 MiB of states and 1.41 MiB of tails in bf16."""
    kimi = DeltaSpec(
        layers=tuple(range(20)), key_heads=32, value_heads=32, key_dim=128, value_dim=128, kernel=4
    )
    assert 20 * kimi.state_bytes == 40 << 20
    assert 20 * kimi.layer_bytes(2) - (40 << 20) == round(1.40625 * (1 << 20))


@pytest.mark.parametrize("seed", range(10))
def test_copies_are_those_of_a_naive_store(seed: int) -> None:
    """In order, also when a later copy uses a slot of an earlier one."""
    draw, store = random.Random(seed), make_store()
    store.pool.random_(0, 255)
    store.host_pool.random_(0, 255)
    device, host = store.pool.clone(), store.host_pool.clone()
    copies = []
    for _ in range(30):
        kind = draw.choice(["offload", "onboard", "onboard_state", "load_state", "zero_state"])
        near, far = draw.randrange(7), draw.randrange(5)
        match kind:
            case "offload":
                copies.append(Copy(kind, 1, near, far))
                host[far] = device[near]
            case "load_state":
                other = draw.randrange(7)
                copies.append(Copy(kind, 1, other, near))
                device[near] = device[other].clone()
            case "zero_state":
                copies.append(Copy(kind, 1, -1, near))
                device[near] = 0
            case _:
                copies.append(Copy(kind, 1, far, near))
                device[near] = host[far]
    store.copy(copies)
    assert torch.equal(store.pool, device)
    assert torch.equal(store.host_pool, host)


@pytest.mark.parametrize(
    "copy",
    [
        Copy("load_state", 1, 7, 0), Copy("load_state", 1, 0, 7), Copy("load_state", 1, -1, 0),
        Copy("onboard_state", 1, 5, 0), Copy("offload", 1, 0, 5), Copy("zero_state", 1, -1, -1),
        Copy("rename", 1, 0, 0),
    ],
    ids=str,
)  # fmt: skip
def test_copies_that_no_slot_has_are_refused(copy: Copy) -> None:
    store = make_store()
    with pytest.raises(InvariantError):
        store.copy([copy])


def make_chunk(tables: tuple[tuple[int, ...], ...], *states: ChunkState) -> WaveChunk:
    return WaveChunk(rid=1, start=4, length=3, tables=tables, states=states, wants_token=True)


def test_a_stage_of_both_kinds_has_blocks_and_states() -> None:
    chunks = [
        make_chunk(((5, 2), ()), ChunkState(1, 6)),
        make_chunk(((1, 3), ()), ChunkState(1, 2, 4)),
    ]
    batch = build_batch(chunks, 4, "cpu")
    assert batch.blocks_T.tolist() == [2, 2, 2, 3, 3, 3]
    assert [tuple(span) for span in batch.state_spans] == [
        (slice(0, 3), 6, -1),
        (slice(3, 6), 2, 4),
    ]


def test_a_stage_of_states_alone_has_no_blocks() -> None:
    batch = build_batch([make_chunk(((),), ChunkState(0, 6))] * 2, 4, "cpu")
    assert batch.positions_T.tolist() == [4, 5, 6, 4, 5, 6]
    assert (batch.spans, batch.answer_spans, len(batch.blocks_T)) == ((), (), 0)
    assert batch.answer_rows_L.tolist() == [2, 5]
    assert [span.rows for span in batch.state_spans] == [slice(0, 3), slice(3, 6)]


@pytest.mark.parametrize(
    "chunks",
    [
        [make_chunk(())],
        [make_chunk(((1, 2), (3, 4)))],
        [make_chunk(((), ()), ChunkState(0, 1), ChunkState(1, 1))],
        [make_chunk(((1, 2), ()), ChunkState(1, 1)), make_chunk(((1, 2),))],
        [make_chunk(((1, 2),)), make_chunk(((),), ChunkState(0, 1))],
    ],
    ids=["none", "two-attention", "two-recurrent", "lost-state", "lost-table"],
)
def test_windows_that_no_stage_has_stop_the_rank(chunks: list[WaveChunk]) -> None:
    with pytest.raises(InvariantError, match="window"):
        build_batch(chunks, 4, "cpu")
