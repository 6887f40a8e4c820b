"""The chunked delta rule and the short convolution against their definitions, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wavepp_worker.model.delta_rule import (
    bounded_decay,
    delta_rule,
    short_convolution,
    softplus_decay,
)

HEADS, K, V, CHANNELS, WIDTH = 3, 8, 6, 10, 4
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def make_inputs(tokens: int, gates: int, seed: int = 0) -> list[Tensor]:
    """Return q, k, v, g, beta; some decays are nearly none, some forget within a token."""
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, HEADS, K, generator=draw) for _ in range(2))
    v = torch.randn(tokens, HEADS, V, generator=draw)
    g = -torch.exp(2 * torch.randn(tokens, HEADS, gates, generator=draw) - 2)
    return [q, k, v, g, torch.rand(tokens, HEADS, generator=draw)]


def make_state(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(HEADS, K, V, generator=torch.Generator().manual_seed(9)).to(dtype)


def by_definition(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state, one token at a time, in the state's type."""
    q, k, v, g, beta = (part.to(state.dtype) for part in inputs)
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() * K**-0.5
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    outputs = []
    for t in range(len(q)):
        state = state * g[t].exp()[..., None]
        correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * correction[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs), state


@pytest.mark.parametrize("gates", [1, K], ids=["per-head", "per-channel"])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_chunks_equal_the_definition(tokens: int, gates: int) -> None:
    inputs = make_inputs(tokens, gates)
    want = by_definition(inputs, make_state(torch.float64))
    exact = delta_rule(*inputs, make_state(torch.float64))
    rounded = delta_rule(*inputs, make_state())
    for got, near, goal in zip(exact, rounded, want, strict=True):
        torch.testing.assert_close(got, goal, atol=1e-12, rtol=1e-10)
        assert near.dtype == torch.float32
        torch.testing.assert_close(near.double(), goal, **CLOSE)


@pytest.mark.parametrize("gates", [1, K], ids=["per-head", "per-channel"])
def test_a_decay_that_forgets_everything_stays_finite(gates: int) -> None:
    """Sums of large decays leave less precision for the small ones between them, no more."""
    q, k, v, g, beta = make_inputs(130, gates)
    inputs = [q, k, v, g * 100.0, beta]
    out, state = delta_rule(*inputs, make_state())
    want_out, want_state = by_definition(inputs, make_state(torch.float64))
    torch.testing.assert_close(out.double(), want_out, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(state.double(), want_state, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("gates", [1, K], ids=["per-head", "per-channel"])
@pytest.mark.parametrize("parts", [[64, 86], [128, 22], [16, 2, 2, 129, 1]], ids=str)
def test_the_final_state_carries_a_sequence_on(parts: list[int], gates: int) -> None:
    """Cut at multiples of 64 nothing changes at all, elsewhere only the rounding does."""
    inputs = make_inputs(150, gates)
    want_out, want_state = delta_rule(*inputs, make_state())
    state, outputs = make_state(), []
    for part in zip(*(tensor.split(parts) for tensor in inputs), strict=True):
        before = state.clone()
        out, after = delta_rule(*part, state)
        assert torch.equal(state, before)
        outputs.append(out)
        state = after
    if all(part % 64 == 0 for part in parts[:-1]):
        assert torch.equal(torch.cat(outputs), want_out)
        assert torch.equal(state, want_state)
    torch.testing.assert_close(torch.cat(outputs), want_out, **CLOSE)
    torch.testing.assert_close(state, want_state, **CLOSE)


def test_the_per_channel_rule_with_equal_channels_is_the_per_head_rule() -> None:
    q, k, v, g, beta = make_inputs(100, 1)
    want = delta_rule(q, k, v, g, beta, make_state())
    got = delta_rule(q, k, v, g.expand(-1, -1, K), beta, make_state())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_the_decay_is_computed_in_single_precision() -> None:
    raw = torch.tensor([[[0.5]], [[-3.0]]], dtype=torch.bfloat16)
    a_log, bias = torch.tensor([1.5]), torch.tensor([[0.25]])
    got = softplus_decay(raw, a_log, bias)
    want = -torch.exp(a_log) * torch.log1p(torch.exp(raw.float() + 0.25))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("parts", [[20], [1] * 20, [2] * 10, [17, 1, 2]], ids=str)
def test_the_convolution_sees_its_tail(parts: list[int]) -> None:
    """Pieces shorter than the kernel keep older rows of the tail."""
    draw = torch.Generator().manual_seed(4)
    x, weight = (
        torch.randn(20, CHANNELS, generator=draw),
        torch.randn(CHANNELS, WIDTH, generator=draw),
    )
    padded = torch.cat((torch.zeros(WIDTH - 1, CHANNELS), x))
    want = torch.stack([(padded[t : t + WIDTH] * weight.t()).sum(0) for t in range(20)])
    tail, outputs = torch.zeros(WIDTH - 1, CHANNELS), []
    for part in x.split(parts):
        out, tail = short_convolution(part, weight, tail)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs), torch.nn.functional.silu(want))
    assert torch.equal(tail, x[-3:])


def test_a_bounded_decay_equals_its_equation_and_is_no_clamp() -> None:
    raw = torch.randn(20, HEADS, K, generator=torch.Generator().manual_seed(3)) * 4
    a_log, bias = torch.tensor([-1.0, 0.0, 1.0]), torch.linspace(-2, 2, HEADS * K).view(HEADS, K)
    got = bounded_decay(raw.bfloat16(), a_log, bias, -5.0)
    want = -5.0 / (1 + (-a_log.exp()[:, None] * (raw.bfloat16().double() + bias)).exp())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, **CLOSE)
    assert ((got >= -5.0) & (got <= 0.0)).all()
    assert (got - softplus_decay(raw, a_log, bias).clamp(min=-5.0)).abs().max() > 1.0
