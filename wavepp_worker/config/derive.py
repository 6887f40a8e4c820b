"""Config + facts of the model → Plan: every derived number, computed once.  [algorithms 1, 7.3]"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.config.schema import Config

HOST_FRACTION = 0.9  # of available memory: more for host tiers would fail later, in service


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What the plan needs to know of a model; read from config.json by `model.spec`."""

    family: str
    layers: int
    hidden: int
    vocab: int
    context_tokens: int
    kv_heads: int
    head_dim: int
    latent_dim: int | None = None  # latent attention: one row per token, no keys and values
    dtype: str  # "float32" | "bfloat16" | "float16"
    dtype_bytes: int
    fingerprint: str  # names the weights and the cache format; equal on every worker of this model
    delta_layers: tuple[int, ...] = ()  # indices of those that keep a state instead of blocks
    state_layer_bytes: int = 0  # of one such layer in one slot


class StagePlan(Struct, frozen=True, kw_only=True):
    """One stage: layers [first, stop) and the sizes of what its windows consist of."""

    first: int
    stop: int
    block_bytes: int  # 0: no attention layer, no attention window
    state_bytes: int = 0  # of one slot: all recurrent layers; 0: no recurrent window


class Plan(Struct, frozen=True, kw_only=True):
    """Derived numbers of one worker."""

    stages: tuple[StagePlan, ...]
    block_tokens: int  # B
    wave_tokens_max: int  # M
    wave_tokens_min: int  # b_min
    snapshot_interval_tokens: int  # I_snap
    ring_waves: int  # R = 2P
    headroom_tokens: int  # kappa * 2 * P * M
    floor_headroom_blocks: int  # ceil(kappa_f * 2PM / B), before the cap by the pool's size
    floor_fraction: float
    context_tokens: int  # longest prompt accepted
    fingerprint: str


def refuse_states(facts: ModelFacts) -> None:
    """Refuse a model with recurrent states where only blocks are reckoned with.

    Raises:
        ConfigError: it has linear-attention layers.
    """
    if facts.delta_layers:
        raise ConfigError(
            f"{facts.family}: {len(facts.delta_layers)} of {facts.layers} layers keep a recurrent "
            "state, which is not part of this arithmetic yet"
        )


def balanced_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return layers per stage, balanced; the last stages, which own the head, get fewer."""
    base, extra = divmod(layers, stages)
    return tuple(base + (1 if stage < extra else 0) for stage in range(stages))


def blocks_in(free_bytes: int, fraction: float, block_bytes: int, fixed_bytes: int = 0) -> int:
    """Return how many cache blocks a share of the memory left after weights holds.

    Args:
        fixed_bytes: of that share, what something else takes; a stage may have empty blocks.
    """
    return (int(free_bytes * fraction) - fixed_bytes) // max(1, block_bytes)


def derive(config: Config, facts: ModelFacts) -> Plan:
    """Return the plan of a worker.

    Raises:
        ConfigError: the model cannot be cut or cached as configured; names the config path.
    """
    stages = config.cluster.stages
    if stages > facts.layers:
        raise ConfigError(
            f"cluster.stages ({stages}): the model's {facts.layers} layers cannot be cut so often"
        )
    counts = config.model.stage_layers or balanced_layers(facts.layers, stages)
    if sum(counts) != facts.layers or min(counts) < 1:
        raise ConfigError(
            f"model.stage_layers {list(counts)}: must be {stages} positive numbers that add up "
            f"to the model's {facts.layers} layers"
        )
    context = config.model.context_tokens_max or facts.context_tokens
    if context > facts.context_tokens:
        raise ConfigError(
            f"model.context_tokens_max ({context}) exceeds the model's own limit of "
            f"{facts.context_tokens} tokens"
        )
    block = config.cache.block_tokens
    token_values = facts.latent_dim or 2 * facts.kv_heads * facts.head_dim
    layer_block_bytes = token_values * facts.dtype_bytes * block
    plans, first = [], 0
    for count in counts:
        states = sum(first <= layer < first + count for layer in facts.delta_layers)
        plans.append(
            StagePlan(
                first=first,
                stop=first + count,
                block_bytes=(count - states) * layer_block_bytes,
                state_bytes=states * facts.state_layer_bytes,
            )
        )
        first += count
    waves = config.planner.wave_tokens_max
    ring_tokens = 2 * stages * waves
    return Plan(
        stages=tuple(plans),
        block_tokens=block,
        wave_tokens_max=waves,
        wave_tokens_min=config.planner.wave_tokens_min or max(block, align_down(waves // 2, block)),
        snapshot_interval_tokens=config.cache.snapshot_interval_tokens or waves,
        ring_waves=2 * stages,
        headroom_tokens=int(config.admission.headroom_factor * ring_tokens),
        floor_headroom_blocks=ceil_div(
            int(config.cache.floor_headroom_fraction * ring_tokens), block
        ),
        floor_fraction=config.cache.floor_fraction,
        context_tokens=context,
        fingerprint=facts.fingerprint,
    )
