"""One gated delta layer of a wave: projections, convolution, delta rule, gated norm.

    q, k, v, z, b, a = W x ;  q, k, v through the convolution ;  beta = sigmoid(b) ;  g from a
    GDN    g one per head                              y = RMSNorm_head(o) * silu(z)
    KDA    g one per key channel, a through a low rank  y = RMSNorm_head(o) * sigmoid(z)

Each request starts from its working state and leaves there the one after its chunk; where the chunk
ends at a snapshot point, the same state is written to the snapshot's slot as well.

Legend: T tokens, C hidden or channels, H value heads, K key dim, V value dim,
G decays of a head: 1 or K.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.model.delta_kernel import run_delta_rule
from wavepp_worker.model.delta_rule import bounded_decay, short_convolution, softplus_decay
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.metadata import StateSpan
from wavepp_worker.model.state_store import StateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaWeights:
    """What a delta layer has beside its input and output projections."""

    convolution: Tensor  # [C, kernel]
    a_log: Tensor  # f32 [H]
    decay_bias: Tensor  # f32 [H, G]
    norm: Tensor  # [V]; KDA: f32
    decay_up: Tensor | None = None  # KDA: [H * K, rank]
    gate_up: Tensor | None = None  # of a gate through a low rank: [H * V, rank]


def delta_layer(
    rows_TX: Tensor,
    weights: DeltaWeights,
    spec: DeltaSpec,
    spans: Sequence[StateSpan],
    *,
    norm_eps: float,
    store: StateStore,
    layer: int,
) -> Tensor:
    """Return [T, H * V], before the output projection; states are in the store afterwards.

    Args:
        rows_TX: the input projection: q, k, v, z, beta, decay; every row is in one span.
        layer: index among this stage's delta layers.
    """
    heads, dim = spec.value_heads, spec.value_dim
    mixed_TC, z_TX, beta_TH, raw_TX = torch.split(
        rows_TX,
        [spec.channels, spec.gate_rank or heads * dim, heads, spec.decay_rank or heads],
        dim=-1,
    )
    if weights.gate_up is not None:
        z_TX = F.linear(z_TX, weights.gate_up)
    is_kda = weights.decay_up is not None
    beta_TH = (beta_TH.float() if is_kda else beta_TH).sigmoid()
    g_THG = _decay(raw_TX, weights, spec)
    out_THV = torch.empty((len(rows_TX), heads, dim), dtype=rows_TX.dtype, device=rows_TX.device)
    for span in spans:
        rows = span.rows
        mixed, tail = short_convolution(
            mixed_TC[rows], weights.convolution, store.tails_NRC[layer][span.working]
        )
        q, k, v = _heads(mixed, spec)
        out, state = run_delta_rule(
            q, k, v, g_THG[rows], beta_TH[rows], store.states_NHKV[layer][span.working]
        )
        out_THV[rows] = out.to(out_THV.dtype)
        store.write(layer, span.working, state, tail)
        if span.snapshot >= 0:
            store.write(layer, span.snapshot, state, tail)
    normed = F.rms_norm(out_THV.float(), (dim,), None, norm_eps)
    normed = normed.to(weights.norm.dtype) * weights.norm
    gate = z_TX.float().sigmoid() if is_kda else F.silu(z_TX.float())
    return (normed.flatten(1) * gate).to(rows_TX.dtype)


def _decay(raw_TX: Tensor, weights: DeltaWeights, spec: DeltaSpec) -> Tensor:
    """Return g in log space, f32 [T, H, G]."""
    if weights.decay_up is not None:
        raw_TX = F.linear(raw_TX, weights.decay_up)
    raw_THG = raw_TX.view(len(raw_TX), spec.value_heads, -1)
    if spec.decay_bound is None:
        return softplus_decay(raw_THG, weights.a_log, weights.decay_bias)
    return bounded_decay(raw_THG, weights.a_log, weights.decay_bias, spec.decay_bound)


def _heads(mixed_TC: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the convolution's output into q, k, v of every value head."""
    keys, served = spec.key_heads * spec.key_dim, spec.value_heads // spec.key_heads
    q, k, v = torch.split(mixed_TC, [keys, keys, spec.value_heads * spec.value_dim], dim=-1)
    q, k = (part.view(-1, spec.key_heads, spec.key_dim) for part in (q, k))
    if served > 1:
        q, k = (part.repeat_interleave(served, dim=1) for part in (q, k))
    return q, k, v.view(-1, spec.value_heads, spec.value_dim)
