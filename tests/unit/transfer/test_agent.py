"""An agent that waits costs no processor time."""

from __future__ import annotations

import time

import pytest
import torch

from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.transfer.agent import TransferAgent, load_nixl

IDLE_S = 0.5


def idle_cpu_s() -> float:
    """Return the processor time that this process takes while it does nothing for a while."""
    before = time.process_time()
    time.sleep(IDLE_S)
    return time.process_time() - before


@pytest.mark.nixl
def test_an_idle_agent_does_not_spin() -> None:
    store = KvStore(
        layers=1, blocks=2, kv_heads=1, block_tokens=4, head_dim=8, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    agent = TransferAgent("test", "UCX", store)
    ours = idle_cpu_s()
    agent.close()
    api = load_nixl()
    plain = api.nixl_agent("plain", api.nixl_agent_config(backends=["UCX"]))
    spinning = idle_cpu_s()
    del plain
    assert ours < spinning / 4, f"{ours:.3f} s of {IDLE_S} s, NIXL's default takes {spinning:.3f} s"
