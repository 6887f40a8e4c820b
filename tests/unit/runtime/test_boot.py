"""What the processes of a worker are told, and how they are tied to their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts, derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.runtime.boot import Boot, front_address, load_boot, loop_address, save_boot

FACTS = ModelFacts(
    family="llama",
    layers=4,
    hidden=64,
    vocab=100,
    context_tokens=1024,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    dtype_bytes=4,
    fingerprint="f",
)


def make_boot(run_dir: Path) -> Boot:
    config = Config(model=ModelConfig(path="m"), cluster=ClusterConfig(stages=2))
    return Boot(
        config=config,
        plan=derive(config, FACTS),
        facts=FACTS,
        epoch=1_796_077_832_253,
        group="g",
        run_dir=str(run_dir),
        report_address="tcp://127.0.0.1:1",
        namespace="n",
        parent_pid=os.getpid(),
    )


def test_boot_survives_the_file(tmp_path: Path) -> None:
    boot = make_boot(tmp_path)
    save_boot(boot, tmp_path / "boot.json")
    assert load_boot(tmp_path / "boot.json") == boot


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"config": 1}'])
def test_unusable_boot_file_is_a_config_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "boot.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"boot\.json"):
        load_boot(path)


def test_every_pair_has_its_own_address() -> None:
    addresses = {front_address("/r"), *(loop_address("/r", rank) for rank in range(3))}
    assert len(addresses) == 4
    assert all(address.startswith("ipc:///r/") for address in addresses)


def run_child(parent_pid: int, then: str) -> subprocess.CompletedProcess[str]:
    code = f"from wavepp_worker.runtime.boot import die_with_parent as d; d({parent_pid}); {then}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_child_of_a_dead_parent_exits_at_once() -> None:
    assert run_child(os.getpid(), "print('alive')").stdout == "alive\n"
    stranger = run_child(os.getpid() + 1, "print('alive')")
    assert (stranger.returncode, stranger.stdout) == (1, "")


def test_child_leaves_ctrl_c_to_its_parent_but_obeys_sigterm() -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.{}); print('alive')"
    assert run_child(os.getpid(), kill.format("SIGINT")).stdout == "alive\n"
    assert run_child(os.getpid(), kill.format("SIGTERM")).returncode == -signal.SIGTERM
