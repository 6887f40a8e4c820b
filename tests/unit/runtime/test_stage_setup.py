"""What a stage refuses at start, and how big its pool gets."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
import zmq

from wavepp_worker.base.errors import ConfigError, DeviceError, PeerError
from wavepp_worker.base.types import Rank
from wavepp_worker.config.derive import derive, state_slots
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime import stage_setup
from wavepp_worker.runtime.boot import Boot
from wavepp_worker.runtime.stage_setup import (
    build_stage,
    build_work,
    host_blocks,
    pool_blocks,
    stage_device,
)
from wavepp_worker.wire.mailbox import WindowReport

CPU = torch.device("cpu")


def make_boot(
    tmp: Path, changes: dict[str, object] | None = None, **sections: dict[str, object]
) -> Boot:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 128,
    }
    (tmp / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], **shape} | (changes or {}))
    )
    model: dict[str, object] = {"path": str(tmp), "load_format": "dummy"}
    tree: dict[str, dict[str, object]] = {
        "model": model,
        "cluster": {"stages": 1},
        "cache": {"block_tokens": 16},
        "planner": {"wave_tokens_max": 64},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    config = msgspec.convert(tree, Config)
    facts = read_facts(tmp, load_format="dummy")
    return Boot(
        config=config,
        plan=derive(config, facts),
        facts=facts,
        epoch=1,
        group="g",
        run_dir=str(tmp),
        report_address="",
        namespace="n",
        parent_pid=0,
    )


@pytest.mark.parametrize(
    ("sections", "error", "words"),
    [
        ({"model": {"load_format": "safetensors"}}, ConfigError, "no \\*.safetensors"),
        ({"cache": {"device_tokens": 16 << 44}}, DeviceError, "out of memory on cpu while alloc"),
        ({"cluster": {"devices": ["cuda:63"]}}, ConfigError, "stage 0 wants cuda:63, but"),
        ({"cluster": {"devices": ["toaster"]}}, ConfigError, "'toaster' is not a device"),
        ({"cluster": {"devices": ["meta"]}}, ConfigError, "only cpu and cuda"),
    ],
)
def test_an_unusable_start_says_why(
    tmp_path: Path, sections: dict[str, dict[str, object]], error: type[Exception], words: str
) -> None:
    boot = make_boot(tmp_path, **({"cluster": {"devices": ["cpu"]}} | sections))
    with zmq.Context() as context, pytest.raises(error, match=words):
        build_stage(boot, Rank(0), None, context)


def test_nccl_cannot_serve_a_cpu_stage(tmp_path: Path) -> None:
    boot = make_boot(
        tmp_path,
        cluster={"stages": 2, "devices": ["cpu", "cpu"]},
        transport={"activations": "nccl"},
    )
    with zmq.Context() as context, pytest.raises(ConfigError, match="nccl cannot move"):
        build_stage(boot, Rank(1), None, context)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_cpu_is_the_default_without_cuda() -> None:
    assert stage_device((), (0, 1), Rank(1)) == CPU


def test_a_configured_pool_is_cut_to_whole_blocks(tmp_path: Path) -> None:
    boot = make_boot(tmp_path, cache={"device_tokens": 100})
    assert pool_blocks(boot, Rank(0), CPU) == 6


def test_a_default_cpu_pool_holds_four_longest_prompts_and_a_ring(tmp_path: Path) -> None:
    # 4 * 128 tokens of prompts + 2 * 64 tokens of waves, 16 tokens a block
    assert pool_blocks(make_boot(tmp_path), Rank(0), CPU) == (4 * 128 + 2 * 64) // 16


def test_a_pool_without_room_is_refused(tmp_path: Path) -> None:
    boot = make_boot(tmp_path)
    stage = msgspec.structs.replace(boot.plan.stages[0], block_bytes=1 << 60)
    boot = msgspec.structs.replace(boot, plan=msgspec.structs.replace(boot.plan, stages=(stage,)))
    with pytest.raises(ConfigError, match="no room for a cache on cpu"):
        pool_blocks(boot, Rank(0), CPU)


def test_the_host_tiers_of_all_stages_must_fit_with_some_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS-93: two stages of 10 blocks each, that is 20 blocks of nine tenths of what there is."""
    boot = make_boot(tmp_path, cluster={"stages": 2}, cache={"host_tokens": 160})
    needed = 10 * sum(stage.block_bytes for stage in boot.plan.stages)
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: needed * 10 // 9 + 1)
    assert host_blocks(boot) == 10
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: needed * 10 // 9 - 10)
    with pytest.raises(ConfigError, match=f"cache.host_tokens = 160.* 2 stages take {needed} "):
        host_blocks(boot)


HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_experts": 0,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# 2 heads of 8 x 8 fp32, and 3 rows of 3 * 16 channels fp32.
STATE_BYTES = 2 * 64 * 4 + 3 * 48 * 4


