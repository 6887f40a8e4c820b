"""Latent attention with a gate, in fp64 against its equation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.mla import LATENT_EPS, MlaWeights, latent_attention
from wavepp_worker.model.mla_spec import MlaSpec

TOKENS, HEADS, BLOCK_TOKENS = 40, 3, 16
SPEC = MlaSpec(
    q_rank=None,
    kv_rank=10,
    nope_dim=6,
    rope_dim=4,
    value_dim=5,
    scale=0.3,
    is_interleaved=False,
    has_gate=True,
)
GATES = HEADS * SPEC.value_dim


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_weights() -> MlaWeights:
    return MlaWeights(
        q_norm=None,
        q_up=None,
        kv_norm=1 + 0.1 * draw(SPEC.kv_rank),
        key_up=draw(HEADS, SPEC.nope_dim, SPEC.kv_rank),
        value_up=draw(HEADS, SPEC.value_dim, SPEC.kv_rank),
    )


def dense(rows: Tensor, weights: MlaWeights) -> Tensor:
    """Attend with every key expanded; without positions."""
    q, latent, shared, gate = rows.split(
        [HEADS * SPEC.key_dim, SPEC.kv_rank, SPEC.rope_dim, GATES], dim=-1
    )
    c = latent / (latent.square().mean(-1, keepdim=True) + LATENT_EPS).sqrt() * weights.kv_norm
    heads = []
    for head in range(HEADS):
        keys = torch.cat((c @ weights.key_up[head].T, shared), dim=-1)
        scores = q.view(len(rows), HEADS, -1)[:, head] @ keys.T * SPEC.scale
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -math.inf).softmax(-1)
        heads.append(shares @ c @ weights.value_up[head].T)
    return torch.cat(heads, dim=-1) / (1 + (-gate).exp())


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("chunks", [[40], [25, 14, 1], [1] * 40], ids=["whole", "three", "single"])
def test_a_gated_output_equals_its_equation(chunks: list[int], is_final: bool) -> None:
    """Expanded and absorbed; the final layer answers for the last row of a chunk alone."""
    weights = make_weights()
    rows = draw(TOKENS, HEADS * SPEC.key_dim + SPEC.row_dim + GATES)
    store = KvStore(
        layers=1, blocks=4, planes=1, kv_heads=1, block_tokens=BLOCK_TOKENS,
        head_dim=SPEC.row_dim, dtype=torch.float64, device="cpu",
    )  # fmt: skip
    got, want_rows, start = [], [], 0
    for length in chunks:
        stop = start + length
        batch = build_batch([make_chunk(start, length)], BLOCK_TOKENS, "cpu")
        half = torch.ones((length, 1, SPEC.rope_dim // 2), dtype=torch.float64)
        got.append(
            latent_attention(
                rows[start:stop], weights, SPEC, (half, torch.zeros_like(half)), batch,
                store=store, layer=0, is_final=is_final,
            )
        )  # fmt: skip
        want_rows += [stop - 1] if is_final else range(start, stop)
        start = stop
    torch.testing.assert_close(torch.cat(got), dense(rows, weights)[want_rows])


def make_chunk(start: int, length: int) -> WaveChunk:
    return WaveChunk(
        rid=1, start=start, length=length, tables=((2, 0, 3),), tokens=b"", wants_token=True
    )
