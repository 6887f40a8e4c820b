"""Kimi Linear: delta layers with a decay per channel (KDA), latent attention, experts.

    x += KDA(Norm(x)) or MLA(Norm(x)) ;  x += MLP(Norm(x)) or Experts(Norm(x)) + Shared(Norm(x))
    KDA         decay -exp(A) softplus(W W x + bias) per key channel, through a low rank, as the
                output's gate, a sigmoid
    attention   latent, without positions: the shared part of the key is cached, but never turns
    router      sigmoid; a bias chooses; the chosen ones' scores, divided by their sum and scaled

Published config.json files count layers from 1 (`linear_attn_config`), those that transformers
writes have `layer_types`.  Kimi K3 builds on this file.  Not for anything that needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.mla_spec import MlaSpec
from wavepp_worker.model.moe_spec import Count, MoeNames, MoeSpec, Width, check_moe

NAMES: Final = MoeNames(layer="block_sparse_moe", gate="w1", up="w3", down="w2")


class _Linear(Struct, kw_only=True):
    """Its `linear_attn_config`; layers are counted from 1."""

    kda_layers: list[int]
    full_attn_layers: list[int]
    num_heads: Count
    head_dim: Count
    short_conv_kernel_size: Count = 4


class _Checkpoint(Struct, kw_only=True):
    """What config.json says beyond every family's keys; defaults as published."""

    num_hidden_layers: int
    q_lora_rank: Count | None = None
    kv_lora_rank: Count = 512
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    mla_use_nope: bool = True
    attention_bias: bool = False
    num_experts: Count = 256
    num_experts_per_token: Count = 8
    num_shared_experts: Width = 1
    moe_intermediate_size: Count = 1024
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: Width = 1
    moe_layer_freq: int = 1
    mlp_layer_types: list[str] | None = None
    num_expert_group: Count = 1
    topk_group: Count = 1
    linear_attn_config: _Linear | None = None
    layer_types: list[str] | None = None
    linear_num_heads: Count = 32
    linear_head_dim: Count = 128
    linear_conv_kernel_dim: Count = 4


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
    )


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec | None:
    """Return the experts of a config.json; None if all layers are dense.

    Raises:
        ConfigError: a value of another type, or experts that cannot be chosen.
    """
    raw = _read(tree, path)
    layers = tuple(range(raw.first_k_dense_replace, raw.num_hidden_layers))
    if raw.mlp_layer_types is not None:
        layers = tuple(i for i, kind in enumerate(raw.mlp_layer_types) if kind == "sparse")
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
    if linear is not None:
        layers = kda_layers(linear.kda_layers, linear.full_attn_layers, raw.num_hidden_layers, path)
        heads, dim, kernel = linear.num_heads, linear.head_dim, linear.short_conv_kernel_size
    else:
        kinds = raw.layer_types or []
        if len(kinds) != raw.num_hidden_layers or set(kinds) - {
            "linear_attention",
            "full_attention",
        }:
            raise ConfigError(
                f"{path}: neither linear_attn_config nor layer_types says of each of "
                f"{raw.num_hidden_layers} layers whether it is linear_attention or full_attention"
            )
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
        heads, dim, kernel = raw.linear_num_heads, raw.linear_head_dim, raw.linear_conv_kernel_dim
    if not layers:
        return None
    return DeltaSpec(
        layers=layers,
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        kernel=kernel,
        decay_rank=dim,
        gate_rank=dim,
    )


def published_name(name: str) -> str:
    """Return what the published checkpoint calls a tensor that transformers has saved.

    transformers renames the experts on its way out, and the MLP of dense layers with them.
    """
    block, separator, part = name.partition(".block_sparse_moe.")
    is_dense = separator and part.split(".")[0] in ("gate_proj", "up_proj", "down_proj")
    return f"{block}.mlp.{part}" if is_dense else name


def kda_layers(
    linear: Sequence[int], full: Sequence[int], layers: int, path: Path
) -> tuple[int, ...]:
    """Return the indices, from 0, of the delta layers that a config.json counts from 1.

    Raises:
        ConfigError: layers that are of no kind or of both.
    """
    if sorted((*linear, *full)) != [*range(1, layers + 1)]:
        raise ConfigError(
            f"{path}: kda_layers and full_attn_layers must name each of {layers} layers once, "
            "from 1"
        )
    return tuple(layer - 1 for layer in sorted(linear))


def delta_shapes(block: str, delta: DeltaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one delta layer, norms and MLP aside."""
    layer, width = f"{block}.self_attn", delta.value_heads * delta.value_dim
    gate = {f"{layer}.g_proj.weight": (width, hidden)}
    if delta.gate_rank:
        gate = {
            f"{layer}.g_a_proj.weight": (delta.gate_rank, hidden),
            f"{layer}.g_b_proj.weight": (width, delta.gate_rank),
        }
    return {
        **{f"{layer}.{part}_proj.weight": (width, hidden) for part in "qkv"},
        **{f"{layer}.{part}_conv1d.weight": (width, 1, delta.kernel) for part in "qkv"},
        **gate,
        f"{layer}.b_proj.weight": (delta.value_heads, hidden),
        f"{layer}.f_a_proj.weight": (delta.decay_rank, hidden),
        f"{layer}.f_b_proj.weight": (width, delta.decay_rank),
        # Kimi Linear's has the shape in which its authors broadcast it.
        f"{layer}.A_log": (1, 1, delta.value_heads, 1) if delta.gate_rank else (delta.value_heads,),
        f"{layer}.dt_bias": (width,),
        f"{layer}.o_norm.weight": (delta.value_dim,),
        f"{layer}.o_proj.weight": (hidden, width),
    }


def _read(tree: dict[str, Any], path: Path) -> _Checkpoint:
    try:
        raw = msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, value, supported in (
        ("mla_use_nope", raw.mla_use_nope, True),
        ("attention_bias", raw.attention_bias, False),
        ("moe_router_activation_func", raw.moe_router_activation_func, "sigmoid"),
        ("moe_layer_freq", raw.moe_layer_freq, 1),
    ):
        if value != supported:
            raise ConfigError(f"{path}: {name} {value!r} is not supported, only {supported!r}")
    return raw
