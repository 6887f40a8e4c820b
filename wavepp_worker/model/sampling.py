"""Logits → tokens.  Equal seed, position and logits give the equal token, on any device.

Nothing here waits for the device: results are tensors that the caller reads after its fence.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from wavepp_worker.base.errors import check
from wavepp_worker.wire.mailbox import Sampling


@torch.inference_mode()
def sample(
    logits_LV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Pick one token per row.

    Args:
        logits_LV: f32, any device.
        samplings: one per row.
        positions: one per row: tokens before the one to pick.  With the seed it fixes the draw,
            so a request continued elsewhere goes on as it would have here.

    Returns:
        tokens_L int64 and logprobs_L f32 on the logits' device.  A logprob is of the model's own
        distribution, before temperature, top_k and top_p; a NaN there means a broken forward.
    """
    check(len(logits_LV) == len(samplings) == len(positions), "one sampling per row of logits")
    tokens_L = logits_LV.argmax(dim=-1)
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            tokens_L[row] = _draw(logits_LV[row], sampling, position)
    logprobs_LV = logits_LV.log_softmax(dim=-1)
    return tokens_L, logprobs_LV.gather(1, tokens_L[:, None])[:, 0]


def _draw(logits_V: Tensor, sampling: Sampling, position: int) -> Tensor:
    """Invert the distribution function of the filtered, sorted probabilities at one number."""
    sorted_V, tokens_V = logits_V.sort(descending=True, stable=True)
    if 0 < sampling.top_k < len(sorted_V):
        sorted_V = sorted_V[: sampling.top_k]
    # In f64, so that the sums of 100,000 small numbers decide alike everywhere.
    probabilities_V = ((sorted_V - sorted_V[0]).double() / sampling.temperature).softmax(dim=-1)
    mass_V = probabilities_V.cumsum(dim=-1)
    # A token stays while the mass before it is below top_p; the first one always does.
    kept_V = (mass_V - probabilities_V) < sampling.top_p
    kept_V[0] = True
    total = torch.where(kept_V, probabilities_V, 0.0).sum()
    choice = (mass_V <= _uniform(sampling.seed, position) * total).sum()
    last = kept_V.sum() - 1
    return tokens_V[torch.minimum(choice, last)]


def _uniform(seed: int | None, position: int) -> float:
    """Return a number in [0, 1): fixed by seed and position, fresh without a seed."""
    if seed is None:
        return secrets.randbits(53) / (1 << 53)
    digest = hashlib.sha256(f"{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / (1 << 53)
