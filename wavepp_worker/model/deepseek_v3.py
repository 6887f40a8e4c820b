"""DeepSeek-V3: latent attention, a few dense layers, then experts chosen within groups.

    x += MLA(Norm(x)) ;  x += MLP(Norm(x)) or Experts(Norm(x)) + Shared(Norm(x))
    attention   queries through a low rank (or at once), keys and values from one cached latent; the
                rope part of query and key turns in neighbouring pairs, stretched by YaRN, whose
                length correction also scales the scores
    router      sigmoid; a bias chooses, within the best groups; the chosen ones' scores, divided by
                their sum and scaled, weigh
    the layers for multi-token prediction at the end of published checkpoints are left out

Not for anything that needs torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.mla_spec import MlaSpec
from wavepp_worker.model.moe_spec import Count, MoeSpec, Width, check_moe

_Part = TypeVar("_Part", bound=Struct)


class _Attention(Struct, kw_only=True):
    """What config.json says of the attention; defaults as in transformers."""

    kv_lora_rank: Count = 512
    q_lora_rank: Count | None = 1536
    qk_nope_head_dim: Count = 128
    qk_rope_head_dim: Count = 64
    v_head_dim: Count = 128
    rope_interleave: bool = True
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    attention_bias: bool = False


class _Experts(Struct, kw_only=True):
    """What config.json says of the experts; defaults as in transformers."""

    num_hidden_layers: int
    first_k_dense_replace: Width = 3
    moe_layer_freq: int = 1
    moe_intermediate_size: Count = 2048
    n_routed_experts: Count = 256
    n_shared_experts: Width = 1
    num_experts_per_tok: Count = 8
    n_group: Count = 8
    topk_group: Count = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"


def read_mla(tree: dict[str, Any], path: Path) -> MlaSpec:
    """Return the attention of a config.json.

    Raises:
        ConfigError: a value of another type, or a relative that computes something else.
    """
    raw = _read(tree, _Attention, path)
    if raw.attention_bias:
        raise ConfigError(f"{path}: attention_bias is not supported with latent attention")
    if raw.qk_rope_head_dim % 2:
        raise ConfigError(
            f"{path}: qk_rope_head_dim {raw.qk_rope_head_dim} is odd; rotary positions need pairs"
        )
    scale = (raw.qk_nope_head_dim + raw.qk_rope_head_dim) ** -0.5
    rope = raw.rope_parameters or raw.rope_scaling or {}
    weight, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if weight and factor and factor > 1:
        scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
    return MlaSpec(
        q_rank=raw.q_lora_rank,
        kv_rank=raw.kv_lora_rank,
        nope_dim=raw.qk_nope_head_dim,
        rope_dim=raw.qk_rope_head_dim,
        value_dim=raw.v_head_dim,
        scale=scale,
        is_interleaved=raw.rope_interleave,
    )


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec | None:
    """Return the experts of a config.json; None if all layers are dense.

    Raises:
        ConfigError: a relative of this family that computes something else.
    """
    raw = _read(tree, _Experts, path)
    for name, value, supported in (
        ("scoring_func", raw.scoring_func, "sigmoid"),
        ("topk_method", raw.topk_method, "noaux_tc"),
        ("moe_layer_freq", raw.moe_layer_freq, 1),
    ):
        if value != supported:
            raise ConfigError(f"{path}: {name} {value!r} is not supported, only {supported!r}")
    layers = tuple(range(raw.first_k_dense_replace, raw.num_hidden_layers))
    if not layers:
        return None
    return check_moe(
        MoeSpec(
            layers=layers,
            experts=raw.n_routed_experts,
            chosen=raw.num_experts_per_tok,
            width=raw.moe_intermediate_size,
            shared_width=raw.n_shared_experts * raw.moe_intermediate_size,
            scores="sigmoid",
            has_selection_bias=True,
            is_renormalised=raw.norm_topk_prob,
            scale=raw.routed_scaling_factor,
            groups=raw.n_group,
            groups_kept=raw.topk_group,
        ),
        path,
    )


def _read(tree: dict[str, Any], part: type[_Part], path: Path) -> _Part:
    try:
        return msgspec.convert(tree, part)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
