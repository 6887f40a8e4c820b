"""Which code computes the gated delta rule: plain torch, or fla-core's Triton kernels.

    fp32, or no CUDA device, or fla-core not installed    `delta_rule`
    16 bits on a CUDA device, one decay per head (GDN)    `chunk_gated_delta_rule`, states in fp32
    16 bits on a CUDA device, one per channel (KDA)       `chunk_kda`, states in fp32

fla-core is an extra (`pip install 'wavepp-worker[fla]'`), and imported when it is used first: its
kernels need Triton, which needs a device.  They are compiled and tuned for the model's heads when a
stage loads (about a minute on an H200 without Triton's cache), because a first wave that takes so
long would count as a stall.
"""

# ruff: noqa: N803 - shape suffixes are upper case
from __future__ import annotations

import importlib.util
import logging
import time
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from wavepp_worker.model.delta_rule import delta_rule
from wavepp_worker.model.delta_spec import DeltaSpec

WARM_UP_TOKENS: Final = (1, 64, 1024)

logger = logging.getLogger(__name__)


def run_delta_rule(  # noqa: PLR0917 - the rule has six operands
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g_THG: Tensor, beta_TH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Run a sequence's tokens; arguments and results as of `delta_rule`.

    The outputs have the type of `v_THV` where a kernel computes them.
    """
    is_kda = g_THG.shape[-1] > 1
    kernel = chunk_kernel(is_kda) if q_THK.is_cuda and q_THK.dtype != torch.float32 else None
    if kernel is None:
        return delta_rule(q_THK, k_THK, v_THV, g_THG, beta_TH, state_HKV)
    out, states = kernel(
        q_THK[None],
        k_THK[None],
        v_THV[None],
        g_THG[None] if is_kda else g_THG[None, ..., 0],
        beta_TH[None].to(q_THK.dtype),
        scale=q_THK.shape[-1] ** -0.5,
        initial_state=state_HKV[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], states[0]


def warm_up(spec: DeltaSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Have the kernel compiled, if one will be used."""
    is_kda = spec.decay_rank > 0
    if device.type != "cuda" or dtype == torch.float32 or chunk_kernel(is_kda) is None:
        return
    began = time.monotonic()
    for tokens in WARM_UP_TOKENS:
        q = torch.zeros(tokens, spec.value_heads, spec.key_dim, device=device, dtype=dtype)
        v = torch.zeros(tokens, spec.value_heads, spec.value_dim, device=device, dtype=dtype)
        decays = spec.key_dim if is_kda else 1
        g = torch.zeros(tokens, spec.value_heads, decays, device=device)
        state = g.new_zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        run_delta_rule(q, q, v, g, g[..., 0].to(dtype), state)
    torch.cuda.synchronize(device)
    logger.info("kernels of linear attention ready in %.1f s", time.monotonic() - began)


@cache
def chunk_kernel(is_kda: bool) -> Any | None:
    """Return fla-core's kernel, or None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        logger.warning("no fla-core: linear attention runs on plain torch, several times slower")
        return None
    if is_kda:
        from fla.ops.kda import chunk_kda

        return chunk_kda
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule
