"""Multi-head latent attention of a wave over paged latents.

    c, k_r = W_kva x, c normed and k_r turned: cached    q = W_qb Norm(W_qa x), its rope part turned

Two forms of the same sum.  Several queries of a request expand its latents to keys and values and
attend as usual, some heads at a time, so that a long prefix is never expanded whole.  A single
query, as in decoding, folds the expansion into itself and its output, and the latents serve all
heads as keys and values at once:

    q_h . k_h = (W_uk,h^T q_h) . c + q_r . k_r        out_h = W_uv,h (sum of weights times c)

Legend: T queries, S keys, H heads, D key width, V value width, R latent width, P rope width.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.functional import scaled_dot_product_attention as sdpa

from wavepp_worker.model.attention import causal
from wavepp_worker.model.fused import norm, turn
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import AttentionSpan, WaveBatch
from wavepp_worker.model.mla_spec import MlaSpec
from wavepp_worker.model.split_attention import KEY_ROWS, fits, split_attention

LATENT_EPS = 1e-6  # of the two inner norms, whatever the model's other norms have
EXPANDED_VALUES_MAX = 1 << 28  # keys and values expanded at a time, of one head at the least


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """What latent attention has beside its first and last projection."""

    q_norm: Tensor | None  # [q_rank]
    q_up: Tensor | None  # [H * D, q_rank]
    kv_norm: Tensor  # [R]
    key_up: Tensor  # [H, D - P, R]
    value_up: Tensor  # [H, V, R]


def latent_attention(
    rows_TX: Tensor,
    weights: MlaWeights,
    spec: MlaSpec,
    rotation_T1D: tuple[Tensor, Tensor],
    batch: WaveBatch,
    *,
    store: KvStore,
    layer: int,
    is_final: bool,
) -> Tensor:
    """Return the attention output [T, H * V], of the final layer [L, H * V].

    Args:
        rows_TX: the first projection: (compressed) queries, latents, shared keys, gates if any.
        layer: index within this stage.
    """
    heads, value_dim, _ = weights.value_up.shape
    gates = heads * value_dim * spec.has_gate
    queries = rows_TX.shape[1] - spec.row_dim - gates
    q_TX, rows_TD, gate_TX = torch.split(rows_TX, [queries, spec.row_dim, gates], dim=-1)
    c_TR = norm(rows_TD[:, : spec.kv_rank], weights.kv_norm, LATENT_EPS)
    k_T1P = turn(rows_TD[:, None, spec.kv_rank :], rotation_T1D)
    rows_T1D = torch.cat((c_TR[:, None], k_T1P), dim=-1)
    store.write(layer, batch.blocks_T, batch.offsets_T, rows_T1D)
    spans = batch.spans
    if is_final:
        spans, q_TX = batch.answer_spans, q_TX[batch.answer_rows_L]
        gate_TX = gate_TX[batch.answer_rows_L]
        cos_T1D, sin_T1D = rotation_T1D
        rotation_T1D = cos_T1D[batch.answer_rows_L], sin_T1D[batch.answer_rows_L]
    q_THD = _queries(q_TX, weights, spec, rotation_T1D)
    out_THV = q_THD.new_empty((len(q_THD), heads, value_dim))
    for span in spans:
        if fits(q_THD[span.rows], value_dim):
            out_THV[span.rows] = _split(
                q_THD[span.rows], rows_T1D[span.rows], span, weights, spec, store=store, layer=layer
            )
            continue
        if span.fresh is not None:
            rows_SD = rows_T1D[span.fresh, 0]
        else:
            (rows_1SD,) = store.gather(layer, span.table_n, span.keys)
            rows_SD = rows_1SD[0]
        q = q_THD[span.rows]
        attend = _absorbed if len(q) == 1 else _expanded
        out_THV[span.rows] = attend(q, rows_SD, weights, spec)
    attended = out_THV.flatten(1)
    return attended * gate_TX.sigmoid() if spec.has_gate else attended


def _queries(
    q_TX: Tensor, weights: MlaWeights, spec: MlaSpec, rotation_T1D: tuple[Tensor, Tensor]
) -> Tensor:
    if weights.q_norm is not None and weights.q_up is not None:
        normed = norm(q_TX, weights.q_norm, LATENT_EPS)
        q_TX = F.linear(normed, weights.q_up)
    q_THD = q_TX.view(len(q_TX), len(weights.key_up), spec.key_dim)
    turned = turn(q_THD[..., spec.nope_dim :], rotation_T1D)
    return torch.cat((q_THD[..., : spec.nope_dim], turned), dim=-1)


def _split(
    q_THD: Tensor,
    rows_T1D: Tensor,
    span: AttentionSpan,
    weights: MlaWeights,
    spec: MlaSpec,
    *,
    store: KvStore,
    layer: int,
) -> Tensor:
    """Attend with a chunk's queries in pieces, expanding the prefix piece by piece; [T, H, V]."""

    def prefix(start: int, stop: int) -> tuple[Tensor, Tensor]:
        (rows_S1D,) = store.rows(layer, span.table_n, start, stop)
        return _expand(rows_S1D, weights, spec)

    k_THD, v_THV = _expand(rows_T1D, weights, spec)
    return split_attention(
        q_THD,
        k_THD,
        v_THV,
        span.keys - len(q_THD),
        prefix,
        scale=spec.scale,
        key_rows_max=expanded_rows_max(q_THD.shape[1], spec),
    )


