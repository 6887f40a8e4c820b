"""MiniMax-M2: grouped-query attention, norms over whole projections, experts in every layer.

    x += Attention(Norm(x)) ;  x += Experts(Norm(x))
    attention   q and k are normed over all their heads together; the first `rotary_dim` dimensions
                of each head turn
    router      sigmoid; a bias chooses, the chosen ones' scores, divided by their sum, weigh
    no shared expert; `intermediate_size` is the width of one expert

Not for anything that needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.moe_spec import Count, MoeNames, MoeSpec, Width, check_moe

HEAD_DIM: Final = 128  # the family's default
ROPE_THETA: Final = 5e6  # the family's default
NAMES: Final = MoeNames(
    layer="block_sparse_moe",
    selection_bias="e_score_correction_bias",
    gate="w1",
    up="w3",
    down="w2",
)


class _Checkpoint(Struct, kw_only=True):
    """What config.json says beyond every family's keys; defaults as in transformers."""

    num_hidden_layers: int
    intermediate_size: Count
    num_local_experts: Count | None = None
    num_experts: Count | None = None  # the other name that transformers 5 knows
    num_experts_per_tok: Count = 8
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    shared_intermediate_size: Width = 0
    attn_type_list: list[int] | None = None


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec:
    """Return the experts of a config.json.

    Raises:
        ConfigError: a relative of this family that computes something else.
    """
    try:
        raw = msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, value, supported in (
        ("scoring_func", raw.scoring_func, "sigmoid"),
        ("use_routing_bias", raw.use_routing_bias, True),
        ("use_qk_norm", raw.use_qk_norm, True),
        ("qk_norm_type", raw.qk_norm_type, "per_layer"),
        ("shared_intermediate_size", raw.shared_intermediate_size, 0),
    ):
        if value != supported:
            raise ConfigError(f"{path}: {name} {value!r} is not supported, only {supported!r}")
    if set(raw.attn_type_list or ()) - {1}:
        raise ConfigError(f"{path}: attn_type_list names linear attention; only 1 is supported")
    return check_moe(
        MoeSpec(
            layers=tuple(range(raw.num_hidden_layers)),
            experts=raw.num_local_experts or raw.num_experts or 256,
            chosen=raw.num_experts_per_tok,
            width=raw.intermediate_size,
            scores="sigmoid",
            has_selection_bias=True,
            is_renormalised=True,
            names=NAMES,
        ),
        path,
    )
