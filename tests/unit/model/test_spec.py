"""Reading a model folder: what is understood, and how each unusable folder is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.numerics.tiny import make_tiny_model, tiny_config
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.spec import FAMILIES, RopeSpec, read_facts, read_spec, tensor_shapes


def write_config(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """Write config.json alone; a change to None removes the key."""
    tree = tiny_config(family)
    described = tree.get("text_config", tree)
    for name, value in changes.items():
        described[name] = value
        if value is None:
            del described[name]
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_facts_of_a_folder(tmp_path: Path) -> None:
    facts = read_facts(make_tiny_model(tmp_path, "qwen3"))
    assert (facts.family, facts.layers, facts.hidden, facts.vocab) == ("qwen3", 5, 64, 262)
    assert (facts.kv_heads, facts.head_dim, facts.context_tokens) == (2, 16, 4096)
    assert (facts.dtype, facts.dtype_bytes) == ("float32", 4)


@pytest.mark.parametrize(
    ("named", "asked", "dtype"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "auto", "float16"),
        ({"dtype": "torch.bfloat16"}, "auto", "bfloat16"),
        ({"dtype": None}, "auto", "float32"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({"dtype": "float64"}, "bfloat16", "bfloat16"),
    ],
)
def test_dtype_is_the_one_asked_for_or_the_checkpoints(
    tmp_path: Path, named: dict[str, Any], asked: str, dtype: str
) -> None:
    assert read_spec(write_config(tmp_path, **named), asked).dtype == dtype


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [("llama", 16), ("qwen2", 16), ("qwen3", 128), ("qwen3_moe", 16), ("minimax_m2", 128)],
    ids=str,
)
def test_head_dim_defaults_as_the_family_does(tmp_path: Path, family: str, head_dim: int) -> None:
    assert read_spec(write_config(tmp_path, family, head_dim=None)).head_dim == head_dim


@pytest.mark.parametrize(
    ("family", "biases"),
    [
        ("llama", (True, True, True)),
        ("qwen2", (True, False, False)),
        ("qwen3", (True, True, False)),
    ],
    ids=str,
)
def test_biases_are_where_the_family_has_them(
    tmp_path: Path, family: str, biases: tuple[bool, bool, bool]
) -> None:
    spec = read_spec(write_config(tmp_path, family, attention_bias=True, mlp_bias=True))
    assert (spec.has_qkv_bias, spec.has_out_bias, spec.has_mlp_bias) == biases


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_theta": 1000000}, RopeSpec(theta=1e6)),
        ({"rope_theta": None}, RopeSpec()),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
            RopeSpec(theta=5e4),
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            RopeSpec(kind="linear", factor=2.0),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 40.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            RopeSpec(kind="yarn", factor=40.0, original_context_tokens=4096),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            RopeSpec(kind="llama3", factor=8.0, original_context_tokens=8192),
        ),
    ],
)
def test_rope_in_both_spellings(tmp_path: Path, changes: dict[str, Any], rope: RopeSpec) -> None:
    assert read_spec(write_config(tmp_path, **changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", *FAMILIES]),
        ({"architectures": None}, ["architectures None", *FAMILIES]),
        ({"architectures": "LlamaForCausalLM"}, ["not supported"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"hidden_size": "64"}, ["Expected `int`", "hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["4 query heads", "3 KV heads"]),
        ({"head_dim": 15}, ["head_dim 15"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantized"]),
        ({"use_sliding_window": True}, ["sliding-window"]),
        ({"layer_types": ["sliding_attention"]}, ["sliding-window"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["'yarn'", "null"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "original_context"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
            ["'yarn'", "truncate"],
        ),
        ({"rope_scaling": {"rope_type": "dynamic"}}, ["'dynamic'", "linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["'linear'", "factor"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_unusable_configs_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_spec(write_config(tmp_path, **changes))
    text = str(refused.value)
    assert str(tmp_path / "config.json") in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token"),
        ("minimax_m2", {"num_experts_per_tok": 9}, "9 experts per token"),
        ("minimax_m2", {"rotary_dim": 7}, "head_dim 16, of which 0.4375 turns, is odd"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias False"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size 64"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        ("deepseek_v3", {"n_group": 3}, "8 experts cannot form 3"),
        ("deepseek_v3", {"kv_lora_rank": "wide"}, "kv_lora_rank"),
    ],
)
def test_unusable_values_of_a_family_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_spec(write_config(tmp_path, family, **changes))


def test_layers_with_experts_are_those_transformers_makes(tmp_path: Path) -> None:
    changes = {"mlp_only_layers": [3], "decoder_sparse_step": 2}
    assert read_spec(write_config(tmp_path, "qwen3_moe", **changes)).moe_layers == (1,)
    assert read_spec(write_config(tmp_path, "qwen3_moe", mlp_only_layers=None)).moe_layers == (
        0, 1, 2, 3, 4
    )  # fmt: skip
    assert read_spec(write_config(tmp_path, "qwen3_moe", num_experts=0)).moe is None


def test_published_sizes_of_latent_attention(tmp_path: Path) -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 numbers per token, and its scale under YaRN."""
    published = {
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    folder = write_config(tmp_path, "deepseek_v3", **published)
    spec, facts = read_spec(folder), read_facts(folder, "bfloat16", "dummy")
    assert spec.mla is not None
    assert (facts.latent_dim, spec.moe_layers) == (576, tuple(range(3, 61)))
    assert spec.mla.scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    shapes = tensor_shapes(spec, 60, 61)
    assert shapes["model.layers.60.self_attn.kv_b_proj.weight"] == (128 * 256, 512)
    assert not any(".layers.61." in name for name in shapes)


def test_missing_folder_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_facts(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json: not found"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_facts(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        read_facts(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        read_facts(write_config(tmp_path))


def test_dummy_weights_need_config_only(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    facts = read_facts(folder, load_format="dummy", seed=1)
    assert facts == read_facts(folder, load_format="dummy", seed=1)
    assert facts.fingerprint != read_facts(folder, load_format="dummy", seed=2).fingerprint


def test_fingerprint_names_the_weights_not_their_files(tmp_path: Path) -> None:
    facts = [
        read_facts(make_tiny_model(tmp_path / "one", seed=1)),
        read_facts(make_tiny_model(tmp_path / "same", seed=1, shards=3)),
    ]
    assert facts[0] == facts[1]
    others = [
        read_facts(make_tiny_model(tmp_path / "other", seed=2)),
        read_facts(tmp_path / "one", dtype="bfloat16"),
        read_facts(make_tiny_model(tmp_path / "rope", seed=1, config={"rope_theta": 2e4})),
    ]
    assert len({fact.fingerprint for fact in (facts[0], *others)}) == 4


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize("is_tied", [False, True])
def test_stages_together_need_every_tensor(tmp_path: Path, family: str, is_tied: bool) -> None:
    """FS-48: tied and untied."""
    spec = read_spec(write_config(tmp_path, family, tie_word_embeddings=is_tied))
    whole = tensor_shapes(spec, 0, 5)
    first, middle, last = (tensor_shapes(spec, *cut) for cut in ((0, 2), (2, 3), (3, 5)))
    assert first | middle | last == whole
    shared = {"model.embed_tokens.weight"} if is_tied else set()
    assert first.keys() & last.keys() == shared
    assert all(name.startswith("model.layers.2.") for name in middle)
    assert read_facts(make_tiny_model(tmp_path, family, shards=3)).layers == 5


def test_spec_is_read_without_torch(tmp_path: Path) -> None:
    """The serving process checks the folder; it must not pay for importing torch."""
    make_tiny_model(tmp_path)
    program = (
        "import sys; from wavepp_worker.model.spec import read_facts;"
        f"read_facts({str(tmp_path)!r}); print('torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert answer.stdout.strip() == "False"


def test_spec_travels_as_json(tmp_path: Path) -> None:
    spec = read_spec(write_config(tmp_path))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) == spec
