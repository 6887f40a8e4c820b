"""Rotary positions: the angles per position; `fused` turns heads by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavepp_worker.model.spec import RopeSpec


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
