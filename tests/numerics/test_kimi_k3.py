"""Kimi K3's stages against the reference: every cut, every way to chunk, resumed, decoded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.numerics.k3_reference import K3Reference, k3_config, k3_tensors

PROMPT_TOKENS = 193  # 12 blocks of 16 and one token
SEED = 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> K3Reference:
    folder = tmp_path_factory.mktemp("model")
    tree = k3_config()
    (folder / "config.json").write_text(json.dumps(tree))
    save_file(k3_tensors(tree, SEED), folder / "model.safetensors")
    return K3Reference(Path(folder))


def make_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(262) for _ in range(tokens)]


def test_the_reference_is_causal_and_far_from_other_routes(reference: K3Reference) -> None:
    prompt = make_prompt(11, PROMPT_TOKENS)
    assert reference.routing_margin(prompt) > 1e-4
    whole, part = reference.logits(prompt), reference.logits(prompt[:60])
    torch.testing.assert_close(part, whole[:60])
    assert (reference.logits([5, *prompt[1:60]]) - part)[-1].abs().max() > 1e-3


@pytest.mark.parametrize("layer", range(6))
def test_vectors_between_layers(reference: K3Reference, layer: int) -> None:
    """One prefix and one vector per block that has begun: 1 + ceil(i / block)."""
    prefix, blocks = reference.boundary(make_prompt(1, 5), layer)
    assert len(blocks) == (layer + 1) // 2
    assert all(block.shape == prefix.shape for block in blocks)
