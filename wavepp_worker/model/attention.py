"""Causal grouped-query attention of a wave over paged keys: gather, then attend, per request.

Copying a prefix costs little against attending to it, so the paged layout stays a matter of the
cache and every device runs the same code.  The queries of a request are always the last tokens
of its keys, hence a lower-right causal mask:

    keys     |cached and earlier chunks .......|this chunk|
    query 0  |visible .........................|x         |
    query T-1|visible .........................|xxxxxxxxxx|

Where cuDNN applies (Hopper and later, 16 bits) it attends in pieces (`split_attention`); everywhere
else, and for a few queries, torch's SDPA does: its flash kernel on CUDA, its own on the CPU.

Legend: T queries, S keys, H heads (q) or KV heads (k, v), D head dim.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import AttentionSpan
from wavepp_worker.model.split_attention import fits, split_attention

# Where no flash kernel applies the scores, or at least the mask, of a piece are materialized:
# this many queries at a time keep that small.
QUERY_ROWS_MAX = 1024


def attend(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    spans: Sequence[AttentionSpan],
    *,
    store: KvStore,
    layer: int,
) -> Tensor:
    """Return the attention output [T, H * D] of all spans; every query row is in one span.

    Args:
        q_THD: queries, rows as the spans say.
        k_THD, v_THD: the wave's own keys and values, already written to the store.
        layer: index within this stage.
    """
    if len(spans) == 1 and fits(q_THD, v_THD.shape[-1]):
        return _attend_split(q_THD, k_THD, v_THD, spans[0], store, layer).flatten(1)
    out_THD = torch.empty_like(q_THD)
    for span in spans:
        if fits(q_THD[span.rows], v_THD.shape[-1]):
            out_THD[span.rows] = _attend_split(q_THD, k_THD, v_THD, span, store, layer)
            continue
        if span.fresh is not None:
            k_HSD, v_HSD = k_THD[span.fresh].transpose(0, 1), v_THD[span.fresh].transpose(0, 1)
        else:
            k_HSD, v_HSD = store.gather(layer, span.table_n, span.keys)
        out_HTD = causal(q_THD[span.rows].transpose(0, 1), k_HSD, v_HSD)
        out_THD[span.rows] = out_HTD.transpose(0, 1)
    return out_THD.flatten(1)


def _attend_split(  # noqa: PLR0917 - as `attend`
    q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, span: AttentionSpan, store: KvStore, layer: int
) -> Tensor:
    """Attend with all queries of a chunk: its own keys are the wave's rows of the same numbers."""

    def prefix(start: int, stop: int) -> tuple[Tensor, Tensor]:
        k_SHD, v_SHD = store.rows(layer, span.table_n, start, stop)
        return k_SHD, v_SHD

    q, k, v = q_THD[span.rows], k_THD[span.rows], v_THD[span.rows]
    return split_attention(q, k, v, span.keys - len(q), prefix)


def causal(q_HTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float | None = None) -> Tensor:
    """Attend with the last T of S positions as queries; values may be narrower than keys.

    Args:
        scale: of query times key; default D ** -0.5.
    """
    heads, queries, _ = q_HTD.shape
    keys, width = k_HSD.shape[1], v_HSD.shape[-1]
    if q_HTD.is_cuda and width < q_HTD.shape[-1]:
        # The flash kernels take one width for all.
        v_HSD = F.pad(v_HSD, (0, q_HTD.shape[-1] - width))
    q, k, v = q_HTD[None], k_HSD[None], v_HSD[None]
    if queries == 1:
        # The heads that share a KV head become its queries: no mask, no repeated keys.
        folded = q.reshape(1, k_HSD.shape[0], -1, q.shape[-1])
        return sdpa(folded, k, v, scale=scale).reshape(heads, 1, -1)[..., :width]
    if queries == keys:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True, scale=scale)[0, ..., :width]
    is_flash = q.is_cuda and q.dtype != torch.float32
    step = queries if is_flash else QUERY_ROWS_MAX
    pieces = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        seen = keys - queries + stop
        mask = causal_lower_right(stop - start, seen)
        seen_k, seen_v = k[:, :, :seen], v[:, :, :seen]
        piece = sdpa(q[:, :, start:stop], seen_k, seen_v, mask, enable_gqa=True, scale=scale)
        pieces.append(piece[0, ..., :width])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
