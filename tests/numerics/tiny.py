"""A tiny random model as an ordinary Hugging Face folder, with a byte-level tokenizer.

Small enough to write and load in milliseconds, complete enough for transformers, for WavePP and
for Dynamo's frontend (chat template included).  Every text has one token per byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.numerics.k3_reference import k3_config, k3_tensors
from wavepp_worker.model.spec import FAMILIES, is_offset_norm, read_spec, tensor_shapes

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
BOS, EOS = 1, 2
VOCAB = len(SPECIAL_TOKENS) + 256
HYBRID = {
    # At 1e-6 a head whose output happens to be tiny has its rounding blown up by its own norm.
    "rms_norm_eps": 1e-4,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full")],
    "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    # Layer 1 has a dense MLP.
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "minimax_m2": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 32,
        "rotary_dim": 8,
    },
    "qwen3_next": HYBRID
    | {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "qwen3_5": HYBRID,
    # Layer 0 has a dense MLP.
    "kimi_linear": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.4,
        "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "num_heads": 4,
            "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
    },
    # Layer 0 has a dense MLP; the inner norms have an epsilon of their own.
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    folder: str | Path,
    family: str = "llama",
    seed: int = 0,
    *,
    shards: int = 1,
    dtype: str = "float32",
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder and return its path; equal arguments give equal bytes.

    Args:
        family: a value of `FAMILIES`.
        shards: safetensors files; more than one come with an index.
        config: keys of config.json to add or replace.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tree = tiny_config(family, dtype=dtype)
    described = tree.get("text_config", tree)
    described |= dict(config or {})
    (folder / "config.json").write_text(json.dumps(tree, indent=2))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    if family == "kimi_k3":
        _save(folder, k3_tensors(tree, seed), read_spec(folder).dtype, shards)
    else:
        _write_weights(folder, seed, shards)
    _write_tokenizer(folder, described["max_position_embeddings"])
    return folder


def tiny_config(family: str, *, dtype: str = "float32") -> dict[str, Any]:
    """Return the config.json of a tiny model: 5 layers, 4 query and 2 KV heads of width 16."""
    if family == "kimi_k3":
        return k3_config(dtype=dtype)
    architecture = next(name for name, value in FAMILIES.items() if value == family)
    tree = {
        "architectures": [architecture],
        "model_type": "qwen3_5_text" if family == "qwen3_5" else family,
        "hidden_act": "silu",
        "dtype": dtype,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
    } | FAMILY_CONFIG.get(family, {})
    return {name: value for name, value in tree.items() if value is not None}


def _write_weights(folder: Path, seed: int, shards: int) -> None:
    spec = read_spec(folder)
    generator = torch.Generator().manual_seed(seed)
    # Delta layers multiply differences: at 1.5 transformers' own rounding comes near the tolerance.
    scale = 1.5 if spec.delta is None else 1.0
    tensors = {}
    for name, shape in tensor_shapes(spec, 0, spec.layers).items():
        noise = torch.randn(shape, generator=generator)
        # Norms near one, everything else large enough that a mistake anywhere shows in the logits.
        if name.endswith("norm.weight"):
            values = 0.1 * noise + (not is_offset_norm(spec, name))
        elif name.endswith("A_log"):
            values = noise - 3.0  # from slow decays, which keep the whole prompt, to quick ones
        else:
            values = noise * scale * shape[-1] ** -0.5
        tensors[name] = values
    _save(folder, tensors, spec.dtype, shards)


def _save(folder: Path, tensors: dict[str, torch.Tensor], dtype: str, shards: int) -> None:
    tensors = {name: values.to(getattr(torch, dtype)) for name, values in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = list(tensors)[shard::shards]
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(folder: Path, context_tokens: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
