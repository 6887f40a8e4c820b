"""The mix of block starts and prefix that a layer reads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wavepp_worker.model.attention_residual import mix

TOKENS, HIDDEN, EPS = 7, 24, 1e-5


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3])
def test_mix_equals_its_equation(count: int, dtype: torch.dtype) -> None:
    """One token and one vector at a time; the vectors themselves are mixed, not their norms."""
    vectors = (draw(count + 1, TOKENS, HIDDEN) * 3).to(dtype)
    query = draw(HIDDEN).to(dtype)
    got = mix(vectors[-1], vectors[:-1].unbind(), query, EPS)
    for token in range(TOKENS):
        raw = vectors[:, token].tolist()
        scores = [
            sum(w * x for w, x in zip(query.tolist(), row, strict=True))
            / math.sqrt(sum(x * x for x in row) / HIDDEN + EPS)
            for row in raw
        ]
        total = sum(map(math.exp, scores))
        want = [
            sum(
                math.exp(score) / total * row[place] for score, row in zip(scores, raw, strict=True)
            )
            for place in range(HIDDEN)
        ]
        torch.testing.assert_close(
            got[token], torch.tensor(want, dtype=dtype), atol=1e-5, rtol=1e-5
        )


def test_without_blocks_the_prefix_passes() -> None:
    prefix = draw(TOKENS, HIDDEN)
    assert mix(prefix, [], draw(HIDDEN), EPS) is prefix


def test_blocks_that_came_from_another_stage_mix_exactly_alike() -> None:
    """Views of one received tensor, and tensors of their own."""
    blocks = [draw(TOKENS, HIDDEN + place)[:, :HIDDEN].contiguous() for place in range(3)]
    prefix, query = draw(HIDDEN, TOKENS).t().contiguous(), draw(HIDDEN)
    received = torch.stack(blocks).unbind()
    assert torch.equal(mix(prefix, received, query, EPS), mix(prefix, blocks, query, EPS))


def test_sixteen_bits_are_mixed_in_32() -> None:
    vectors = draw(3, TOKENS, HIDDEN).bfloat16()
    wide = vectors.float()
    query = draw(HIDDEN)
    want = mix(wide[-1], wide[:-1].unbind(), query, EPS)
    assert torch.equal(mix(vectors[-1], vectors[:-1].unbind(), query, EPS), want.bfloat16())
