"""What layers must compute, counted from the shapes of their tensors.  No torch.

Stages are cut by it, and a measured stage is compared with it.
"""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from wavepp_worker.model.spec import ModelSpec, tensor_shapes

# Multiplications and additions of a linear-attention state per token, head and entry: decay, read
# for the correction, correct, read for the output, and their share of a chunk's triangular solve.
STATE_FLOP: Final = 9


# Tokens before a new one, when layers of different kinds are weighed against each other: in the
# middle of a prompt of 65,536 tokens.  Longer prompts make attention layers weigh more.
REFERENCE_CONTEXT: Final = 32_768


class Work(Struct, frozen=True, kw_only=True):
    """What layers must compute.  In floating-point operations."""

    dense_token: int  # projections, MLPs, shared experts, recurrent states
    expert_token: int  # chosen experts
    pair: int  # per query and key that it sees, of attention layers
    expand_token: int  # per token of context: latents to keys and values


def count_work(spec: ModelSpec, first: int, stop: int) -> Work:
    """Return the work of layers [first, stop), neither embedding nor head among them."""
    dense = experts = 0
    for name, shape in tensor_shapes(spec, first, stop).items():
        if len(shape) != 2 or name.startswith(("model.embed", "lm_head")):
            continue
        if ".experts." in name:
            experts += math.prod(shape)
        elif "kv_b_proj" not in name:
            dense += math.prod(shape)
    attention_layers = sum(layer not in spec.delta_layers for layer in range(first, stop))
    states = 0
    if spec.delta is not None:
        state = spec.delta.value_heads * spec.delta.key_dim * spec.delta.value_dim
        states = STATE_FLOP * state * (stop - first - attention_layers)
    key, value, expand = spec.head_dim, spec.head_dim, 0
    if spec.mla is not None:
        key, value = spec.mla.key_dim, spec.mla.value_dim
        expand = 2 * spec.mla.kv_rank * spec.heads * (spec.mla.nope_dim + value)
    chosen = spec.moe.chosen / spec.moe.experts if spec.moe is not None else 0
    return Work(
        dense_token=2 * dense + states,
        expert_token=round(2 * experts * chosen),
        pair=2 * spec.heads * (key + value) * attention_layers,
        expand_token=expand * attention_layers,
    )


def layer_costs(spec: ModelSpec) -> tuple[int, ...]:
    """Return per layer the operations of one token behind `REFERENCE_CONTEXT` others."""
    works = [count_work(spec, layer, layer + 1) for layer in range(spec.layers)]
    return tuple(
        work.dense_token + work.expert_token + work.expand_token + work.pair * REFERENCE_CONTEXT
        for work in works
    )