def expanded_rows_max(heads: int, spec: MlaSpec) -> int:
    """Return how many latents are expanded at a time, of all heads."""
    rows = EXPANDED_VALUES_MAX // (heads * (spec.key_dim + spec.value_dim))
    return max(KEY_ROWS[-1], rows)


def _expand(rows_S1D: Tensor, weights: MlaWeights, spec: MlaSpec) -> tuple[Tensor, Tensor]:
    """Return keys [S, H, D] and values [S, H, V] of latent rows."""
    c_SR = rows_S1D[:, 0, : spec.kv_rank]
    k_S1P = rows_S1D[..., spec.kv_rank :]
    heads = len(weights.key_up)
    nope_SHn = F.linear(c_SR, weights.key_up.flatten(0, 1)).view(len(c_SR), heads, -1)
    v_SHV = F.linear(c_SR, weights.value_up.flatten(0, 1)).view(len(c_SR), heads, -1)
    return torch.cat((nope_SHn, k_S1P.expand(-1, heads, -1)), dim=-1), v_SHV


def _expanded(q_THD: Tensor, rows_SD: Tensor, weights: MlaWeights, spec: MlaSpec) -> Tensor:
    """Attend with the last T of S positions as queries; [T, H, V]."""
    heads, keys = q_THD.shape[1], len(rows_SD)
    step = max(1, EXPANDED_VALUES_MAX // (keys * (spec.key_dim + spec.value_dim)))
    c_SR, k_SP = rows_SD[:, : spec.kv_rank], rows_SD[:, spec.kv_rank :]
    pieces = []
    for start in range(0, heads, step):
        some = slice(start, start + step)
        nope_HSn = c_SR @ weights.key_up[some].transpose(1, 2)
        k_HSD = torch.cat((nope_HSn, k_SP.expand(len(nope_HSn), -1, -1)), dim=-1)
        v_HSV = c_SR @ weights.value_up[some].transpose(1, 2)
        pieces.append(causal(q_THD[:, some].transpose(0, 1), k_HSD, v_HSV, spec.scale))
    return torch.cat(pieces).transpose(0, 1)


def _absorbed(q_1HD: Tensor, rows_SD: Tensor, weights: MlaWeights, spec: MlaSpec) -> Tensor:
    """Attend with one query that sees all rows; [1, H, V]."""
    q_H1D = q_1HD.transpose(0, 1)
    folded_H1R = q_H1D[..., : spec.nope_dim] @ weights.key_up
    # The heads are the queries of one head, whose keys are the rows.
    q_HD = torch.cat((folded_H1R, q_H1D[..., spec.nope_dim :]), dim=-1)[:, 0]
    c_SR = rows_SD[:, : spec.kv_rank]
    mixed = sdpa(q_HD[None, None], rows_SD[None, None], c_SR[None, None], scale=spec.scale)
    return (mixed[0].transpose(0, 1) @ weights.value_up.transpose(1, 2)).transpose(0, 1)
