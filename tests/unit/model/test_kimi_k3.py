"""Kimi K3's config.json: what is read, what is refused, and what the published shape takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.numerics.k3_reference import k3_config
from tests.numerics.tiny import make_tiny_model
from tests.unit.model.test_sizes import MODELS
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.spec import ModelSpec, read_facts, read_spec

LINEAR = k3_config()["text_config"]["linear_attn_config"]


def read(folder: Path, tree: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(tree or k3_config(**changes)))
    return read_spec(folder)


def test_the_text_part_is_read(tmp_path: Path) -> None:
    spec = read(tmp_path)
    assert (spec.family, spec.layers, spec.residual_layers) == ("kimi_k3", 5, 2)
    assert spec.delta_layers == (0, 1, 3)
    assert spec.moe_layers == (1, 2, 3, 4)
    assert [spec.starts_before(layer) for layer in range(6)] == [0, 1, 1, 2, 2, 3]


def test_the_family_is_told_by_the_top_or_by_its_residuals(tmp_path: Path) -> None:
    """The text part calls itself kimi_linear."""
    text = k3_config()["text_config"]
    trees = (
        {"model_type": "kimi_k3", "text_config": text},
        {"architectures": ["KimiK3ForConditionalGeneration"], "text_config": text},
        {"architectures": ["KimiLinearForCausalLM"], **text},
    )
    specs = {read(tmp_path, tree) for tree in trees}
    assert {spec.family for spec in specs} == {"kimi_k3"}
    assert len(specs) == 1


def test_the_published_shape_takes_what_the_docs_say(tmp_path: Path) -> None:
    """docs/models.md: bytes of a token, of a snapshot, and of a token at a boundary."""
    spec = read(tmp_path, **MODELS["Kimi-K3"][1], dtype="bfloat16")
    config = Config(model=ModelConfig(path="unused"), cluster=ClusterConfig(stages=2))
    plan = derive(config, read_facts(tmp_path, load_format="dummy"))
    token_bytes = sum(stage.block_bytes for stage in plan.stages) // plan.block_tokens
    state_bytes = sum(stage.state_bytes for stage in plan.stages)
    assert token_bytes == 27_648
    assert state_bytes == 69 * ((6 << 20) + (216 << 10))
    assert (round(state_bytes / 2**20, 1), state_bytes // token_bytes) == (428.6, 16_253)
    vectors = {layer: 1 + spec.starts_before(layer) for layer in (1, 12, 13, 84, 92)}
    assert vectors == {1: 2, 12: 2, 13: 3, 84: 8, 92: 9}
    assert vectors[84] * spec.hidden * 2 == 112 << 10


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False"),
        ({"latent_moe_use_norm": False}, "latent_moe_use_norm False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported, only 'situ'"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"activation_situ_beta": 0.0}, "must be positive"),
        ({"num_experts_per_token": 9}, "9 experts per token"),
        ({"linear_attn_config": None}, "linear_attn_config"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2]}}, "each of 5 layers once"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [1, 2, 3, 4]}}, "each of 5 layers once"),
        ({"linear_attn_config": LINEAR | {"use_full_rank_gate": False}}, "use_full_rank_gate"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": 5.0}}, "gate_lower_bound"),
        (
            {"quantization_config": {"format": "mxfp4-pack-quantized"}},
            "mxfp4-pack-quantized.*convert the weights to bfloat16",
        ),
    ],
    ids=str,
)
def test_relatives_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, **changes)


def test_quantized_experts_are_refused_wherever_config_says_so(tmp_path: Path) -> None:
    tree = k3_config() | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match="mxfp4"):
        read(tmp_path, tree)


def test_decays_are_read_with_and_without_padding(tmp_path: Path) -> None:
    """The published ones are padded to 128; fewer than heads, or another width, are an error."""
    folder = make_tiny_model(tmp_path, "kimi_k3")
    file, spec = folder / "model.safetensors", read_spec(folder)
    tensors = load_file(file)
    name = "language_model.model.layers.0.self_attn.A_log"
    padded = load_stage(folder, spec, 0, 1)._weights.layers[0].delta
    assert padded is not None
    assert torch.equal(padded.a_log, tensors[name][:3])
    save_file(tensors | {name: tensors[name][:3].clone()}, file)
    plain = load_stage(folder, spec, 0, 1)._weights.layers[0].delta
    assert plain is not None
    assert torch.equal(plain.a_log, padded.a_log)
    for wrong in (tensors[name][:2].clone(), tensors[name][:, None].clone()):
        save_file(tensors | {name: wrong}, file)
        with pytest.raises(ConfigError, match="A_log has shape"):
            load_stage(folder, spec, 0, 1)


def test_a_text_only_checkpoint_has_no_prefix(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "kimi_k3")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("language_model."): part for name, part in tensors.items()}, file)
    stage = load_stage(folder, read_spec(folder), 4, 5)
    assert stage.is_last
    assert list(stage.input_spec(3).items()) == [
        ("hidden", ((3, 64), torch.float32)),
        ("blocks", ((2, 3, 64), torch.float32)),
    ]


def test_what_is_computed_in_32_bits_is_loaded_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "kimi_k3")
    (layer,) = load_stage(folder, read_spec(folder, "bfloat16"), 1, 2)._weights.layers
    assert layer.delta is not None
    assert layer.residual is not None
    assert layer.moe is not None
    wide = (
        layer.delta.convolution, layer.delta.a_log, layer.delta.decay_bias, layer.delta.norm,
        layer.residual.attention, layer.residual.ffn, layer.moe.router, layer.moe.selection_bias,
    )  # fmt: skip
    assert {part.dtype for part in wide if part is not None} == {torch.float32}
    assert layer.qkv.dtype == torch.bfloat16
