"""The gated activations."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from wavepp_worker.model.mlp import gated
from wavepp_worker.model.mlp_spec import SituSpec

SITU = SituSpec(gate_max=4.0, up_max=25.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_situ_equals_its_equation(dtype: torch.dtype) -> None:
    gate, up = torch.randn((2, 300), generator=torch.Generator().manual_seed(0)).to(dtype) * 20
    got = gated(torch.cat((gate, up)), SITU)
    want = [
        4 * math.tanh(a / 4) / (1 + math.exp(-a)) * 25 * math.tanh(b / 25)
        for a, b in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    assert got.dtype == dtype
    torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), atol=1e-5, rtol=1e-5)


def test_situ_is_silu_near_zero_and_bounded_far_out() -> None:
    small = torch.linspace(-0.1, 0.1, 21)
    got = gated(torch.cat((small, small)), SITU)
    torch.testing.assert_close(got, F.silu(small) * small, atol=2e-6, rtol=0)
    assert gated(torch.tensor([1e4, -1e4]), SITU).item() == pytest.approx(-100.0)


def test_situ_of_16_bits_is_computed_in_32() -> None:
    gate, up = torch.randn((2, 300), generator=torch.Generator().manual_seed(1)).bfloat16() * 5
    want = gated(torch.cat((gate, up)).float(), SITU)
    assert torch.equal(gated(torch.cat((gate, up)), SITU), want.bfloat16())
