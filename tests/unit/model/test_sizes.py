"""What the descriptions say of models whose sizes are published."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.tiny import tiny_config
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.model.spec import read_facts, read_spec, tensor_shapes

REPOSITORY = Path(__file__).resolve().parents[3]
GQA = {"num_attention_heads": 32, "head_dim": 128, "vocab_size": 151936}
# name -> (family, config.json, billions of parameters, cache bytes per token in 16 bits)
MODELS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "Qwen3-8B": (
        "qwen3",
        GQA | {
            "num_hidden_layers": 36, "hidden_size": 4096, "num_key_value_heads": 8,
            "intermediate_size": 12288,
        },
        8.19,
        147_456,
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        GQA | {
            "num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "mlp_only_layers": [],
        },
        30.53,
        98_304,
    ),
    "MiniMax-M2-shaped": (
        "minimax_m2",
        {
            "num_hidden_layers": 24, "hidden_size": 3072, "num_attention_heads": 48,
            "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "vocab_size": 200064,
            "num_local_experts": 96, "num_experts_per_tok": 8, "intermediate_size": 1536,
        },
        34.9,
        98_304,
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
            "vocab_size": 129280, "intermediate_size": 18432, "first_k_dense_replace": 3,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
        },
        671.0,
        61 * 1_152,
    ),
    "Kimi-Linear-48B-A3B": (
        "kimi_linear",
        {
            "num_hidden_layers": 27, "hidden_size": 2304, "intermediate_size": 9216,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 163840,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
            "num_shared_experts": 1, "moe_intermediate_size": 1024,
            "linear_attn_config": {
                "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [layer for layer in range(1, 27) if layer % 4],
            },
        },
        49.12,
        7 * 1_152,
    ),
    "Kimi-K3": (
        "kimi_k3",
        {
            "num_hidden_layers": 93, "hidden_size": 7168, "intermediate_size": 33792,
            "num_attention_heads": 96, "num_key_value_heads": 96, "vocab_size": 163840,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896,
            "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584, "attn_res_block_size": 12,
            "linear_attn_config": {
                "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
                "full_attn_layers": [*range(4, 93, 4), 93],
                "kda_layers": [layer for layer in range(1, 93) if layer % 4],
                "gate_lower_bound": -5.0,
            },
        },
        2_780.0,
        24 * 1_152,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_sizes(tmp_path: Path, name: str) -> None:
    """Parameters from the tensors a checkpoint must have; cache bytes from the plan of a stage."""
    family, changes, billions, bytes_per_token = MODELS[name]
    tree = tiny_config(family)
    tree.get("text_config", tree).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(tree))
    spec = read_spec(tmp_path, "bfloat16")
    shapes = tensor_shapes(spec, 0, spec.layers)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    assert parameters == pytest.approx(billions * 1e9, rel=1e-3)
    config = Config(model=ModelConfig(path=str(tmp_path)), cluster=ClusterConfig(stages=2))
    plan = derive(config, read_facts(tmp_path, "bfloat16", "dummy"))
    block_bytes = sum(stage.block_bytes for stage in plan.stages)
    assert block_bytes == plan.block_tokens * bytes_per_token


@pytest.mark.parametrize(
    "folder", sorted((REPOSITORY / "configs" / "shapes").glob("*/")), ids=lambda folder: folder.name
)
def test_shipped_shapes_are_read_and_cut(folder: Path) -> None:
    config = Config(model=ModelConfig(path=str(folder)), cluster=ClusterConfig(stages=4))
    plan = derive(config, read_facts(folder, "auto", "dummy"))
    assert plan.stages[-1].stop == read_spec(folder).layers
