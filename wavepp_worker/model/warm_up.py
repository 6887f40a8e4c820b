"""Compiles what a stage will run, before it is said to be ready.

Kernels of torch.compile, Triton and cuDNN come into being when they are used first, which takes
seconds; in a first wave that would count as a stall.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from wavepp_worker.base.units import ceil_div
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model import delta_kernel, split_attention
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.mla import expanded_rows_max
from wavepp_worker.model.spec import ModelSpec
from wavepp_worker.model.split_attention import AttentionShape
from wavepp_worker.model.stage import StageModel

BLOCK_TOKENS: Final = 64
# Waves of these chunks: a length is a constant for the compiler until it sees a second one, and one
# row (an answer, a single token) always is.
WAVES: Final = ((300,), (700,), (129, 200), (1,))

logger = logging.getLogger(__name__)


def warm_up(model: StageModel) -> None:
    """Have all kernels compiled that depend on the model's shapes; on the CPU there are none."""
    if model.device.type != "cuda":
        return
    began, spec = time.monotonic(), model.spec
    if model.has_attention:
        split_attention.warm_up(attention_shape(spec), model.device, model.dtype)
    if spec.delta is not None and model.delta_count:
        delta_kernel.warm_up(spec.delta, model.device, model.dtype)
    for lengths in WAVES:
        _run_wave(model, lengths)
    torch.cuda.synchronize(model.device)
    # What the pieces of many shapes took is not what a wave needs beside weights and cache.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    logger.info("kernels ready in %.1f s", time.monotonic() - began)


def attention_shape(spec: ModelSpec) -> AttentionShape:
    """Return what attention's graphs are built for."""
    mla, heads = spec.mla, spec.heads
    if mla is not None:
        return AttentionShape(
            heads=heads,
            kv_heads=heads,
            key_dim=mla.key_dim,
            value_dim=mla.value_dim,
            q_stride=heads * mla.key_dim,
            scale=mla.scale,
            key_rows_max=expanded_rows_max(heads, mla),
        )
    # Queries and keys turn together, so keys lie between one query row and the next.
    return AttentionShape(
        heads=heads,
        kv_heads=spec.kv_heads,
        key_dim=spec.head_dim,
        value_dim=spec.head_dim,
        q_stride=(heads + spec.kv_heads) * spec.head_dim,
        scale=spec.head_dim**-0.5,
    )


def _run_wave(model: StageModel, lengths: tuple[int, ...]) -> None:
    """Run chunks behind no prefix on a cache that is thrown away."""
    blocks = [ceil_div(length, BLOCK_TOKENS) for length in lengths]
    store, states = model.make_store(max(blocks), BLOCK_TOKENS), model.make_states(len(lengths))
    chunks = []
    for index, length in enumerate(lengths):
        tables: list[tuple[int, ...]] = []
        if model.has_attention:
            tables.append(tuple(range(blocks[index])))  # shared: nobody reads these answers
        held = () if states is None else (ChunkState(window=len(tables), working=index),)
        chunks.append(
            WaveChunk(
                rid=index,
                start=0,
                length=length,
                tables=(*tables, *[()] * len(held)),
                tokens=bytes(4 * length) if model.is_first else b"",
                wants_token=model.is_last,
                states=held,
            )
        )
    batch = build_batch(chunks, BLOCK_TOKENS, model.device)
    inputs = {
        name: torch.zeros(shape, dtype=dtype, device=model.device)
        for name, (shape, dtype) in model.input_spec(sum(lengths)).items()
    }
    model.forward(batch, inputs, store, states)
