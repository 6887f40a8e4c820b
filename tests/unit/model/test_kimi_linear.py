"""Kimi Linear's config.json and checkpoint: which layers are what, names, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.numerics.tiny import make_tiny_model, tiny_config
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.kimi_linear import published_name
from wavepp_worker.model.spec import ModelSpec, read_facts, read_spec

LINEAR, FULL = "linear_attention", "full_attention"


def read(folder: Path, **changes: Any) -> ModelSpec:
    """Read the tiny config with changes; a change to None removes the key."""
    tree = tiny_config("kimi_linear") | changes
    tree = {name: value for name, value in tree.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(tree))
    return read_spec(folder)


def test_published_and_saved_configurations_mean_the_same(tmp_path: Path) -> None:
    """Published: layers from 1 and `model_max_length`; saved by transformers: a kind per layer."""
    published = read(tmp_path, max_position_embeddings=None, model_max_length=4096)
    saved = read(
        tmp_path,
        linear_attn_config=None,
        layer_types=[LINEAR, LINEAR, FULL, LINEAR, FULL],
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        first_k_dense_replace=None,
        mlp_layer_types=["dense", *["sparse"] * 4],
    )
    assert published == saved
    assert published.delta_layers == (0, 1, 3)
    assert published.moe_layers == (1, 2, 3, 4)
    assert published.rope.fraction == 0.0


def test_a_checkpoint_saved_by_transformers_loads(tmp_path: Path) -> None:
    """transformers writes the dense MLP under the name of the experts' layer."""
    folder = make_tiny_model(tmp_path, "kimi_linear", seed=1)
    before = read_facts(folder)
    tensors = load_file(folder / "model.safetensors")
    saved = {
        name.replace("layers.0.mlp.", "layers.0.block_sparse_moe."): value
        for name, value in tensors.items()
    }
    assert saved.keys() != tensors.keys()
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    after = read_facts(folder)
    assert (after.layers, after.delta_layers) == (before.layers, before.delta_layers)


def test_names_of_experts_stay() -> None:
    layer = "model.layers.3.block_sparse_moe"
    for part in ("experts.0.w1.weight", "gate.weight", "shared_experts.gate_proj.weight"):
        assert published_name(f"{layer}.{part}") == f"{layer}.{part}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"linear_attn_config": None}, "of each of 5 layers"),
        ({"linear_attn_config": None, "layer_types": [FULL] * 4}, "of each of 5 layers"),
        (
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1, 2, 3, 4],
                                    "num_heads": 4, "head_dim": 8}},
            "each of 5 layers once",
        ),
    ],
)  # fmt: skip
def test_relatives_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)
