"""The floor of a stage's time: work per layer of published shapes, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wavepp_worker.bench.ceilings import Ceilings
from wavepp_worker.model.spec import read_spec
from wavepp_worker.model.work import Work, count_work

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 131_072,
}


def test_a_dense_layer(tmp_path: Path) -> None:
    """4,096 x (32 + 16) heads of 128, back, and three products of 4,096 x 12,288."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    work = count_work(read_spec(tmp_path, "bfloat16"), 4, 6)
    projections = 4096 * (32 + 16) * 128 + 32 * 128 * 4096
    mlp = 3 * 4096 * 12_288
    assert work == Work(
        dense_token=2 * 2 * (projections + mlp),
        expert_token=0,
        pair=2 * 4 * 32 * 128,
        expand_token=0,
    )


def test_the_floor_adds_what_each_unit_takes() -> None:
    work = Work(dense_token=1000, expert_token=200, pair=10, expand_token=7)
    ceilings = Ceilings(dense=1e-6, experts=2e-6, attention=5e-6)  # TFLOP/s
    tokens, context = 4, 6
    want = (1000 * 4 + 7 * 10) / 1e6 + 200 * 4 / 2e6 + 10 * (4 * 6 + 10) / 5e6
    assert ceilings.floor_s(work, tokens, context) == pytest.approx(want)
