"""Chunks and block tables → index tensors of one wave, prepared ahead of its forward.

    chunk 0: |rows 0 ..........|          keys: blocks table[0], table[1], ... up to start + length
    chunk 1:                   |rows ...| keys: ...
                                        ^ the last row of a chunk that wants a token: an answer row

All indices travel to the device in one copy; on CUDA it is pinned and does not wait.
"""

# ruff: noqa: N806, N815 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.executor.ports import WaveChunk


class AttentionSpan(NamedTuple):
    """Queries of one request and the keys they see: the queries are the last ones of the keys."""

    rows: slice  # of the query tensor
    fresh: slice | None  # rows of the wave holding all keys, when the chunk starts the sequence
    keys: int  # tokens of the sequence up to and including the last query
    table_n: Tensor  # int64, device: slots of blocks 0 .. ceil(keys / B) - 1


class StateSpan(NamedTuple):
    """One request's rows in a wave and its slots in the stage's recurrent window."""

    rows: slice
    working: int
    snapshot: int  # -1: none


class WaveBatch(NamedTuple):
    """Index tensors of one wave; all int64 on the stage's device."""

    token_count: int
    tokens_T: Tensor | None  # first stage only
    positions_T: Tensor
    blocks_T: Tensor  # where each token's keys and values go
    offsets_T: Tensor  # row within the block
    spans: tuple[AttentionSpan, ...]  # one per chunk, in row order
    answer_rows_L: Tensor
    answer_spans: tuple[AttentionSpan, ...]  # the answer rows only, packed: row i is answer i
    answers: tuple[int, ...]  # index of the chunk behind logits row i
    state_spans: tuple[StateSpan, ...] = ()  # one per chunk, if the stage has a recurrent window


def build_batch(
    chunks: Sequence[WaveChunk], block_tokens: int, device: torch.device | str
) -> WaveBatch:
    """Return the batch of a wave.

    A stage has an attention window, a recurrent one, or both; without the former, blocks and
    attention spans are empty.

    Raises:
        InvariantError: an empty chunk, a table too short, or tokens that do not fit the chunk.
    """
    check(len(chunks) > 0, "a wave has at least one chunk")
    with_tokens = bool(chunks[0].tokens)
    positions, blocks, tokens, tables = [], [], [], []
    for chunk in chunks:
        stop = chunk.start + chunk.length
        block_count = ceil_div(stop, block_tokens)
        check(chunk.length > 0, "a chunk has at least one token", rid=chunk.rid)
        table = _attention_table(chunk)
        if table is not None:
            check(len(table) >= block_count, "block table too short", rid=chunk.rid, stop=stop)
        check(
            len(chunk.tokens) == (4 * chunk.length if with_tokens else 0),
            "chunk and its tokens differ in length",
            rid=chunk.rid,
        )
        places = np.arange(chunk.start, stop, dtype=np.int64)
        positions.append(places)
        if table is not None:
            slots = np.asarray(table[:block_count], dtype=np.int64)
            tables.append(slots)
            blocks.append(slots[places // block_tokens])
        if with_tokens:
            tokens.append(np.frombuffer(chunk.tokens, dtype="<u4").astype(np.int64))
    lengths = [chunk.length for chunk in chunks]
    ends = np.cumsum(lengths)
    has_attention, has_states = len(tables) > 0, len(chunks[0].states) > 0
    check(
        all(len(chunk.states) == has_states for chunk in chunks)
        and len(tables) == has_attention * len(chunks),
        "all chunks of a stage have the same windows",
    )
    answers = tuple(index for index, chunk in enumerate(chunks) if chunk.wants_token)
    positions_T = np.concatenate(positions)
    parts = [
        positions_T,
        np.concatenate(blocks) if has_attention else np.empty(0, dtype=np.int64),
        positions_T % block_tokens,
        np.concatenate(tokens) if with_tokens else np.empty(0, dtype=np.int64),
        ends[list(answers)] - 1,
        *tables,
    ]
    positions_d, blocks_d, offsets_d, tokens_d, rows_d, *tables_d = _to_device(parts, device)
    all_rows = [
        slice(end - chunk.length, end) for chunk, end in zip(chunks, ends.tolist(), strict=True)
    ]
    spans = []
    for chunk, rows, table_n in zip(chunks, all_rows, tables_d, strict=has_attention):
        fresh = rows if chunk.start == 0 else None
        spans.append(AttentionSpan(rows, fresh, chunk.start + chunk.length, table_n))
    return WaveBatch(
        token_count=len(positions_T),
        tokens_T=tokens_d if with_tokens else None,
        positions_T=positions_d,
        blocks_T=blocks_d,
        offsets_T=offsets_d,
        spans=tuple(spans),
        answer_rows_L=rows_d,
        answer_spans=tuple(
            spans[index]._replace(rows=slice(row, row + 1))
            for row, index in enumerate(answers)
            if has_attention
        ),
        answers=answers,
        state_spans=tuple(
            StateSpan(rows, state.working, state.snapshot)
            for chunk, rows in zip(chunks, all_rows, strict=True)
            for state in chunk.states
        ),
    )


def _attention_table(chunk: WaveChunk) -> Sequence[int] | None:
    """Return the block table of the one attention window, None without one."""
    recurrent = {state.window for state in chunk.states}
    tables = [table for window, table in enumerate(chunk.tables) if window not in recurrent]
    check(
        len(tables) <= 1 and len(recurrent) <= 1 and len(chunk.tables) > 0,
        "a stage has one window of a kind",
        rid=chunk.rid,
    )
    return tables[0] if tables else None


def _to_device(
    parts: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]], device: torch.device | str
) -> tuple[Tensor, ...]:
    flat = torch.from_numpy(np.concatenate(parts))
    if torch.device(device).type == "cuda":
        # The pinned allocator keeps the buffer until the copy on this stream is done.
        flat = flat.pin_memory()
    return torch.split(flat.to(device, non_blocking=True), [len(part) for part in parts])
