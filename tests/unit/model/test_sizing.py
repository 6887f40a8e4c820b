"""`wavepp plan`: its bytes are those that a stage really takes, and it says what would fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphs.plan_command import parse_size
from tests.numerics.tiny import make_tiny_model, tiny_config
from tests.unit.model.test_sizes import MODELS
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.cli import main
from wavepp_worker.config.derive import blocks_in
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.sizing import size_worker, weights_bytes
from wavepp_worker.model.spec import FAMILIES, read_facts, read_spec

QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 25600,
    "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}  # fmt: skip
GIB = 2**30


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


@pytest.mark.parametrize("family", FAMILIES.values())
@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_what_a_loaded_stage_takes(tmp_path: Path, family: str, is_tied: bool) -> None:
    make_tiny_model(tmp_path, family, config={"tie_word_embeddings": is_tied})
    spec = read_spec(tmp_path, "bfloat16")
    for first, stop in ((0, spec.layers), (0, 1), (1, spec.layers)):
        stage = load_stage(tmp_path, spec, first, stop, load_format="dummy")
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in
                    tensors(stage._weights)}  # fmt: skip
        loaded = sum(storage.nbytes() for storage in storages.values())
        assert weights_bytes(spec, first, stop) == loaded


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], model: str, *words: str) -> dict[str, Any]:
    assert main(["plan", model, "--json", *words]) == 0
    sizing: dict[str, Any] = json.loads(capsys.readouterr().out)
    return sizing


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_known_model_on_four_gpus(capsys: pytest.CaptureFixture[str], model: str) -> None:
    sizing = planned(capsys, model, "--gpus", "4", "--gpu-memory", "80GiB", "--reserve", "2GiB")
    stages = sizing["stages"]
    assert [(s["first"], s["stop"]) for s in stages] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    # 32.76 G parameters of two bytes, by the model's own card.
    assert sum(s["weights_bytes"] for s in stages) == pytest.approx(2 * 32.76e9, rel=0.001)
    for stage in stages:
        assert stage["token_bytes"] == 2 * 16 * 8 * 128 * 2
        assert stage["free_bytes"] == 78 * GIB - stage["weights_bytes"]
        blocks = blocks_in(stage["free_bytes"], 0.85, 64 * stage["token_bytes"])
        assert stage["cache_tokens"] == 64 * blocks > 0
    assert sizing["cache_tokens"] == min(s["cache_tokens"] for s in stages)
    assert sizing["headroom_tokens"] == 2 * 4 * 16_384
    assert sizing["floor_tokens"] == 32_768  # a quarter of a ring, below a tenth of the cache
    assert (sizing["wave_tokens_min"], sizing["ring_waves"]) == (8192, 8)
    assert sizing["wave_bytes"] == 16_384 * 5120 * 2
    assert sizing["prompt_tokens_max"] == 40_960


def test_attention_residuals_widen_the_boundaries(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Layers without states: five in blocks of two, cut before the third and before the fifth."""
    linear = tiny_config("kimi_k3")["text_config"]["linear_attn_config"]
    every = {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}
    tree = tiny_config("kimi_k3", dtype="bfloat16")
    tree["text_config"]["linear_attn_config"] = linear | every
    (tmp_path / "config.json").write_text(json.dumps(tree))
    for layers, vectors in (("[2, 3]", 2), ("[4, 1]", 3)):
        words = ("--gpus", "2", "--gpu-memory", "8GiB", "--set", f"model.stage_layers={layers}")
        sizing = planned(capsys, str(tmp_path), *words)
        assert sizing["wave_bytes"] == 16_384 * vectors * 64 * 2


def test_settings_change_the_sizes(capsys: pytest.CaptureFixture[str], model: str) -> None:
    words = ("--gpus", "4", "--gpu-memory", "80GiB")
    sets = {"planner.wave_tokens_max": 4096, "cache.device_tokens": 64_000,
            "cache.host_tokens": 128_000, "admission.headroom_factor": 0.5}  # fmt: skip
    more = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    sizing = planned(capsys, model, *words, *more, "--host-memory", "64GiB")
    assert sizing["cache_tokens"] == 64_000
    assert sizing["headroom_tokens"] == 4 * 4096
    assert sizing["prompt_tokens_beside_headroom"] == min(40_960, 64_000 - 4 * 4096)
    row_bytes = 4 * 65_536
    assert sizing["host_bytes"] == 128_000 * row_bytes
    assert sizing["host_tokens_max"] == int(64 * GIB * 0.9) // (64 * row_bytes) * 64


