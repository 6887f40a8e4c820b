"""Kimi K3: delta layers (KDA) and gated latent attention, latent experts, attention residuals.

    x = mix(sum, starts) ;  every `attn_res_block_size` layers: starts += [sum], sum = 0
    sum += Mixer(Norm(x)) ;  sum += FFN(Norm(mix(sum, starts)))
    KDA         as in Kimi Linear, but the decay is bounded, -5 sigmoid(exp(A) (raw + bias)), and
                the output's gate has full rank; published A_log are padded to 128 heads
    attention   latent, without positions; a sigmoid of the layer's input scales the output
    experts     sigmoid router, a bias chooses; experts work in a narrower space, shared ones do not
    activation  SiTU everywhere

The language model only: images are not supported, their towers are not loaded.  The text part of
config.json calls itself kimi_linear, so this family is told by the name at the top or by its
attention residuals.  Not for anything that needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.kimi_linear import NAMES, kda_layers
from wavepp_worker.model.mla_spec import MlaSpec
from wavepp_worker.model.mlp_spec import SituSpec
from wavepp_worker.model.moe_spec import Count, MoeSpec, Width, check_moe

TENSOR_PREFIX: Final = "language_model."  # of the published names; a text-only checkpoint has none


class _Linear(Struct, kw_only=True):
    """Its `linear_attn_config`; layers are counted from 1."""

    kda_layers: list[int]
    full_attn_layers: list[int]
    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count = 4
    use_full_rank_gate: bool = True
    gate_lower_bound: float = -5.0


class _Checkpoint(Struct, kw_only=True):
    """What the text part of config.json says beyond every family's keys; defaults as published."""

    num_hidden_layers: int
    attn_res_block_size: Count = 12
    rms_norm_eps: float = 1e-5
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    q_lora_rank: Count | None = 1536
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    num_experts: Count = 896
    num_experts_per_token: Count = 16
    num_shared_experts: Width = 2
    moe_intermediate_size: Count = 3072
    routed_expert_hidden_size: Count = 3584
    latent_moe_use_norm: bool = True
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: Width = 1
    moe_layer_freq: int = 1
    num_expert_group: Count = 1
    topk_group: Count = 1
    linear_attn_config: _Linear


def is_k3(tree: dict[str, Any]) -> bool:
    """Whether a config.json, or the text part of one, describes this family."""
    text = tree.get("text_config")
    text = text if isinstance(text, dict) else {}
    names = tree.get("architectures") or []
    return (
        tree.get("model_type") == "kimi_k3"
        or "KimiK3ForConditionalGeneration" in names
        or "attn_res_block_size" in tree
        or "attn_res_block_size" in text
    )


def text_part(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the language model, with those of quantized weights wherever they are."""
    text = tree.get("text_config")
    if not isinstance(text, dict):
        return tree
    outer = {
        key: tree[key] for key in ("quantization_config", "dtype", "torch_dtype") if tree.get(key)
    }
    return outer | text


def residual_layers(tree: dict[str, Any], path: Path) -> int:
    """Return how many layers add to one running sum before the next begins."""
    return _read(tree, path).attn_res_block_size


def read_situ(tree: dict[str, Any], path: Path) -> SituSpec:
    """Return the activation of the MLPs and experts.

    Raises:
        ConfigError: bounds that are none.
    """
    raw = _read(tree, path)
    bounds = raw.activation_situ_beta, raw.activation_situ_linear_beta
    if min(bounds) <= 0:
        raise ConfigError(f"{path}: activation_situ_beta and _linear_beta must be positive")
    return SituSpec(gate_max=bounds[0], up_max=bounds[1])


def read_mla(tree: dict[str, Any], path: Path) -> MlaSpec:
    """Return the attention of a config.json.

    Raises:
        ConfigError: a value of another type, or a relative that computes something else.
    """
    raw = _read(tree, path)
    return MlaSpec(
        q_rank=raw.q_lora_rank,
        kv_rank=raw.kv_lora_rank,
        nope_dim=raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=raw.v_head_dim,
        scale=(raw.qk_nope_head_dim + raw.qk_rope_head_dim) ** -0.5,
        is_interleaved=False,
        has_gate=raw.mla_use_output_gate,
    )


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec | None:
    """Return the experts of a config.json; None if all layers are dense.

    Raises:
        ConfigError: a value of another type, or experts that cannot be chosen.
    """
    raw = _read(tree, path)
    layers = tuple(range(raw.first_k_dense_replace, raw.num_hidden_layers))
    if not layers:
        return None
    return check_moe(
        MoeSpec(
            layers=layers,
            experts=raw.num_experts,
            chosen=raw.num_experts_per_token,
            width=raw.moe_intermediate_size,
            shared_width=raw.num_shared_experts * raw.moe_intermediate_size,
            scores="sigmoid",
            has_selection_bias=True,
            is_renormalised=raw.moe_renormalize,
            scale=raw.routed_scaling_factor,
            latent=raw.routed_expert_hidden_size,
            latent_eps=raw.rms_norm_eps,
            situ=read_situ(tree, path),
            groups=raw.num_expert_group,
            groups_kept=raw.topk_group,
            names=NAMES,
        ),
        path,
    )


def read_delta(tree: dict[str, Any], path: Path) -> DeltaSpec | None:
    """Return the delta layers of a config.json; None if all layers are attention.

    Raises:
        ConfigError: layers that are of no kind or of both.
    """
    raw = _read(tree, path)
    linear = raw.linear_attn_config
    if not linear.use_full_rank_gate:
        raise ConfigError(f"{path}: use_full_rank_gate false is not supported")
    if linear.gate_lower_bound >= 0:
        raise ConfigError(f"{path}: gate_lower_bound {linear.gate_lower_bound} is not below 0")
    layers = kda_layers(linear.kda_layers, linear.full_attn_layers, raw.num_hidden_layers, path)
    if not layers:
        return None
    return DeltaSpec(
        layers=layers,
        key_heads=linear.num_heads,
        value_heads=linear.num_heads,
        key_dim=linear.head_dim,
        value_dim=linear.head_dim,
        kernel=linear.short_conv_kernel_size,
        decay_rank=linear.head_dim,
        decay_bound=linear.gate_lower_bound,
    )


def residual_shapes(block: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one layer's two mixes."""
    return mix_shapes(f"{block}.self_attention_res", hidden) | mix_shapes(
        f"{block}.mlp_res", hidden
    )


def mix_shapes(name: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one mix."""
    return {f"{name}_norm.weight": (hidden,), f"{name}_proj.weight": (1, hidden)}


def _read(tree: dict[str, Any], path: Path) -> _Checkpoint:
    try:
        raw = msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, value, supported in (
        ("mla_use_nope", raw.mla_use_nope, True),
        ("latent_moe_use_norm", raw.latent_moe_use_norm, True),
        ("moe_router_activation_func", raw.moe_router_activation_func, "sigmoid"),
        ("moe_layer_freq", raw.moe_layer_freq, 1),
    ):
        if value != supported:
            raise ConfigError(f"{path}: {name} {value!r} is not supported, only {supported!r}")
    return raw
