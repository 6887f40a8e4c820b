"""What fits where: weights, cache and host tier of every stage, before any GPU is touched.

    memory of a GPU = reserve + weights of its stage + free;   cache = device_fraction of free

The numbers come from `config.derive` and from the tensors that a stage loads, so they are those of
a real start; only the reserve (CUDA context, NCCL, workspaces) is an estimate.
"""

from __future__ import annotations

import math

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.config.derive import (
    HOST_FRACTION,
    SNAPSHOTS_PER_INTERVAL,
    ModelFacts,
    Plan,
    block_and_fixed_bytes,
    blocks_in,
    derive,
    state_slots,
)
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import DTYPE_BYTES, ModelSpec, is_offset_norm, tensor_shapes


class StageSize(Struct, frozen=True, kw_only=True):
    """One stage and its GPU."""

    first: int
    stop: int
    weights_bytes: int
    free_bytes: int  # after weights and reserve
    token_bytes: int  # cache of one token
    cache_tokens: int
    state_bytes: int = 0  # of one recurrent state, running request or snapshot; 0: none is kept
    state_slots: int = 0


class Sizing(Struct, frozen=True, kw_only=True):
    """A worker on given GPUs."""

    stages: tuple[StageSize, ...]
    block_tokens: int
    cache_tokens: int  # of the smallest stage: what the worker as a whole can hold
    wave_tokens_max: int
    wave_tokens_min: int
    ring_waves: int
    headroom_tokens: int
    floor_tokens: int
    prompt_tokens_max: int  # the longest that is accepted
    prompt_tokens_beside_headroom: int  # the longest that need not be admitted alone
    wave_bytes: int  # what a full wave carries over the widest boundary of two stages
    host_tokens: int  # of each stage
    host_bytes: int  # of all stages together
    host_tokens_max: int | None  # what the host's memory would hold; None: not given


def size_worker(
    config: Config,
    spec: ModelSpec,
    facts: ModelFacts,
    *,
    gpu_bytes: int,
    reserve_bytes: int,
    host_memory_bytes: int | None = None,
) -> Sizing:
    """Return what a worker would have on GPUs of `gpu_bytes` each.

    Raises:
        ConfigError: the model cannot be cut so, or weights or cache do not fit; says what would.
    """
    plan = derive(config, facts)
    fraction, chosen = config.cache.device_fraction, config.cache.device_tokens
    block, stages = plan.block_tokens, []
    room = gpu_bytes - reserve_bytes
    if room <= 0:
        raise ConfigError(f"the reserve of {reserve_bytes} bytes leaves nothing of {gpu_bytes}")
    for index, stage in enumerate(plan.stages):
        weights = weights_bytes(spec, stage.first, stage.stop)
        free = room - weights
        block_bytes, fixed = block_and_fixed_bytes(config, plan, index)
        blocks = blocks_in(max(0, free), fraction, block_bytes, fixed)
        if blocks < 2:
            states = f" and its states {fixed}" if fixed else ""
            raise ConfigError(
                f"stage {index} (layers {stage.first} to {stage.stop - 1}): weights take {weights} "
                f"bytes, two cache blocks {2 * block_bytes}{states}, but {room} are there; "
                f"{_advice(config, spec, facts, room)}"
            )
        if chosen is not None:
            if chosen // block * block_bytes + fixed > free:
                raise ConfigError(
                    f"cache.device_tokens ({chosen}): stage {index} has room for "
                    f"{max(0, free - fixed) // block_bytes * block} tokens"
                )
            blocks = chosen // block
        stages.append(
            StageSize(
                first=stage.first,
                stop=stage.stop,
                weights_bytes=weights,
                free_bytes=free,
                token_bytes=stage.block_bytes // block,
                cache_tokens=blocks * block,
                state_bytes=stage.state_bytes,
                state_slots=state_slots(config, plan, index, blocks),
            )
        )
    return _sizing(config, spec, plan, tuple(stages), host_memory_bytes)


