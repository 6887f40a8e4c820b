"""The router's options and the grouped products, against transformers and against a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.mlp_spec import SituSpec
from wavepp_worker.model.moe import (
    LatentWeights,
    MoeWeights,
    experts_forward,
    grouped_linear,
    route,
)
from wavepp_worker.model.moe_spec import MoeSpec, check_moe

TOKENS, HIDDEN, EXPERTS, WIDTH = 50, 24, 16, 12


def make_spec(**changes: Any) -> MoeSpec:
    fields = {
        "layers": (0,), "experts": EXPERTS, "chosen": 3, "width": WIDTH, "scores": "softmax",
        "is_renormalised": True,
    }  # fmt: skip
    return MoeSpec(**(fields | changes))


def make_weights(seed: int, *, has_bias: bool) -> MoeWeights:
    draw = torch.Generator().manual_seed(seed)
    return MoeWeights(
        router=torch.randn((EXPERTS, HIDDEN), generator=draw) * 0.5,
        selection_bias=torch.randn(EXPERTS, generator=draw) * 0.3 if has_bias else None,
        gate_up=torch.randn((EXPERTS, 2 * WIDTH, HIDDEN), generator=draw) * 0.2,
        down=torch.randn((EXPERTS, HIDDEN, WIDTH), generator=draw) * 0.3,
    )


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(),
        make_spec(is_renormalised=False),
        make_spec(chosen=1),
        make_spec(scores="sigmoid", has_selection_bias=True),
        make_spec(
            scores="sigmoid", has_selection_bias=True, groups=4, groups_kept=2, scale=2.5, chosen=4
        ),
    ],
    ids=["renormalised", "raw", "one", "sigmoid", "groups"],
)
def test_experts_equal_a_loop_over_tokens(spec: MoeSpec) -> None:
    """Written from the equations: no sorting, no grouping, one token and one expert at a time."""
    weights = make_weights(1, has_bias=spec.has_selection_bias)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(2))
    got = experts_forward(x, weights, spec)
    for token in range(TOKENS):
        logits = weights.router @ x[token]
        scores = logits.softmax(0) if spec.scores == "softmax" else logits.sigmoid()
        ranked = scores + weights.selection_bias if spec.has_selection_bias else scores
        size = EXPERTS // spec.groups
        ranks = {
            group: sum(sorted(ranked[group * size : (group + 1) * size].tolist())[-2:])
            for group in range(spec.groups)
        }
        kept = sorted(ranks, key=ranks.__getitem__)[-spec.groups_kept :]
        allowed = [expert for expert in range(EXPERTS) if expert // size in kept]
        chosen = sorted(allowed, key=ranked.tolist().__getitem__)[-spec.chosen :]
        total = sum(scores[expert] for expert in chosen) if spec.is_renormalised else 1.0
        want = torch.zeros(HIDDEN)
        for expert in chosen:
            gate, up = (weights.gate_up[expert] @ x[token]).chunk(2)
            added = weights.down[expert] @ (F.silu(gate) * up)
            want += spec.scale * scores[expert] / total * added
        torch.testing.assert_close(got[token], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("situ", [None, SituSpec(gate_max=4.0, up_max=25.0)], ids=["silu", "situ"])
def test_latent_experts_equal_a_loop_over_tokens(situ: SituSpec | None) -> None:
    """The router reads x, the experts W_down x; their weighted sum is normed, then widened."""
    latent, eps = 8, 1e-4
    spec = make_spec(scores="sigmoid", latent=latent, latent_eps=eps, situ=situ)
    draw = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    weights = MoeWeights(
        router=values(EXPERTS, HIDDEN) * 0.5,
        selection_bias=None,
        gate_up=values(EXPERTS, 2 * WIDTH, latent),
        down=values(EXPERTS, latent, WIDTH) * 0.3,
        latent=LatentWeights(
            down=values(latent, HIDDEN), norm=1 + 0.3 * values(latent), up=values(HIDDEN, latent)
        ),
    )
    assert weights.latent is not None
    x = values(TOKENS, HIDDEN)
    got = experts_forward(x, weights, spec)
    for token in range(TOKENS):
        scores = (weights.router @ x[token]).sigmoid()
        chosen = scores.argsort(descending=True)[: spec.chosen].tolist()
        total = torch.zeros(latent)
        for expert in chosen:
            a, b = (weights.gate_up[expert] @ (weights.latent.down @ x[token])).chunk(2)
            inner = F.silu(a) * b
            if situ is not None:
                inner = 4 * (a / 4).tanh() * a.sigmoid() * 25 * (b / 25).tanh()
            total += scores[expert] / scores[chosen].sum() * (weights.down[expert] @ inner)
        normed = total / (total.square().mean() + eps).sqrt() * weights.latent.norm
        torch.testing.assert_close(got[token], weights.latent.up @ normed, atol=1e-4, rtol=1e-4)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    spec = make_spec(scores="sigmoid", has_selection_bias=True, chosen=2)
    bias = torch.zeros(EXPERTS)
    bias[[3, 9]] = 5.0
    logits = torch.randn((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(3))
    experts, weights = route(logits, bias, spec)
    assert experts.sort(dim=1).values.tolist() == [[3, 9]] * TOKENS
    scores = logits.sigmoid().gather(1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(dim=1, keepdim=True))


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """FS-16"""
    spec, weights = make_spec(), make_weights(4, has_bias=False)
    x = torch.randn((TOKENS, HIDDEN), generator=torch.Generator().manual_seed(5))
    whole = experts_forward(x, weights, spec)
    parts = torch.cat(
        [experts_forward(x[:7], weights, spec), experts_forward(x[7:], weights, spec)]
    )
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)
    assert experts_forward(x[:0], weights, spec).shape == (0, HIDDEN)


def test_empty_groups_are_left_out() -> None:
    rows, weights = torch.randn(5, 8), torch.randn(4, 6, 8)
    got = grouped_linear(rows, weights, torch.tensor([0, 2, 2, 5], dtype=torch.int32))
    want = torch.cat([rows[:2] @ weights[1].T, rows[2:] @ weights[3].T])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chosen": 17}, "17 experts per token, of 16"),
        ({"groups": 3}, "16 experts cannot form 3"),
        ({"groups": 16, "groups_kept": 4}, "groups of 2 or more"),
        ({"groups": 4, "groups_kept": 5}, "5 of 4 groups"),
        ({"groups": 4, "groups_kept": 1, "chosen": 5}, "of 4 to choose from"),
    ],
)
def test_impossible_choices_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_moe(make_spec(**changes), Path("config.json"))
