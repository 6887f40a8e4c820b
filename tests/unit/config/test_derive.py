"""How a model is cut into stages."""

from __future__ import annotations

import msgspec
import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts, derive
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