def test_what_does_not_fit_is_refused_with_what_would(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    small = ("--gpu-memory", "40GiB")
    text = refused(capsys, model, "--gpus", "1", *small)
    assert re.search(r"stage 0 \(layers 0 to 63\): weights take 655\d{8} bytes", text)
    assert "--gpus 2 would do" in text
    assert planned(capsys, model, "--gpus", "2", *small)["cache_tokens"] > 0
    assert "no number of stages would do" in refused(
        capsys, model, "--gpus", "1", "--gpu-memory", "2.5GiB"
    )
    text = refused(capsys, model, "--gpus", "2", *small, "--set", "cache.device_tokens=6400000")
    assert "cache.device_tokens (6400000): stage 0 has room for" in text
    assert "leaves nothing" in refused(capsys, model, "--gpus", "2", "--gpu-memory", "1GiB")


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], model: str) -> None:
    memory = ("--gpu-memory", "80GiB")
    assert "cluster.stages" in refused(capsys, model, "--gpus", "0", *memory)
    assert "no such folder" in refused(capsys, "/nowhere", "--gpus", "1", *memory)
    assert "cache.block: unknown key" in refused(
        capsys, model, "--gpus", "2", *memory, "--set", "cache.block=1"
    )


def test_the_table_explains_itself(capsys: pytest.CaptureFixture[str], model: str) -> None:
    words = ["plan", model, "--gpus", "4", "--gpu-memory", "80GiB"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "131,072  tokens free at selection: 1 x 2 x 4 x M" in text
    assert "note:" not in text
    assert (
        main([*words, "--set", "cache.device_tokens=100000", "--set", "cache.block_tokens=32"]) == 0
    )
    assert "every prompt is admitted alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80Gi", 80 * GIB), ("141GB", 141 * 10**9), ("1.5T", 1_500_000_000_000),
     ("512MiB", 512 * 2**20), ("7", 7)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert parse_size("--x", text) == size


@pytest.mark.parametrize("text", ["", "80x", "GiB", "-1GiB", "80 GiB", "80GiBB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        parse_size("--x", text)


def test_states_take_their_share(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Kimi Linear's shape on two GPUs: blocks and states fill the share, as a worker's would."""
    tree = tiny_config("kimi_linear", dtype="bfloat16") | MODELS["Kimi-Linear-48B-A3B"][1]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    words = ("--gpus", "2", "--gpu-memory", "141GB", "--set", "model.context_tokens_max=4096")
    sizing = planned(capsys, str(tmp_path), *words)
    assert sum(stage["weights_bytes"] for stage in sizing["stages"]) == pytest.approx(
        2 * 49.12e9, rel=0.002
    )
    for stage in sizing["stages"]:
        states = stage["state_slots"] * stage["state_bytes"]
        taken = stage["cache_tokens"] * stage["token_bytes"] + states
        share = 0.85 * stage["free_bytes"]
        one_more = 64 * stage["token_bytes"] + 2 * stage["state_bytes"]
        assert share - one_more <= taken <= share
        assert stage["state_slots"] == 16 + -(-2 * stage["cache_tokens"] // 16_384)
    assert main(["plan", str(tmp_path), *words]) == 0
    assert "states of" in capsys.readouterr().out


def test_states_without_room_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_5")))
    spec, facts = read_spec(tmp_path), read_facts(tmp_path, "auto", "dummy")
    room = weights_bytes(spec, 0, 5) + 16 * 3 * facts.state_layer_bytes
    with pytest.raises(ConfigError, match=r"two cache blocks \d+ and its states \d+, but"):
        size_worker(
            Config(model=ModelConfig(path=str(tmp_path)), cluster=ClusterConfig(stages=1)),
            spec, facts, gpu_bytes=room, reserve_bytes=0,
        )  # fmt: skip
