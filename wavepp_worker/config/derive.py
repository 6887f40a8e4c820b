"""Config + facts of the model → Plan: every derived number, computed once.  [algorithms 1, 7.3]"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.config.schema import Config

SNAPSHOTS_PER_INTERVAL = 2  # of cached tokens: prompts also keep one at their last block
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
    layer_costs: tuple[int, ...] = ()  # what each computes per token, in any unit; (): all alike


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


def balanced_layers(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return layers per stage: no stage's cost is larger than it must be, and the rest are even.

    Of equally good cuts, the one whose first stages have more layers: the last one owns the head.

    Args:
        costs: of each layer; at least as many as stages.
    """
    count = len(costs)
    sums = [0, *accumulate(costs)]
    # slowest[s][i]: least possible cost of the slowest of s stages that share layers i and later.
    slowest = [[0 if i == count else math.inf for i in range(count + 1)]]
    for _ in range(stages):
        later = slowest[-1]
        slowest.append(
            [
                min(
                    (max(sums[j] - sums[i], later[j]) for j in range(i + 1, count + 1)),
                    default=math.inf,
                )
                for i in range(count + 1)
            ]
        )
    limit = slowest[stages][0]
    # uneven[s][i]: least sum of squares, no stage above the limit.
    uneven: list[list[float]] = [[0 if i == count else math.inf for i in range(count + 1)]]
    for _ in range(stages):
        uneven.append([_least(sums, uneven[-1], i, limit) for i in range(count + 1)])
    layers, first = [], 0
    for left in range(stages, 0, -1):
        stop = max(
            j
            for j in range(first + 1, count + 1)
            if sums[j] - sums[first] <= limit
            and (sums[j] - sums[first]) ** 2 + uneven[left - 1][j] == uneven[left][first]
        )
        layers.append(stop - first)
        first = stop
    return tuple(layers)


def _least(sums: Sequence[int], later: Sequence[float], first: int, limit: float) -> float:
    return min(
        (
            (sums[stop] - sums[first]) ** 2 + later[stop]
            for stop in range(first + 1, len(sums))
            if sums[stop] - sums[first] <= limit
        ),
        default=math.inf,
    )


def blocks_in(free_bytes: int, fraction: float, block_bytes: int, fixed_bytes: int = 0) -> int:
    """Return how many cache blocks a share of the memory left after weights holds.

    Args:
        fixed_bytes: of that share, what something else takes; a stage may have empty blocks.
    """
    return (int(free_bytes * fraction) - fixed_bytes) // max(1, block_bytes)


def state_slots(config: Config, plan: Plan, stage: int, blocks: int) -> int:
    """Return how many states a stage keeps beside `blocks` blocks; 0 without recurrent layers.

    A slot for each of K requests, and for every interval of the cache the snapshot at its end and
    one at the end of a prompt.
    """
    if not plan.stages[stage].state_bytes:
        return 0
    slots = config.cache.state_slots
    if slots is not None:
        return slots if isinstance(slots, int) else slots[stage]
    return config.admission.batch_requests_max + snapshots_in(plan, blocks * plan.block_tokens)


def snapshots_in(plan: Plan, tokens: int) -> int:
    """Return how many snapshots so many cached tokens have."""
    return ceil_div(SNAPSHOTS_PER_INTERVAL * tokens, plan.snapshot_interval_tokens)


def block_and_fixed_bytes(config: Config, plan: Plan, stage: int) -> tuple[int, int]:
    """Return what one more block costs a stage, its share of the states included, and the rest."""
    sizes = plan.stages[stage]
    fixed_bytes = state_slots(config, plan, stage, 0) * sizes.state_bytes
    if config.cache.state_slots is not None or not sizes.state_bytes:
        return sizes.block_bytes, fixed_bytes
    share = SNAPSHOTS_PER_INTERVAL * plan.block_tokens * sizes.state_bytes
    block_bytes = sizes.block_bytes + ceil_div(share, plan.snapshot_interval_tokens)
    # Rounding up costs the pool of states a slot at most.
    return block_bytes, fixed_bytes + sizes.state_bytes


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
    counts = config.model.stage_layers or balanced_layers(
        facts.layer_costs or (1,) * facts.layers, stages
    )
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
