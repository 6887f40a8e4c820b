"""A mixture-of-experts feed-forward: choose experts per token, then two grouped products.

    scores = softmax(W_r x) or sigmoid(W_r x)
    chosen = the K largest of scores (+ bias), perhaps within the best groups only
    y      = sum over chosen e:  weight_e * W2_e (silu(W1_e x) * W3_e x)

Latent experts are narrower than the model: they run on z = W_down x, and their sum, normed, goes
through W_up; the router reads x.

Token-expert pairs are sorted by expert, so that each expert's rows are one piece of a grouped
product; the results are brought back and summed in the order of choice, which keeps the sum
independent of the other tokens of a wave, on every device.  Nothing here waits for the device.

Legend: T tokens, C hidden, Z input of an expert (C unless latent), E experts, K chosen per token,
I hidden width of an expert, X = T * K.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.model.fused import combine, norm
from wavepp_worker.model.mlp import gated
from wavepp_worker.model.moe_spec import MoeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeWeights:
    """Router and experts of one layer; shared experts are an MLP beside it."""

    router: Tensor  # [E, C]; its type is the one in which logits are computed
    selection_bias: Tensor | None  # f32 [E]
    gate_up: Tensor  # [E, 2 * I, Z]: W1, then W3
    down: Tensor  # [E, Z, I]: W2
    shared_gate: Tensor | None = None  # [1, C]
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """What leads into narrower experts and out of them."""

    down: Tensor  # [Z, C]
    norm: Tensor  # [Z]
    up: Tensor  # [C, Z]


def experts_forward(x_TC: Tensor, weights: MoeWeights, spec: MoeSpec) -> Tensor:
    """Return the weighted sum of each token's experts, [T, C]."""
    order_X, stops_E, places_TK, weights_TK = _plan(x_TC, weights, spec)
    latent = weights.latent
    z_TZ = x_TC if latent is None else F.linear(x_TC, latent.down)
    gate_up = grouped_linear(z_TZ[order_X // spec.chosen], weights.gate_up, stops_E)
    sorted_XZ = grouped_linear(gated(gate_up, spec.situ), weights.down, stops_E)
    sum_TZ = combine(sorted_XZ, places_TK, weights_TK)
    if latent is None:
        return sum_TZ
    return F.linear(norm(sum_TZ, latent.norm, spec.latent_eps), latent.up)


def _plan(
    x_TC: Tensor, weights: MoeWeights, spec: MoeSpec
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose experts and sort the pairs of token and expert by expert.

    Compiled as a whole it took the host three times as long on an H200, 4.5 ms instead of 1.4.

    Returns:
        The pairs in order, int64 [X]; where each expert's end, int32 [E]; each pair's place in that
        order, int64 [T, K]; weights, f32 [T, K].
    """
    logits_TE = F.linear(x_TC.to(weights.router.dtype), weights.router)
    experts_TK, weights_TK = route(logits_TE, weights.selection_bias, spec)
    flat_X = experts_TK.flatten()
    order_X = flat_X.argsort(stable=True)
    experts_E = torch.arange(logits_TE.shape[1], device=x_TC.device)
    stops_E = torch.searchsorted(flat_X[order_X], experts_E, right=True, out_int32=True)
    places_X = torch.empty_like(order_X)
    places_X[order_X] = torch.arange(len(order_X), device=x_TC.device)
    return order_X, stops_E, places_X.view(experts_TK.shape), weights_TK


def route(logits_TE: Tensor, bias_E: Tensor | None, spec: MoeSpec) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [T, K], and their weights, f32 [T, K]."""
    if spec.scores == "softmax":
        scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
    else:
        scores_TE = logits_TE.float().sigmoid()
    ranked_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if spec.groups > 1:
        ranked_TGe = ranked_TE.view(len(ranked_TE), spec.groups, spec.experts // spec.groups)
        best_TG = ranked_TGe.topk(2, dim=-1).values.sum(dim=-1)
        kept = best_TG.topk(spec.groups_kept, dim=-1).indices
        is_lost_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter(1, kept, value=False)
        ranked_TE = ranked_TGe.masked_fill(is_lost_TG[..., None], -torch.inf).flatten(1)
    experts_TK = ranked_TE.topk(spec.chosen, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if spec.is_renormalised:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return experts_TK, weights_TK * spec.scale


def grouped_linear(rows_XI: Tensor, weights_EOI: Tensor, stops_E: Tensor) -> Tensor:
    """Return [X, O]: rows [stops[e - 1], stops[e]) times the transpose of expert e's weight.

    The one place that chooses a kernel: torch's grouped product runs on the CPU and on CUDA
    devices, empty groups included.

    Args:
        stops_E: int32, rising.
    """
    return F.grouped_mm(rows_XI, weights_EOI.transpose(1, 2), offs=stops_E)
