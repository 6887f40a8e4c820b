"""Keys and values of one layer in the bytes that a decode attention backend stores.

A region of decode is [blocks n, heads H, tokens B, 2 * dims D] for each layer; what a (block, head)
holds depends on the backend (`versions.BlockLayout`).

Legend: H kv heads, T tokens, n blocks, B tokens per block, D head dim.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import torch
from torch import Tensor

from wavepp_worker.base.errors import check
from wavepp_worker.vllm_decode.versions import BlockLayout


def pack_blocks(k_nHBD: Tensor, v_nHBD: Tensor, layout: BlockLayout) -> Tensor:
    """Return whole blocks in decode's layout: [n, H, B, 2D], contiguous, dtype and device kept.

    Args:
        k_nHBD: after norm and rotation; any strides.
        v_nHBD: of the same shape and dtype.
    """
    check(k_nHBD.shape == v_nHBD.shape and k_nHBD.dim() == 4, "keys and values match in shape")
    check(k_nHBD.dtype == v_nHBD.dtype, "keys and values match in dtype")
    n, H, B, D = k_nHBD.shape
    out = k_nHBD.new_empty((n, H, B, 2 * D))
    match layout:
        case BlockLayout.TOKEN_MAJOR:
            out[..., :D] = k_nHBD
            out[..., D:] = v_nHBD
        case BlockLayout.KEYS_TRANSPOSED:
            halves = out.view(n, H, 2, B * D)
            halves[:, :, 0].view(n, H, D, B).copy_(k_nHBD.transpose(-1, -2))
            halves[:, :, 1].view(n, H, B, D).copy_(v_nHBD)
    return out


def pack_tokens(k_HTD: Tensor, v_HTD: Tensor, block_tokens: int, layout: BlockLayout) -> Tensor:
    """Return a prompt's keys and values as blocks; unused token slots of the last one are zero."""
    check(k_HTD.dim() == 3 and k_HTD.shape == v_HTD.shape, "keys and values match in shape")
    H, T, D = k_HTD.shape
    n = -(-T // block_tokens)
    padding = (0, 0, 0, n * block_tokens - T)
    k_nHBD, v_nHBD = (
        torch.nn.functional.pad(x_HTD, padding).view(H, n, block_tokens, D).transpose(0, 1)
        for x_HTD in (k_HTD, v_HTD)
    )
    return pack_blocks(k_nHBD, v_nHBD, layout)
