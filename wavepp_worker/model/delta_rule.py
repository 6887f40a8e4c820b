"""The gated delta rule over one sequence, in chunks, and the short convolution before it.

    S <- Diag(exp g) S ;  S <- S + k (beta (v - S'k))' ;  o = S'q

A chunk of 64 tokens is a few products of matrices: its tokens' corrections depend on each other
through a unit lower triangular system, and on everything before it through the state S alone.

    per chunk, all at once     decays, triangular system, products of queries and keys
    chunk after chunk          o = q S + (q k') v_new ;  S = S + k' v_new, all decayed

Sequences that are cut at multiples of 64 give bit for bit what they give uncut, if no piece is a
single token; elsewhere only the rounding differs.  The decay may be one number per head (GDN) or
one per key channel (KDA).  Plain torch; `delta_kernel` chooses it or a faster kernel.  The state's
type, fp32 outside of proofs, is the type of everything here.

Legend: T tokens, H heads, K key dim, V value dim, G 1 or K, N chunks, c tokens of a chunk,
C channels of the convolution, W its width.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

CHUNK_TOKENS: Final = 64
L2_EPS: Final = 1e-6


def delta_rule(  # noqa: PLR0917 - the rule has six operands
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THG: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a sequence's tokens from `state_HKV`; return the outputs and the state after the last.

    Args:
        q_THK, k_THK: any floating type and length; made unit vectors here, q scaled by K^-1/2.
        v_THV: any floating type.
        g_THG: decay in log space, not above 0.
        beta_TH: in [0, 1].
        state_HKV: fp32, or fp64; left as it is.

    Returns:
        out_THV and the final state, both of the state's type, the latter a new tensor.
    """
    dtype, tokens = state_HKV.dtype, len(q_THK)
    size = CHUNK_TOKENS if tokens > 1 else 1
    q, k, v, g, beta = (
        _chunks(part.to(dtype), size) for part in (q_THK, k_THK, v_THV, g_THG, beta_TH[..., None])
    )
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    sums_NHcG = g.cumsum(dim=2)
    decay_NHcG = sums_NHcG.exp()
    system, scores = _decayed_products(k, k, sums_NHcG) * beta, _decayed_products(q, k, sums_NHcG)
    solved = torch.linalg.solve_triangular(
        system,
        torch.cat((v * beta, k * beta * decay_NHcG), dim=-1),
        upper=False,
        unitriangular=True,
    )
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    last_NH1G = sums_NHcG[:, :, -1:]
    queries, writes = q * decay_NHcG, (k * (last_NH1G - sums_NHcG).exp()).transpose(-1, -2)
    kept_NHG1 = last_NH1G.exp().transpose(-1, -2)
    state, out = state_HKV, torch.empty_like(v)
    for index in range(len(v)):
        fresh_HcV = values[index] - keys[index] @ state
        out[index] = queries[index] @ state + scores[index] @ fresh_HcV
        state = state * kept_NHG1[index] + writes[index] @ fresh_HcV
    return out.transpose(1, 2).flatten(0, 1)[:tokens], state


def softplus_decay(raw_THG: Tensor, a_log_H: Tensor, bias_HG: Tensor) -> Tensor:
    """Return g of GDN and of Kimi Linear, fp32: -exp(A) softplus(raw + bias)."""
    return -a_log_H.float().exp()[:, None] * F.softplus(raw_THG.float() + bias_HG.float())


def bounded_decay(raw_THG: Tensor, a_log_H: Tensor, bias_HG: Tensor, bound: float) -> Tensor:
    """Return g of Kimi K3, fp32: bound sigmoid(exp(A) (raw + bias))."""
    return bound * (a_log_H.float().exp()[:, None] * (raw_THG.float() + bias_HG.float())).sigmoid()


def short_convolution(x_TC: Tensor, weight_CW: Tensor, tail_RC: Tensor) -> tuple[Tensor, Tensor]:
    """Return SiLU of the causal depthwise convolution, and the tail for the tokens that follow.

    Args:
        tail_RC: the last R = W - 1 rows before `x_TC`, zeros at the start of a sequence.
    """
    # A convolution kernel may choose another algorithm for another length, and on CUDA 19 bits.
    tokens, weight_WC = len(x_TC), weight_CW.t().float().contiguous()
    rows = torch.cat((tail_RC.to(x_TC.dtype), x_TC))
    mixed_TC = rows[:tokens] * weight_WC[0]
    for shift in range(1, len(weight_WC)):
        mixed_TC = mixed_TC.addcmul(rows[shift : shift + tokens], weight_WC[shift])
    return F.silu(mixed_TC).to(x_TC.dtype), rows[tokens:]


def _chunks(part_THX: Tensor, size: int) -> Tensor:
    """Return [N, H, size, X]; rows of zeros fill the last chunk, they change no state."""
    padded = F.pad(part_THX, (0, 0, 0, 0, 0, -len(part_THX) % size))
    return padded.view(-1, size, *part_THX.shape[1:]).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def _decayed_products(left: Tensor, right: Tensor, sums: Tensor) -> Tensor:
    """Return the lower triangle of sum_K left_i right_j exp(sums_i - sums_j), [N, H, c, c]."""
    if sums.shape[-1] == 1:
        # Above the diagonal the exponent is positive and may overflow, so it is masked before.
        gaps = (sums - sums.transpose(-1, -2)).tril()
        return (left @ right.transpose(-1, -2) * gaps.exp()).tril()
    columns = []
    for index in range(sums.shape[2]):
        gaps = (sums - sums[:, :, index : index + 1]).clamp(max=0.0)
        columns.append((left * gaps.exp() * right[:, :, index : index + 1]).sum(dim=-1))
    return torch.stack(columns, dim=-1).tril()
