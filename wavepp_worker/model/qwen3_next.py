"""Qwen3-Next and Qwen3.5: three gated delta layers (GDN) to one gated attention, norms around one.

    x += Mixer(Norm(x)) ;  x += MLP(Norm(x))
    attention   q_proj makes, per head, a query and a gate; the output is scaled by its sigmoid
    GDN         Qwen3-Next's in_proj_qkvz makes, per key head, q, k and its value heads' v and z;
                in_proj_ba, per key head, its value heads' beta and decay inputs;
                Qwen3.5 has a projection for each: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a
    experts     Qwen3-Next: softmax over all experts, the K best, beside one shared MLP that is
                scaled by its own sigmoid; layers in `mlp_only_layers`, or off the
                `decoder_sparse_step`, and all of Qwen3.5's have a dense MLP

Rows are brought into the order [all q, all k, all v, ...] when weights are loaded.  Not for what
needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.moe_spec import Count, MoeNames, MoeSpec, Width, check_moe

HEAD_DIM = 256  # the family's default
ROTARY_FRACTION = 0.25  # the family's default


class _Checkpoint(Struct, kw_only=True):
    """What config.json says beyond every family's keys; defaults as in transformers."""

    num_hidden_layers: int
    layer_types: list[str] | None = None
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Annotated[int, Meta(ge=2)] = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    num_experts: Width = 512
    num_experts_per_tok: Count = 10
    moe_intermediate_size: Count = 512
    shared_expert_intermediate_size: Count = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None


def read_delta(tree: dict[str, Any], path: Path, *, is_next: bool) -> DeltaSpec | None:
    """Return the delta layers of a config.json; None if all layers are attention.

    Args:
        is_next: Qwen3-Next; else Qwen3.5.

    Raises:
        ConfigError: layers of another kind, or heads that do not pair up.
    """
    raw = _read(tree, path)
    count, interval = raw.num_hidden_layers, raw.full_attention_interval
    kinds = raw.layer_types or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention"
        for layer in range(count)
    ]
    unknown = set(kinds) - {"full_attention", "linear_attention"}
    if unknown or len(kinds) != count:
        raise ConfigError(
            f"{path}: layer_types {kinds!r}: one of full_attention, linear_attention "
            f"for each of {count} layers"
        )
    if raw.linear_num_value_heads % raw.linear_num_key_heads:
        raise ConfigError(
            f"{path}: {raw.linear_num_value_heads} linear value heads cannot share "
            f"{raw.linear_num_key_heads} key heads evenly"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        return None
    return DeltaSpec(
        layers=layers,
        key_heads=raw.linear_num_key_heads,
        value_heads=raw.linear_num_value_heads,
        key_dim=raw.linear_key_head_dim,
        value_dim=raw.linear_value_head_dim,
        kernel=raw.linear_conv_kernel_dim,
        is_grouped=is_next,
    )


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec | None:
    """Return Qwen3-Next's layers with experts; None if there are none.

    Raises:
        ConfigError: a value of another type, or experts that cannot be chosen.
    """
    raw = _read(tree, path)
    layers = tuple(
        layer
        for layer in range(raw.num_hidden_layers)
        if layer not in (raw.mlp_only_layers or ()) and (layer + 1) % raw.decoder_sparse_step == 0
    )
    if not layers or raw.num_experts == 0:
        return None
    return check_moe(
        MoeSpec(
            layers=layers,
            experts=raw.num_experts,
            chosen=raw.num_experts_per_tok,
            width=raw.moe_intermediate_size,
            shared_width=raw.shared_expert_intermediate_size,
            has_shared_gate=True,
            scores="softmax",
            is_renormalised=raw.norm_topk_prob,
            names=MoeNames(shared="shared_expert"),
        ),
        path,
    )


def delta_inputs(delta: DeltaSpec) -> dict[str, int]:
    """Return name -> rows of the modules that read a delta layer's input."""
    heads, values = delta.value_heads, delta.value_heads * delta.value_dim
    if delta.is_grouped:
        return {"in_proj_qkvz": delta.channels + values, "in_proj_ba": 2 * heads}
    return {
        "in_proj_qkv": delta.channels,
        "in_proj_z": values,
        "in_proj_b": heads,
        "in_proj_a": heads,
    }


def delta_shapes(block: str, delta: DeltaSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors of one delta layer, norms and MLP aside."""
    values = delta.value_heads * delta.value_dim
    layer = f"{block}.linear_attn"
    return {
        **{f"{layer}.{name}.weight": (rows, hidden) for name, rows in delta_inputs(delta).items()},
        f"{layer}.conv1d.weight": (delta.channels, 1, delta.kernel),
        f"{layer}.A_log": (delta.value_heads,),
        f"{layer}.dt_bias": (delta.value_heads,),
        f"{layer}.norm.weight": (delta.value_dim,),
        f"{layer}.out_proj.weight": (hidden, values),
    }


def delta_input_order(delta: DeltaSpec) -> list[int]:
    """Return the rows of all `delta_inputs` in the order q, k, v, z, beta, decay."""
    if not delta.is_grouped:
        return list(range(sum(delta_inputs(delta).values())))
    served = delta.value_heads // delta.key_heads
    values = served * delta.value_dim
    first = _ungrouped(delta.key_heads, (delta.key_dim, delta.key_dim, values, values))
    second = _ungrouped(delta.key_heads, (served, served))
    return first + [len(first) + row for row in second]


def attention_input_order(heads: int, kv_heads: int, head_dim: int) -> list[int]:
    """Return the rows of [q_proj, k_proj, v_proj] in the order q, k, v, gate."""
    mixed = _ungrouped(heads, (head_dim, head_dim))
    queries, gates = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    rest = range(len(mixed), len(mixed) + 2 * kv_heads * head_dim)
    return [*queries, *rest, *gates]


def _read(tree: dict[str, Any], path: Path) -> _Checkpoint:
    try:
        return msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error


def _ungrouped(groups: int, parts: tuple[int, ...]) -> list[int]:
    """Return rows that lie group by group, each with all parts, part by part over all groups."""
    size, order, start = sum(parts), [], 0
    for part in parts:
        order += [group * size + start + row for group in range(groups) for row in range(part)]
        start += part
    return order
