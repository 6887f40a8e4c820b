"""Rotary positions: angles per position, and turning heads by them.

Legend: T tokens, H heads, D head dim, R the part of it that turns.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import math

import torch
from torch import Tensor

from wavepp_worker.model.spec import RopeSpec


def rotate(x_THD: Tensor, rotation_T1D: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first R dimensions of each head, R twice the width of the rotation's parts."""
    cos_T1D, sin_T1D = rotation_T1D
    turning = 2 * cos_T1D.shape[-1]
    low, high = x_THD[..., :turning].chunk(2, dim=-1)
    turned = (low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D)
    return torch.cat((*turned, x_THD[..., turning:]), dim=-1)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return f32 [R / 2] angles per position, R = the turning first part of the head dimension.

    Dimension i turns together with i + R / 2.
    """
    turning = int(head_dim * rope.fraction)
    exponents = torch.arange(0, turning, 2, dtype=torch.int64).float() / turning
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Wavelengths much shorter than the original context stay, much longer ones are
        # stretched by `factor`, those between are blended.
        turns = rope.original_context_tokens * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * frequencies / rope.factor
    if rope.kind == "yarn":
        # Dimensions that turn often within the original context stay, those that hardly turn are
        # stretched by `factor`; between `beta_fast` and `beta_slow` turns they are blended.
        low = max(math.floor(_dimension(rope, rope.beta_fast, turning)), 0)
        high = min(math.ceil(_dimension(rope, rope.beta_slow, turning)), turning - 1)
        places = torch.arange(turning // 2, dtype=torch.float32)
        stretch = ((places - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        return (1.0 - stretch) * frequencies + stretch * frequencies / rope.factor
    return frequencies


def _dimension(rope: RopeSpec, turns: float, turning: int) -> float:
    """Return the (fractional) dimension that turns so often within the original context."""
    wavelength = rope.original_context_tokens / (turns * 2 * math.pi)
    return turning * math.log(wavelength) / (2 * math.log(rope.theta))
