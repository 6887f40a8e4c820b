"""Weights: half-written checkpoints are refused, a stage reads only what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.numerics.tiny import make_tiny_model
from wavepp_worker.base.errors import ConfigError, InvariantError
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.model.load import DummySource, load_stage
from wavepp_worker.model.spec import FAMILIES, read_facts, read_spec, tensor_shapes

SHARD = "model-00002-of-00002.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"


def cut_short(folder: Path) -> None:
    file = folder / SHARD
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_header(folder: Path) -> None:
    file = folder / SHARD
    file.write_bytes(file.read_bytes()[:200])


def leave_empty(folder: Path) -> None:
    (folder / SHARD).write_bytes(b"")


def append_bytes(folder: Path) -> None:
    with (folder / SHARD).open("ab") as file:
        file.write(b"x")


def write_garbage(folder: Path) -> None:
    (folder / SHARD).write_bytes((16).to_bytes(8, "little") + b"not json at all!")


def remove_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


def remove_tensor(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop(min(tensors)))


def reshape_tensor(folder: Path) -> None:
    def halve(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("_proj.weight"))
        tensors[name] = tensors[name][:-1].contiguous()

    change(folder, halve)


def quantize_tensor(folder: Path) -> None:
    def pack(tensors: dict[str, torch.Tensor]) -> None:
        name = next(iter(tensors))
        tensors[name] = tensors[name].to(torch.int8)

    change(folder, pack)


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SHARD)
    edit(tensors)
    save_file(tensors, folder / SHARD)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, [SHARD, "truncated", "bytes"]),
        (cut_in_header, [SHARD, "truncated"]),
        (leave_empty, [SHARD, "truncated", "0 bytes"]),
        (append_bytes, [SHARD, "longer than its header"]),
        (write_garbage, [SHARD, "not a safetensors header"]),
        (remove_shard, ["1 of 2 shards", SHARD]),
        (remove_tensor, ["tensors are missing: lm_head.weight"]),
        (reshape_tensor, [SHARD, "shape", "config.json asks for"]),
        (quantize_tensor, [SHARD, "I8", "BF16"]),
        (break_index, ["index.json", "weight_map"]),
    ],
)
def test_damaged_checkpoints_are_refused_before_and_at_loading(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    """FS-48: a missing weight is an error, never a random tensor."""
    folder = make_tiny_model(tmp_path, shards=2)
    spec = read_spec(folder)
    damage(folder)
    for attempt in (lambda: read_facts(folder), lambda: load_stage(folder, spec, 0, 5)):
        with pytest.raises(ConfigError) as refused:
            attempt()
        assert [word for word in words if word not in str(refused.value)] == []


def test_a_stage_reads_only_its_tensors(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    spec = read_spec(folder)
    middle = tensor_shapes(spec, 2, 4)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensors[name] for name in middle}, folder / "model.safetensors")
    calls: list[tuple[int, int]] = []
    stage = load_stage(folder, spec, 2, 4, progress=lambda done, total: calls.append((done, total)))
    assert (stage.is_first, stage.is_last) == (False, False)
    assert calls == [(done, len(middle)) for done in range(1, len(middle) + 1)]
    with pytest.raises(ConfigError, match="missing"):
        load_stage(folder, spec, 1, 4)


def test_stage_has_the_type_and_inputs_it_declares(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    spec = read_spec(folder, "bfloat16")
    first, last = load_stage(folder, spec, 0, 2), load_stage(folder, spec, 2, 5)
    assert first.input_spec(7) == {"tokens": ((7,), torch.int64)}
    assert last.input_spec(7) == {"hidden": ((7, 64), torch.bfloat16)}
    store = last.make_store(4, 16)
    assert (store.pool.dtype, store.layers) == (torch.bfloat16, 3)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_the_plan_and_the_pool_agree_on_a_blocks_bytes(tmp_path: Path, family: str) -> None:
    folder = make_tiny_model(tmp_path, family)
    model = ModelConfig(path=str(folder), stage_layers=(2, 3))
    plan = derive(Config(model=model, cluster=ClusterConfig(stages=2)), read_facts(folder))
    for stage in plan.stages:
        loaded = load_stage(folder, read_spec(folder), stage.first, stage.stop)
        assert loaded.make_store(1, plan.block_tokens).block_bytes == stage.block_bytes


@pytest.mark.parametrize("bounds", [(0, 0), (3, 2), (-1, 2), (0, 6)])
def test_stages_outside_the_model_are_refused(tmp_path: Path, bounds: tuple[int, int]) -> None:
    folder = make_tiny_model(tmp_path)
    with pytest.raises(InvariantError, match="not a stage"):
        load_stage(folder, read_spec(folder), *bounds)


def test_single_file_checkpoints_need_no_index(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "model.safetensors.index.json").unlink()
    assert NAME in index["weight_map"]
    assert load_stage(folder, read_spec(folder), 0, 5).is_last


def test_dummy_weights_depend_on_seed_and_name() -> None:
    weight = DummySource(0).get(NAME, (96, 64))
    assert torch.equal(weight, DummySource(0).get(NAME, (96, 64)))
    assert not torch.equal(weight, DummySource(1).get(NAME, (96, 64)))
    assert not torch.equal(weight, DummySource(0).get(NAME.replace("1", "2"), (96, 64)))
    assert weight.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert torch.equal(DummySource(0).get("model.norm.weight", (4,)), torch.ones(4))
