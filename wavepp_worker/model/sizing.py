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
from wavepp_worker.base.units import align_down
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.config.derive import (
    HOST_FRACTION,
    ModelFacts,
    Plan,
    blocks_in,
    derive,
    refuse_states,
)
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import DTYPE_BYTES, ModelSpec, tensor_shapes


class StageSize(Struct, frozen=True, kw_only=True):
    """One stage and its GPU."""

    first: int
    stop: int
    weights_bytes: int
    free_bytes: int  # after weights and reserve
    token_bytes: int  # cache of one token
    cache_tokens: int


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
    refuse_states(facts)  # their bytes are not part of this arithmetic yet
    plan = derive(config, facts)
    fraction, chosen = config.cache.device_fraction, config.cache.device_tokens
    block, stages = plan.block_tokens, []
    room = gpu_bytes - reserve_bytes
    if room <= 0:
        raise ConfigError(f"the reserve of {reserve_bytes} bytes leaves nothing of {gpu_bytes}")
    for index, stage in enumerate(plan.stages):
        weights = weights_bytes(spec, stage.first, stage.stop)
        free = room - weights
        blocks = blocks_in(max(0, free), fraction, stage.block_bytes)
        if blocks < 2:
            raise ConfigError(
                f"stage {index} (layers {stage.first} to {stage.stop - 1}): weights take {weights} "
                f"bytes and two cache blocks {2 * stage.block_bytes}, but {room} are there; "
                f"{_advice(config, spec, facts, room)}"
            )
        if chosen is not None:
            if (chosen // block) * stage.block_bytes > free:
                raise ConfigError(
                    f"cache.device_tokens ({chosen}): stage {index} has room for "
                    f"{free // stage.block_bytes * block} tokens"
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
            )
        )
    return _sizing(config, spec, plan, tuple(stages), host_memory_bytes)


def weights_bytes(spec: ModelSpec, first: int, stop: int) -> int:
    """Return what the weights of a stage with layers [first, stop) take."""
    shapes = tensor_shapes(spec, first, stop).values()
    elements = sum(math.prod(shape) for shape in shapes)
    if spec.has_qk_norm:  # kept once per head, so that one kernel call does all heads
        elements += (stop - first) * (spec.heads + spec.kv_heads - 2) * spec.head_dim
    return elements * DTYPE_BYTES[spec.dtype]


def _sizing(
    config: Config,
    spec: ModelSpec,
    plan: Plan,
    stages: tuple[StageSize, ...],
    host_memory_bytes: int | None,
) -> Sizing:
    block = plan.block_tokens
    cache = min(stage.cache_tokens for stage in stages)
    row_bytes = sum(stage.block_bytes for stage in plan.stages)  # a block on every stage
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
            > 2 * stage.block_bytes / config.cache.device_fraction
            for stage in plan.stages
        ):
            return f"--gpus {stages} would do"
    return "no number of stages would do"
