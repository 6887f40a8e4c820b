"""Qwen3-MoE: Qwen3's attention, and experts instead of the MLP in all or some layers.

    x += Attention(Norm(x)) ;  x += Experts(Norm(x))
    router      softmax over all experts, the K best; their weights divided by their sum if
                `norm_topk_prob`
    no shared expert; layers in `mlp_only_layers`, or off the `decoder_sparse_step`, have Qwen3's
    MLP of `intermediate_size`

Not for anything that needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.model.moe_spec import Count, MoeSpec, Width, check_moe


class _Checkpoint(Struct, kw_only=True):
    """What config.json says beyond every family's keys; defaults as in transformers."""

    num_hidden_layers: int
    moe_intermediate_size: Count = 768
    num_experts: Width | None = None
    num_local_experts: Width | None = None  # the other name that transformers 5 knows
    num_experts_per_tok: Count = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None


def read_moe(tree: dict[str, Any], path: Path) -> MoeSpec | None:
    """Return the layers with experts of a config.json; None if there are none.

    Raises:
        ConfigError: a value of another type, or experts that cannot be chosen.
    """
    try:
        raw = msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    experts = raw.num_experts if raw.num_experts is not None else raw.num_local_experts
    experts = 128 if experts is None else experts
    layers = tuple(
        layer
        for layer in range(raw.num_hidden_layers)
        if layer not in (raw.mlp_only_layers or ()) and (layer + 1) % raw.decoder_sparse_step == 0
    )
    if not layers or experts == 0:
        return None
    return check_moe(
        MoeSpec(
            layers=layers,
            experts=experts,
            chosen=raw.num_experts_per_tok,
            width=raw.moe_intermediate_size,
            scores="softmax",
            is_renormalised=raw.norm_topk_prob,
        ),
        path,
    )
