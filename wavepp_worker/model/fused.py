"""Small work that is one kernel on a CUDA device: torch.compile in 16 bits, eager everywhere else.

Compiled when first called with such tensors; the second length that it sees makes the rows dynamic,
widths stay constants.  `warm_up` functions call them while a stage loads, because a first wave must
not wait for a compiler.

Legend: T tokens, C hidden, H heads, D head dim, I width of an MLP, K experts per token, X = T * K.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

VARIANTS_MAX: Final = 64  # of one function

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@cache
def can_compile(device: torch.device) -> bool:
    """Whether torch.compile works here: Triton needs a C compiler, which a bare image may lack."""
    # Each function is compiled for a few dtypes, for one row and for any number, merges for up to
    # eight parts; past torch's own limit of eight it would silently run eager.
    torch._dynamo.config.recompile_limit = VARIANTS_MAX
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # the compiler raises a dozen types, and every one means the same
        first = str(error).strip().partition("\n")[0]
        logger.warning("no torch.compile here, small kernels run one by one: %s", first)
        return False
    return True


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` for CUDA; its first argument is a tensor or a sequence of them."""
    compiled = cast(Callable[P, R], torch.compile(cast(Any, function)))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        tensor = cast(Tensor, first if isinstance(first, Tensor) else cast(Any, first)[0])
        is_fast = tensor.is_cuda and tensor.dtype != torch.float32 and can_compile(tensor.device)
        return (compiled if is_fast else function)(*args, **kwargs)

    return run


@fused
def norm(x_TC: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm over the last dimension; in f32 throughout if the weight is."""
    return _norm(x_TC, weight, eps)


@fused
def add_and_norm(
    x_TC: Tensor, added_TC: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum, and its RMSNorm."""
    x_TC = x_TC + added_TC
    return x_TC, _norm(x_TC, weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    shape = x.shape[-1:]
    if weight.dtype != x.dtype:
        return (F.rms_norm(x.float(), shape, None, eps) * weight).to(x.dtype)
    return F.rms_norm(x, shape, weight, eps)


@fused
def norm_and_turn(
    qk_THD: Tensor, weight: Tensor | None, rotation_T1D: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """Return heads, divided by their root mean squares where there is a weight, and turned.

    Args:
        weight: [H, D], of q, then of k; in f32 the product is taken in f32.
    """
    if weight is not None:
        normed = F.rms_norm(qk_THD.to(weight.dtype), qk_THD.shape[-1:], None, eps)
        qk_THD = (normed * weight).to(qk_THD.dtype)
    return _turned(qk_THD, rotation_T1D)


@fused
def turn(x_THD: Tensor, rotation_T1D: tuple[Tensor, Tensor]) -> Tensor:
    """Return heads whose first R dimensions are turned, R twice the width of the rotation's."""
    return _turned(x_THD, rotation_T1D)


def _turned(x_THD: Tensor, rotation_T1D: tuple[Tensor, Tensor]) -> Tensor:
    cos_T1D, sin_T1D = rotation_T1D
    turning = 2 * cos_T1D.shape[-1]
    low, high = x_THD[..., :turning].chunk(2, dim=-1)
    parts = (low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D)
    return torch.cat((*parts, x_THD[..., turning:]), dim=-1)


@fused
def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of rows that hold both, [T, 2 * I] → [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@fused
def bounded_swiglu(gate_up: Tensor, gate_max: float, up_max: float) -> Tensor:
    """Return G tanh(a / G) sigmoid(a) U tanh(b / U), computed in fp32; SiTU."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    bounded = gate_max * torch.tanh(gate / gate_max) * gate.sigmoid()
    return (bounded * up_max * torch.tanh(up / up_max)).to(gate_up.dtype)


@fused
def combine(sorted_XC: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted sum of its experts' rows, f32 sums in the order of choice.

    Args:
        places_TK: int64, the row of each pair of token and expert.
    """
    wide = torch.promote_types(sorted_XC.dtype, torch.float32)
    out_TC = sorted_XC[places_TK[:, 0]].to(wide) * weights_TK[:, 0, None]
    for choice in range(1, places_TK.shape[1]):  # unrolled, so that it is one kernel
        out_TC = out_TC + sorted_XC[places_TK[:, choice]].to(wide) * weights_TK[:, choice, None]
    return out_TC.to(sorted_XC.dtype)


@fused
def merge(outs: Sequence[Tensor], sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over the union of disjoint sets of keys.

    Args:
        outs: [T, H, D] each, attention over one set.
        sums: f32 [H, T] each, log-sum-exp of its scores.
    """
    sums_nHT = torch.stack(list(sums))
    total_HT = sums_nHT.logsumexp(0)
    weights_nTH1 = (sums_nHT - total_HT).exp().transpose(1, 2)[..., None]
    out_THD = outs[0].float() * weights_nTH1[0]
    for out, weight in zip(outs[1:], weights_nTH1[1:], strict=True):
        out_THD = out_THD + out.float() * weight
    return out_THD.to(outs[0].dtype), total_HT
