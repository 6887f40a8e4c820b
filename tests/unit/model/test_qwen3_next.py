"""Qwen3-Next's and Qwen3.5's config.json: which layers are what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.tiny import tiny_config
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.model.qwen3_next import attention_input_order, delta_input_order
from wavepp_worker.model.spec import ModelSpec, read_facts, read_spec, tensor_shapes

LINEAR, FULL = "linear_attention", "full_attention"


def read(folder: Path, family: str = "qwen3_next", **changes: Any) -> ModelSpec:
    """Read the tiny config with changes; a change to None removes the key."""
    tree = tiny_config(family) | changes
    tree = {name: value for name, value in tree.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(tree))
    return read_spec(folder)


def test_the_family_is_what_transformers_says(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert spec.delta_layers == (0, 1, 3)
    assert (spec.has_qk_norm, spec.has_offset_norms, spec.has_attention_gate) == (True,) * 3
    assert (spec.rope.fraction, spec.delta.channels, spec.delta.tail_rows) == (0.5, 64, 3)


def test_defaults_are_the_familys(tmp_path: Path) -> None:
    from transformers import Qwen3NextConfig

    names = ["layer_types", "partial_rotary_factor", "head_dim", "mlp_only_layers"]
    names += [name for name in tiny_config("qwen3_next") if name.startswith("linear_")]
    spec = read(tmp_path, num_hidden_layers=9, num_experts=0, **dict.fromkeys(names))
    want = Qwen3NextConfig(num_hidden_layers=9)
    assert [
        LINEAR if layer in spec.delta_layers else FULL for layer in range(9)
    ] == want.layer_types
    assert spec.head_dim == want.head_dim
    assert spec.rope.fraction == want.rope_parameters["partial_rotary_factor"]
    assert spec.delta is not None
    assert (spec.delta.key_heads, spec.delta.value_heads) == (16, 32)
    assert (spec.delta.key_dim, spec.delta.value_dim, spec.delta.kernel) == (128, 128, 4)


def test_qwen3_5_has_no_experts_and_a_projection_for_each_input(tmp_path: Path) -> None:
    spec = read(tmp_path, "qwen3_5", num_experts=512)
    assert (spec.family, spec.delta_layers) == ("qwen3_5", (0, 1, 3))
    assert (spec.has_offset_norms, spec.has_attention_gate, spec.rope.fraction) == (True, True, 0.5)
    names = {name.split(".")[-2] for name in tensor_shapes(spec, 0, 1) if "in_proj" in name}
    assert names == {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    assert delta_input_order(spec.delta) == list(range(64 + 32 + 4 + 4))


def test_the_published_shape_takes_what_the_docs_say(tmp_path: Path) -> None:
    """docs/models.md: 24,576 bytes a token, 73.7 MiB a snapshot, as much as 3,144 tokens."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16", "num_experts": 0,
                "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
                "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936,
                "max_position_embeddings": 262_144,
            }
        )
    )  # fmt: skip
    config = Config(model=ModelConfig(path="unused"), cluster=ClusterConfig(stages=2))
    plan = derive(config, read_facts(tmp_path, load_format="dummy"))
    token_bytes = sum(stage.block_bytes for stage in plan.stages) // plan.block_tokens
    state_bytes = sum(stage.state_bytes for stage in plan.stages)
    assert token_bytes == 24_576
    assert state_bytes == 36 * ((2 << 20) + (48 << 10))
    assert (round(state_bytes / 2**20, 1), state_bytes // token_bytes) == (73.7, 3144)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (0, 2, 3, 4)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3, 4)),
        ({"decoder_sparse_step": 2}, (3,)),
        ({"num_experts": 0}, ()),
        ({"decoder_sparse_step": 6}, ()),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, ()),
    ],
    ids=str,
)
def test_layers_with_experts_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    spec = read(tmp_path, **changes)
    assert spec.moe_layers == layers
    shapes = tensor_shapes(spec, 0, 5)
    for layer in range(5):
        name = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
        assert shapes.get(name) == ((1, 64) if layer in layers else None)


def test_without_delta_layers_nothing_keeps_a_state(tmp_path: Path) -> None:
    spec = read(tmp_path, layer_types=[FULL] * 5)
    assert (spec.delta, spec.delta_layers) == (None, ())
    assert not any("linear_attn" in name for name in tensor_shapes(spec, 0, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "9 experts per token"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"layer_types": [LINEAR] * 4}, "each of 5 layers"),
        ({"layer_types": [LINEAR] * 4 + ["sparse"]}, "sparse"),
        ({"layer_types": [LINEAR] * 4 + ["sliding_attention"]}, "sliding-window"),
        ({"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"linear_num_key_heads": "2"}, "linear_num_key_heads"),
        ({"partial_rotary_factor": 0.1875}, "of which 0.1875 turn"),
    ],
    ids=str,
)
def test_other_models_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)


def test_rows_are_ungrouped(tmp_path: Path) -> None:
    """Two key heads of width 1, each with two value heads of width 2 (see the module)."""
    spec = read(tmp_path, linear_key_head_dim=1, linear_value_head_dim=2)
    assert spec.delta is not None
    group = ["q", "k", "v", "v", "v", "v", "z", "z", "z", "z"]
    rows = [f"{part}{head}" for head in (0, 1) for part in group]
    rows += [f"{part}{head}" for head in (0, 1) for part in ("b", "b", "a", "a")]
    ordered = [rows[row] for row in delta_input_order(spec.delta)]
    assert ordered == (
        ["q0", "q1", "k0", "k1"] + ["v0"] * 4 + ["v1"] * 4 + ["z0"] * 4 + ["z1"] * 4
        + ["b0", "b0", "b1", "b1", "a0", "a0", "a1", "a1"]
    )  # fmt: skip
    assert sorted(delta_input_order(spec.delta)) == list(range(len(rows)))
    assert attention_input_order(2, 1, 2) == [0, 1, 4, 5, 8, 9, 10, 11, 2, 3, 6, 7]
