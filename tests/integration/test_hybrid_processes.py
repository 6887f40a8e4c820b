"""A hybrid model in real processes: production's WAVE and LOOP, weights, pools, waves and hops."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from tests.integration.toy_setup import pack
from tests.numerics.pipeline import TOLERANCE, Oracle
from tests.numerics.tiny import VOCAB, make_tiny_model
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.supervisor import ROLES, RankSupervisor
from wavepp_worker.wire.mailbox import Announce, Fatal, Finished, Gone, Rejected, WorkerReady

pytestmark = [pytest.mark.dynamo, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = 16
DEADLINE_S = 60.0
# Stage 0 keeps states alone, stage 1 both; slots are scarce on both.
SECTIONS = {
    "cluster": {"stages": 2, "devices": ["cpu", "cpu"], "start_timeout_s": 60},
    "cache": {
        "block_tokens": BLOCK, "device_tokens": 24 * BLOCK, "host_tokens": 8 * BLOCK,
        "snapshot_interval_tokens": 3 * BLOCK, "state_slots": 7,
    },
    "planner": {"wave_tokens_max": 4 * BLOCK},
    "admission": {"headroom_factor": 0.25, "batch_requests_max": 4},
    "debug": {"invariants": "always"},
    "obs": {"log_level": "WARNING"},
}  # fmt: skip


def shared_prompts() -> list[list[int]]:
    """Return prompts of three conversations, each turn with all turns before it."""
    draw, prompts = random.Random(4), []
    talks: list[list[int]] = [[], [], []]
    for _ in range(6):
        for talk in talks:
            talk += [draw.randrange(VOCAB) for _ in range(draw.randrange(12, 30))]
            prompts.append(list(talk))
    return prompts


async def test_a_hybrid_worker_of_two_stages_equals_transformers(tmp_path: Path) -> None:
    """FS-26, FS-32: cold, resumed and evicted, some at once; first token and its probability."""
    folder = make_tiny_model(tmp_path / "model", "qwen3_5", seed=3)
    model = {"path": str(folder), "stage_layers": [2, 3]}
    config = msgspec.convert({"model": model, **SECTIONS}, Config)
    facts = read_facts(folder)
    roles = {**ROLES, "loop": "tests.integration.hybrid_loop"}
    supervisor = RankSupervisor(config, derive(config, facts), facts, "hybrid", roles=roles)
    front = FrontDoor(supervisor.run_dir, config.cluster.host)
    settings = {
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "discovery"),
        "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    prompts = shared_prompts()
    finished: dict[int, Finished] = {}
    gone = asyncio.Semaphore(0)
    ready = asyncio.Event()

    async def listen() -> None:
        async for report in front:
            match report:
                case WorkerReady():
                    ready.set()
                case Finished(rid=rid):
                    finished[rid] = report
                case Gone():
                    gone.release()
                case Fatal() | Rejected():
                    raise AssertionError(report)

    async def ask_all() -> None:
        await ready.wait()
        for rid, prompt in enumerate(prompts):
            tokens = pack(prompt)
            keys = sequence_keys(tokens, BLOCK, scope_key("hybrid"))
            front.announce(Announce(rid, len(prompt), keys, tokens))
            if rid >= 3:  # three at once, one of each conversation
                await gone.acquire()
        for _ in range(3):
            await gone.acquire()

    listening, asking = asyncio.ensure_future(listen()), asyncio.ensure_future(ask_all())
    try:
        with patch.dict(os.environ, settings):
            await supervisor.start(front.report_address)
        await asyncio.wait(
            [listening, asking, supervisor.exited], timeout=DEADLINE_S,
            return_when="FIRST_COMPLETED",
        )  # fmt: skip
        assert not listening.done(), listening.result()
        assert not supervisor.exited.done(), supervisor.exited.result()
        assert asking.done(), f"{len(finished)} of {len(prompts)} answers in {DEADLINE_S} s"
    finally:
        listening.cancel()
        asking.cancel()
        await supervisor.kill()
        front.close()
    oracle = Oracle(folder)
    for rid, prompt in enumerate(prompts):
        wanted = oracle.logits(prompt)[-1].log_softmax(-1)
        assert finished[rid].token == int(wanted.argmax()), rid
        assert finished[rid].logprob == pytest.approx(float(wanted.max()), abs=TOLERANCE["atol"])
    endpoints = [finished[rid].endpoint for rid in range(len(prompts))]
    assert len(set(endpoints)) > 3, endpoints
