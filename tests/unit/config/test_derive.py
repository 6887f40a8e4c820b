"""How a model is cut into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts, balanced_layers, derive
from wavepp_worker.config.schema import (
    CacheConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    PlannerConfig,
)

FACTS = ModelFacts(
    family="llama", layers=5, hidden=64, vocab=300, context_tokens=4096, kv_heads=2, head_dim=16,
    dtype="float32", dtype_bytes=4, fingerprint="fp",
)  # fmt: skip


def cut(stages: int, *layers: int) -> list[tuple[int, int]]:
    model = ModelConfig(path="unused", stage_layers=layers or None)
    config = Config(model=model, cluster=ClusterConfig(stages=stages))
    return [(stage.first, stage.stop) for stage in derive(config, FACTS).stages]


def test_layers_that_stages_do_not_divide_are_balanced() -> None:
    """FS-47"""
    assert cut(2) == [(0, 3), (3, 5)]
    assert cut(4) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert cut(2, 1, 4) == [(0, 1), (1, 5)]


@given(
    st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=8),
    st.integers(min_value=1, max_value=4),
)
def test_no_other_cut_has_a_cheaper_slowest_stage(costs: list[int], stages: int) -> None:
    """FS-47: compared with every cut; among equals the evenest, then the first stages' the most."""
    stages = min(stages, len(costs))

    def badness(places: tuple[int, ...]) -> tuple[int, int, list[int]]:
        bounds = list(pairwise((0, *places, len(costs))))
        sums = [sum(costs[first:stop]) for first, stop in bounds]
        return max(sums), sum(x * x for x in sums), [first - stop for first, stop in bounds]

    best = min(map(badness, combinations(range(1, len(costs)), stages - 1)))
    assert [-count for count in balanced_layers(costs, stages)] == best[2]


def test_layers_that_cost_more_are_spread() -> None:
    """FS-47: Kimi Linear's attention layers cost four times what its others do."""
    costs = tuple(4 if layer in {3, 7, 11, 15, 19, 23, 26} else 1 for layer in range(27))
    assert balanced_layers(costs, 2) == (15, 12)
    facts = msgspec.structs.replace(FACTS, layer_costs=(1, 1, 1, 1, 9))
    plan = derive(Config(model=ModelConfig(path="unused"), cluster=ClusterConfig(stages=2)), facts)
    assert [(stage.first, stage.stop) for stage in plan.stages] == [(0, 4), (4, 5)]


def test_fewer_layers_than_stages_are_refused_with_both_numbers() -> None:
    """FS-47"""
    with pytest.raises(ConfigError, match=r"cluster\.stages \(6\).* 5 layers"):
        cut(6)


def test_a_stage_has_the_bytes_of_the_layers_it_has() -> None:
    """FS-32: layers 0, 1 and 3 keep states of 1,000 bytes, the others 2 * 2 * 16 * 4 a token."""
    facts = msgspec.structs.replace(FACTS, delta_layers=(0, 1, 3), state_layer_bytes=1000)
    model = ModelConfig(path="unused", stage_layers=(2, 1, 2))
    plan = derive(Config(model=model, cluster=ClusterConfig(stages=3)), facts)
    assert [(stage.block_bytes, stage.state_bytes) for stage in plan.stages] == [
        (0, 2000),
        (64 * 256, 0),
        (64 * 256, 1000),
    ]


@pytest.mark.parametrize("layers", [(5, 1), (5, 0), (2, 2)])
def test_a_split_that_is_not_the_models_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="stage_layers"):
        cut(2, *layers)


@pytest.mark.parametrize(("interval", "expected"), [(None, 512), (128, 128)])
def test_states_are_kept_once_a_wave_unless_told_otherwise(
    interval: int | None, expected: int
) -> None:
    """A33"""
    config = Config(
        model=ModelConfig(path="unused"),
        planner=PlannerConfig(wave_tokens_max=512),
        cache=CacheConfig(snapshot_interval_tokens=interval),
    )
    assert derive(config, FACTS).snapshot_interval_tokens == expected
