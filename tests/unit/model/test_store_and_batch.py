"""The pool's layout and the index tensors that address it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.numerics.pipeline import token_bytes
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.model.kv_store import KvStore, merge_neighbours
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.wire.mailbox import Copy

BLOCK = 4


def make_store() -> KvStore:
    return KvStore(
        layers=3,
        blocks=8,
        kv_heads=2,
        block_tokens=BLOCK,
        head_dim=6,
        dtype=torch.float32,
        device="cpu",
    )


def make_chunk(start: int, length: int, table: tuple[int, ...], **changes: object) -> WaveChunk:
    fields = {"rid": 1, "start": start, "length": length, "tables": (table,)} | changes
    return WaveChunk(**fields)


def test_what_is_written_is_gathered_in_order() -> None:
    store, batch = make_store(), build_batch([make_chunk(0, 10, (5, 1, 6))], BLOCK, "cpu")
    k, v = torch.randn(10, 2, 6), torch.randn(10, 2, 6)
    store.write(1, batch.blocks_T, batch.offsets_T, k, v)
    got_k, got_v = store.gather(1, torch.tensor([5, 1, 6]), 9)
    assert torch.equal(got_k, k[:9].transpose(0, 1))
    assert torch.equal(got_v, v[:9].transpose(0, 1))
    assert not store.pool[:, [0, 2]].any()
    assert not store.pool[[0, 2, 3, 4, 7]].any()


def test_a_store_of_one_plane_keeps_one_row_per_token() -> None:
    store = KvStore(
        layers=2, blocks=4, planes=1, kv_heads=1, block_tokens=BLOCK, head_dim=5,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    rows, batch = torch.randn(6, 1, 5), build_batch([make_chunk(0, 6, (3, 1))], BLOCK, "cpu")
    store.write(1, batch.blocks_T, batch.offsets_T, rows)
    (got,) = store.gather(1, torch.tensor([3, 1]), 6)
    assert torch.equal(got, rows.transpose(0, 1))
    assert store.block_bytes == 2 * BLOCK * 5 * 4
    with pytest.raises(ValueError, match="zip"):
        store.write(1, batch.blocks_T, batch.offsets_T, rows, rows)


def test_a_block_is_one_range_of_bytes_at_the_declared_address() -> None:
    """A reader that knows only addresses finds block 5, layer 1, values, head 1, token 2."""
    store = make_store()
    store.pool.copy_(torch.arange(store.pool.numel()).view_as(store.pool))
    flat = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_float * store.pool.numel()).from_address(store.base_address)
    )
    assert store.block_bytes == 3 * 2 * 2 * BLOCK * 6 * 4
    assert store.layer_bytes * store.layers == store.block_bytes
    place = (5 * store.block_bytes + 1 * store.layer_bytes) // 4
    place += (1 * 2 + 1) * BLOCK * 6 + 2 * 6
    assert np.array_equal(flat[place : place + 6], store.pool[5, 1, 1, 1, 2].numpy())


def test_batch_of_mixed_chunks() -> None:
    batch = build_batch(
        [
            make_chunk(6, 3, (7, 2, 4, 3), tokens=token_bytes([10, 11, 12]), wants_token=True),
            make_chunk(0, 2, (1,), tokens=token_bytes([13, 2**31 + 1])),
            make_chunk(4, 1, (0, 5), tokens=token_bytes([15]), wants_token=True),
        ],
        BLOCK,
        "cpu",
    )
    assert batch.token_count == 6
    assert batch.tokens_T is not None
    assert batch.tokens_T.tolist() == [10, 11, 12, 13, 2**31 + 1, 15]
    assert batch.positions_T.tolist() == [6, 7, 8, 0, 1, 4]
    assert batch.blocks_T.tolist() == [2, 2, 4, 1, 1, 5]
    assert batch.offsets_T.tolist() == [2, 3, 0, 0, 1, 0]
    assert batch.answer_rows_L.tolist() == [2, 5]
    assert batch.answers == (0, 2)
    assert [(span.rows, span.fresh, span.keys) for span in batch.spans] == [
        (slice(0, 3), None, 9),
        (slice(3, 5), slice(3, 5), 2),
        (slice(5, 6), None, 5),
    ]
    assert [span.table_n.tolist() for span in batch.spans] == [[7, 2, 4], [1], [0, 5]]
    assert [(span.rows, span.keys) for span in batch.answer_spans] == [
        (slice(0, 1), 9),
        (slice(1, 2), 5),
    ]


def test_later_stages_have_no_tokens() -> None:
    assert build_batch([make_chunk(0, 3, (1,))], BLOCK, "cpu").tokens_T is None


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [make_chunk(0, 0, (1,))],
        [make_chunk(2, 3, (1,))],
        [make_chunk(0, 2, (1,), tokens=token_bytes([1]))],
        [make_chunk(0, 1, (1,), tokens=token_bytes([1])), make_chunk(0, 1, (2,))],
    ],
    ids=["none", "empty", "short-table", "short-tokens", "tokens-missing"],
)
def test_impossible_waves_stop_the_rank(chunks: list[WaveChunk]) -> None:
    with pytest.raises(InvariantError):
        build_batch(chunks, BLOCK, "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_copies_between_the_tiers_are_those_of_a_naive_store(seed: int) -> None:
    """In order, also when a later copy uses a slot of an earlier one; neighbours go together."""
    draw = random.Random(seed)
    store = KvStore(
        layers=2, blocks=7, kv_heads=1, block_tokens=4, head_dim=2, dtype=torch.float32,
        device="cpu", host_blocks=5,
    )  # fmt: skip
    store.pool.copy_(torch.rand(store.pool.shape))
    store.host_pool.copy_(torch.rand(store.host_pool.shape))
    device, host = store.pool.clone(), store.host_pool.clone()
    copies = []
    for _ in range(30):
        kind = draw.choice(["offload", "onboard"])
        first, count = (7, 5) if kind == "offload" else (5, 7)
        source, target = draw.randrange(first), draw.randrange(count)
        copies += [
            Copy(kind, 0, source + step, target + step)
            for step in range(draw.choice([1, 1, 3]))
            if source + step < first and target + step < count
        ]
    for copy in copies:
        if copy.kind == "offload":
            host[copy.target] = device[copy.source]
        else:
            device[copy.target] = host[copy.source]
    store.copy(copies)
    assert torch.equal(store.pool, device)
    assert torch.equal(store.host_pool, host)
    assert len(list(merge_neighbours(copies))) < len(copies)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pinned_host_tier_takes_what_was_asked_for() -> None:
    """FS-93: just over a power of two; pinned as a whole, zeroed, and given back."""
    torch.zeros(1, device="cuda")  # what CUDA itself takes is not counted
    before = resident_bytes()
    asked = (1 << 30) + (1 << 26)
    store = KvStore(
        layers=1, blocks=2, kv_heads=8, block_tokens=64, head_dim=128, dtype=torch.bfloat16,
        device="cuda", host_blocks=asked // (1 << 18),
    )  # fmt: skip
    assert store.host_pool.nbytes == asked
    assert store.host_pool[:1].is_pinned()
    assert store.host_pool[-1:].is_pinned()
    assert not store.host_pool.any()
    assert asked <= resident_bytes() - before < 1.05 * asked
    store.pool.fill_(3)
    store.copy((Copy("offload", 0, 1, asked // (1 << 18) - 1),))
    torch.cuda.synchronize()
    assert (store.host_pool[-1] == 3).all()
    pool = store.host_pool
    del store
    assert not pool[:1].is_pinned()


def resident_bytes() -> int:
    """Return what this process really has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_copies_that_no_tier_has_are_refused() -> None:
    store = make_store()
    for copy in (Copy("zero_state", 0, -1, 0), Copy("offload", 0, 0, 0), Copy("onboard", 0, 0, 1)):
        with pytest.raises(InvariantError):
            store.copy((copy,))
