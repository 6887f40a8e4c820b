"""Attention residuals: what replaces the one stream to which every layer adds.

    x = sum over v of softmax_v(w . v / rms(v)) v,   v in [blocks ..., prefix]

Every so many layers the prefix, the sum of what the layers since have added, is put on a list of
block starts and begins anew.  A layer reads a mix of all of them, per token, with weights of its
own; before layer i of blocks of B layers 1 + ceil(i / B) vectors per token exist, and all cross
the boundary of a stage there.

    layer           0    1    2    3    4    5          B = 2
    blocks before   -    e    e    e,p  e,p  e,p,p      e: the embedding

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

    Without blocks it is the ordinary stream: read as it is, and added to.  What a layer adds waits
    for the next read, so that sum and norm are one kernel.
    """

    def __init__(self, prefix_TC: Tensor, blocks_TC: Sequence[Tensor], eps: float) -> None:
        self._prefix_TC = prefix_TC
        self._added_TC: Tensor | None = None
        self.blocks_TC = list(blocks_TC)
        self._eps = eps

    @property
    def prefix_TC(self) -> Tensor:
        """The sum of what the layers since the last block start have added."""
        if self._added_TC is not None:
            self._prefix_TC = self._prefix_TC + self._added_TC
            self._added_TC = None
        return self._prefix_TC

    def normed(self, query_C: Tensor | None, weight: Tensor) -> Tensor:
        """Return the RMSNorm of what a layer reads, [T, C].

        Args:
            query_C: with what it mixes; None without attention residuals.
        """
        if query_C is not None:
            mixed = mix(self.prefix_TC, self.blocks_TC, query_C, self._eps)
            return norm(mixed, weight, self._eps)
        if self._added_TC is None:
            return norm(self._prefix_TC, weight, self._eps)
        self._prefix_TC, normed = add_and_norm(self._prefix_TC, self._added_TC, weight, self._eps)
        self._added_TC = None
        return normed

    def add(self, x_TC: Tensor, *, begins_block: bool = False) -> None:
        """Add a layer's output, or set the prefix aside and begin the next with it."""
        prefix_TC = self.prefix_TC
        if begins_block:
            self.blocks_TC.append(prefix_TC)
            self._prefix_TC = x_TC
        else:
            self._added_TC = x_TC

    def keep(self, rows_L: Tensor) -> None:
        """Drop all tokens but those of `rows_L`."""
        self._prefix_TC = self.prefix_TC[rows_L]
        self.blocks_TC = [block[rows_L] for block in self.blocks_TC]


def mix(prefix_TC: Tensor, blocks_TC: Sequence[Tensor], query_C: Tensor, eps: float) -> Tensor:
    """Return the layer's input [T, C], in the type of `prefix_TC`; computed in fp32.

    Args:
        blocks_TC: block starts in order; without any the prefix itself is returned.
        query_C: fp32; the norm's weight times the projection's.
        eps: of the norm.
    """
    if not blocks_TC:
        return prefix_TC
    # Vector by vector: nothing depends on where the list was cut off and sent on.
    wide = torch.promote_types(prefix_TC.dtype, torch.float32)
    vectors = [part.to(wide) for part in (*blocks_TC, prefix_TC)]
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
    return mixed_TC.to(prefix_TC.dtype)
