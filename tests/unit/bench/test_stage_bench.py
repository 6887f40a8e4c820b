"""Timing a stage: whatever its layers keep, every shape is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.numerics.tiny import make_tiny_model
from wavepp_worker.bench.stage import StageOptions, measure_stage


@pytest.mark.parametrize("kinds", ["FLFFF", "FLLFF", "FFFFF"], ids=["both", "states", "attention"])
def test_a_stage_of_any_layers_can_be_timed(tmp_path: Path, kinds: str) -> None:
    names = {"L": "linear_attention", "F": "full_attention"}
    config = {"layer_types": [names[kind] for kind in kinds]}
    options = StageOptions(
        model=str(make_tiny_model(tmp_path, "qwen3_5", config=config)),
        layers=2,  # the second and the third
        waves=(16, 32),
        contexts=(0, 64),
        block_tokens=16,
        repeats=1,
        load_format="dummy",
        device="cpu",
    )
    assert_timed(options)


def test_a_stage_that_takes_more_than_a_hidden_state_can_be_timed(tmp_path: Path) -> None:
    options = StageOptions(
        model=str(make_tiny_model(tmp_path, "kimi_k3")),
        layers=2,
        waves=(16, 32),
        contexts=(0, 64),
        block_tokens=16,
        repeats=1,
        load_format="dummy",
        device="cpu",
    )
    assert_timed(options)


def assert_timed(options: StageOptions) -> None:
    lines: list[str] = []
    report = measure_stage(options, lines.append)
    assert len(lines) == len(report.points) == 4
    assert all(point.seconds > 0 for point in report.points)