def weights_bytes(spec: ModelSpec, first: int, stop: int) -> int:
    """Return what the weights of a stage with layers [first, stop) take, as `load` keeps them."""
    size = DTYPE_BYTES[spec.dtype]
    total = 0
    for name, shape in tensor_shapes(spec, first, stop).items():
        copies = 1
        if name.endswith("_res_proj.weight"):
            copies = 0  # multiplied into the norm beside it
        elif spec.has_qk_norm and not spec.has_wide_qk_norm:
            # Once per head, so that one kernel call does all heads.
            if name.endswith("self_attn.q_norm.weight"):
                copies = spec.heads
            elif name.endswith("self_attn.k_norm.weight"):
                copies = spec.kv_heads
        total += copies * math.prod(shape) * (4 if _is_wide(spec, name) else size)
    return total


def _is_wide(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor is kept in fp32 whatever the model's type, where 16 bits lose too much."""
    moe, delta = spec.moe, spec.delta
    ends = [".A_log", ".dt_bias", "e_score_correction_bias", "_res_norm.weight"]
    if moe is not None and moe.scores == "sigmoid":
        ends.append(f".{moe.names.layer}.{moe.names.router}.weight")
    if delta is not None and delta.decay_rank:
        ends += ["_conv1d.weight", ".o_norm.weight"]
    return name.endswith(tuple(ends)) or is_offset_norm(spec, name)


def _sizing(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    stages: tuple[StageSize, ...],
    host_memory_bytes: int | None,
) -> Sizing:
    block = plan.block_tokens
    cache = min(stage.cache_tokens for stage in stages)
    # A block on every stage, with what it adds to the snapshots of a host tier.
    row_bytes = sum(
        stage.block_bytes
        + ceil_div(
            SNAPSHOTS_PER_INTERVAL * block * stage.state_bytes, plan.snapshot_interval_tokens
        )
        for stage in plan.stages
    )
    floor = floor_blocks(cache // block, plan.floor_fraction, plan.floor_headroom_blocks) * block
    host_max = None
    if host_memory_bytes is not None:
        host_max = blocks_in(host_memory_bytes, HOST_FRACTION, row_bytes) * block
    vectors = 1 + max(spec.starts_before(stage.first) for stage in stages)
    return Sizing(
        stages=stages,
        block_tokens=block,
        cache_tokens=cache,
        wave_tokens_max=plan.wave_tokens_max,
        wave_tokens_min=plan.wave_tokens_min,
        ring_waves=plan.ring_waves,
        headroom_tokens=plan.headroom_tokens,
        floor_tokens=floor,
        prompt_tokens_max=min(plan.context_tokens, cache),
        prompt_tokens_beside_headroom=max(
            0, min(plan.context_tokens, align_down(max(0, cache - plan.headroom_tokens), block))
        ),
        wave_bytes=plan.wave_tokens_max * vectors * spec.hidden * DTYPE_BYTES[spec.dtype],
        host_tokens=config.cache.host_tokens,
        host_bytes=config.cache.host_tokens // block * row_bytes,
        host_tokens_max=host_max,
    )


def _advice(config: Config, spec: ModelSpec, facts: ModelFacts, room_bytes: int) -> str:
    """Return the smallest number of GPUs on which weights and a little cache fit."""
    for stages in range(config.cluster.stages + 1, facts.layers + 1):
        more = msgspec.structs.replace(
            config,
            cluster=msgspec.structs.replace(config.cluster, stages=stages, devices=()),
            model=msgspec.structs.replace(config.model, stage_layers=()),
        )
        plan = derive(more, facts)
        if all(
            room_bytes - weights_bytes(spec, stage.first, stage.stop)
            > (2 * sum(block_and_fixed_bytes(more, plan, index))) / config.cache.device_fraction
            for index, stage in enumerate(plan.stages)
        ):
            return f"--gpus {stages} would do"
    return "no number of stages would do"
