"""Attention residuals: what replaces the one stream to which every layer adds.

    x = sum over v of softmax_v(w . v / rms(v)) v,   v in [starts ..., running sum]

Every so many layers the running sum of what they added is set aside, on a list, and begins anew.
A layer reads a mix of the list and the sum, per token, with weights of its own.  Before layer i of
groups of G layers 1 + ceil(i / G) vectors per token exist, and all cross a stage's boundary there.
(Its authors say blocks for the list and prefix for the sum, which are other things here.)

    layer      0    1    2    3    4    5          G = 2, s: a sum of two layers
    list       -    e    e    e,s  e,s  e,s,s      e: the embedding

Legend: T tokens, C hidden.
"""

# ruff: noqa: N802, N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavepp_worker.model.fused import add_and_norm, norm


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualWeights:
    """With what one layer mixes: each fp32 [C], the norm's weight times the projection's."""

    attention: Tensor
    ffn: Tensor


class Stream:
    """What the layers of a stage read and add to.

    Without attention residuals it is the ordinary stream: read as it is, and added to.  What a
    layer adds waits for the next read, so that sum and norm are one kernel.
    """

    def __init__(self, sum_TC: Tensor, starts_TC: Sequence[Tensor], eps: float) -> None:
        self._sum_TC = sum_TC
        self._added_TC: Tensor | None = None
        self.starts_TC = list(starts_TC)
        self._eps = eps

    @property
    def sum_TC(self) -> Tensor:
        """The running sum of what layers have added."""
        if self._added_TC is not None:
            self._sum_TC = self._sum_TC + self._added_TC
            self._added_TC = None
        return self._sum_TC

    def normed(self, query_C: Tensor | None, weight: Tensor) -> Tensor:
        """Return the RMSNorm of what a layer reads, [T, C].

        Args:
            query_C: with what it mixes; None without attention residuals.
        """
        if query_C is not None:
            mixed = mix(self.sum_TC, self.starts_TC, query_C, self._eps)
            return norm(mixed, weight, self._eps)
        if self._added_TC is None:
            return norm(self._sum_TC, weight, self._eps)
        self._sum_TC, normed = add_and_norm(self._sum_TC, self._added_TC, weight, self._eps)
        self._added_TC = None
        return normed

    def add(self, x_TC: Tensor, *, begins_group: bool = False) -> None:
        """Add a layer's output, or set the sum aside and begin the next with it."""
        sum_TC = self.sum_TC
        if begins_group:
            self.starts_TC.append(sum_TC)
            self._sum_TC = x_TC
        else:
            self._added_TC = x_TC

    def keep(self, rows_L: Tensor) -> None:
        """Drop all tokens but those of `rows_L`."""
        self._sum_TC = self.sum_TC[rows_L]
        self.starts_TC = [start[rows_L] for start in self.starts_TC]


def mix(sum_TC: Tensor, starts_TC: Sequence[Tensor], query_C: Tensor, eps: float) -> Tensor:
    """Return the layer's input [T, C], in the type of `sum_TC`; computed in fp32.

    Args:
        starts_TC: the list, in order; while it is empty the sum itself is returned.
        query_C: fp32; the norm's weight times the projection's.
        eps: of the norm.
    """
    if not starts_TC:
        return sum_TC
    # Vector by vector: nothing depends on where the list was cut off and sent on.
    wide = torch.promote_types(sum_TC.dtype, torch.float32)
    vectors = [part.to(wide) for part in (*starts_TC, sum_TC)]
    scores_NT = torch.stack(
        [
            (part * query_C).sum(dim=-1) * (part.square().mean(dim=-1) + eps).rsqrt()
            for part in vectors
        ]
    )
    shares_NT1 = scores_NT.softmax(dim=0)[..., None]
    mixed_TC = shares_NT1[0] * vectors[0]
    for share_T1, part in zip(shares_NT1[1:], vectors[1:], strict=True):
        mixed_TC = mixed_TC.addcmul(share_T1, part)
    return mixed_TC.to(sum_TC.dtype)