def make_hybrid(tmp: Path, *layers: int, **sections: dict[str, object]) -> Boot:
    """Two layers with states, then one of attention; K = 16, a snapshot every 32 tokens."""
    cuts = {"cluster": {"stages": len(layers)}, "model": {"stage_layers": layers}}
    cache = {"block_tokens": 16, "snapshot_interval_tokens": 32} | sections.pop("cache", {})
    return make_boot(tmp, HYBRID, **cuts, cache=cache, **sections)


def test_windows_are_those_of_the_stages_layers(tmp_path: Path) -> None:
    """FS-32: 6 blocks of 16 tokens have 3 intervals, hence 16 + 2 * 3 slots; 2 * 2 on the host."""
    boot = make_hybrid(tmp_path, 3, cache={"device_tokens": 100, "host_tokens": 64})
    work, windows = build_work(boot, Rank(0), None)
    assert windows == (WindowReport("attention", 6, 4), WindowReport("recurrent", 22, 4))
    assert work.states is not None
    assert work.states.slot_bytes == boot.plan.stages[0].state_bytes == 2 * STATE_BYTES
    assert (work.states.slots, len(work.states.host_pool)) == (22, 4)
    assert work.store.block_bytes == boot.plan.stages[0].block_bytes
    for chosen in (2, 40):
        boot = make_hybrid(tmp_path, 3, cache={"state_slots": chosen, "device_tokens": 100})
        assert build_work(boot, Rank(0), None)[1][1] == WindowReport("recurrent", chosen)


def test_a_stage_without_attention_keeps_states_alone(tmp_path: Path) -> None:
    boot = make_hybrid(tmp_path, 2, 1, cache={"device_tokens": 100})
    plan = boot.plan.stages
    assert [(stage.block_bytes > 0, stage.state_bytes > 0) for stage in plan] == [
        (False, True),
        (True, False),
    ]
    assert (
        state_slots(boot.config, boot.plan, 0, 6),
        state_slots(boot.config, boot.plan, 1, 6),
    ) == (22, 0)


@pytest.mark.parametrize("layers", [(3,), (2, 1), (1, 2)], ids=str)
def test_blocks_and_states_share_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    """They fill the share that the pools may take, and no more; also without one of the two."""
    boot = make_hybrid(tmp_path, *layers)
    budget = 60_000
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: 4 * len(layers) * budget)
    for rank, stage in enumerate(boot.plan.stages):
        blocks = pool_blocks(boot, Rank(rank), CPU)
        slots = state_slots(boot.config, boot.plan, rank, blocks)
        taken = blocks * stage.block_bytes + slots * stage.state_bytes
        spare = 2 * (stage.block_bytes + stage.state_bytes)
        if blocks < (4 * 128 + 2 * len(layers) * 64) // 16:  # not the cap of CPU pools
            assert budget - spare <= taken <= budget
        assert blocks >= 2
        assert taken <= budget


def test_states_without_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = make_hybrid(tmp_path, 3)
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: 4 * 17 * 2 * STATE_BYTES)
    with pytest.raises(ConfigError, match=r"its states \d+; .*cache.state_slots"):
        pool_blocks(boot, Rank(0), CPU)


def test_host_tiers_count_their_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = make_hybrid(tmp_path, 2, 1, cache={"host_tokens": 64})
    blocks = 4 * sum(stage.block_bytes for stage in boot.plan.stages)
    needed = blocks + 4 * 2 * STATE_BYTES
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: needed * 10 // 9 + 1)
    assert host_blocks(boot) == 4
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: needed * 10 // 9 - 10)
    with pytest.raises(ConfigError, match=f"take {needed} "):
        host_blocks(boot)


class LonelyStore:
    """A torch.distributed store whose other stages never come."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def set(self, key: str, _: bytes) -> None:
        self._events.append(f"set {key}")

    def wait(self, keys: list[str]) -> None:
        self._events += [f"wait {key}" for key in keys]
        raise RuntimeError("nobody came")


def test_no_stage_takes_host_memory_before_all_have_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS-93: one that looked later would count its neighbour's tier twice and refuse its own."""
    boot = make_boot(
        tmp_path,
        cluster={"stages": 3, "devices": ["cpu"] * 3},
        cache={"host_tokens": 160, "device_tokens": 160},
    )
    events: list[str] = []
    monkeypatch.setattr(stage_setup, "available_bytes", lambda: events.append("look") or 1 << 40)
    with zmq.Context() as context, pytest.raises(PeerError, match="could not meet the other"):
        build_stage(boot, Rank(0), LonelyStore(events), context)
    assert events == ["look", "set loaded0", "wait loaded0", "wait loaded1", "wait loaded2"]
