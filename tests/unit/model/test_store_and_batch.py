"""The pool's layout and the index tensors that address it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.numerics.pipeline import token_bytes
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.model.kv_store import KvStore
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


def test_copies_of_other_tiers_are_refused() -> None:
    store = make_store()
    store.copy([])
    with pytest.raises(InvariantError, match="one tier"):
        store.copy([Copy(kind="onboard", window=0, source=1, target=2)])


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
