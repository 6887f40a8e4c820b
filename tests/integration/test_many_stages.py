"""Four and eight stages in real processes: answers, hand-off from all, and death of any one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.deployment import (
    BLOCK,
    decode_config,
    deployment,
    free_port,
    is_alive,
    per_rank,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.tiny import make_tiny_model

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.nixl,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

ANSWER = 6
# One block per layer and stage, small waves: rings of 2P waves fill.
SECTIONS = {"planner": {"wave_tokens_max": 2 * BLOCK}, "cluster": {"start_timeout_s": 120}}


@pytest.mark.parametrize("stages", [4, 8])
async def test_answers_equal_transformers_and_any_death_ends_the_worker(
    tmp_path: Path, stages: int
) -> None:
    """FS-08, FS-17: a layer a stage with P = 8; prompts of several rings' length, some at once."""
    folder = make_tiny_model(
        tmp_path / "model", "llama", seed=stages, config={"num_hidden_layers": 8}
    )
    model, port = reference(folder), free_port()
    config = prefill_config(folder, stages, **SECTIONS)
    config["cluster"]["stages"] = stages
    draw = random.Random(stages)
    with deployment(tmp_path) as deploy:
        worker = deploy.prefill(config, DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            shared = prompt_of(12 * BLOCK, seed=1)
            prompts = [shared[: 5 * i * BLOCK // 2] + prompt_of(37 + i, seed=i) for i in range(5)]
            cold = await asyncio.gather(*[pipe.generate(prompt, ANSWER) for prompt in prompts])
            again = await asyncio.gather(*[pipe.generate(prompt, ANSWER) for prompt in prompts])
            computed = 0
            for prompt, (first, cached), (second, cached_again) in zip(
                prompts, cold, again, strict=True
            ):
                want = greedy(model, prompt, ANSWER)
                assert first == want
                assert second == want
                assert cached_again == (len(prompt) - 1) // BLOCK * BLOCK
                computed += 2 * len(prompt) - cached - cached_again
            wait_until(
                lambda: (
                    per_rank(port, "wavepp_tokens_computed_total")
                    == dict.fromkeys(range(stages), float(computed))
                ),
                5,
                "every stage computed only the suffixes",
            )
            family = [worker.pid, *worker.children()]
            assert len(family) >= 1 + 2 * stages
            victim = worker.child("loop_process", f"--rank {draw.randrange(1, stages)}")
            running = [
                asyncio.create_task(pipe.generate(prompt_of(30 * BLOCK, seed=50 + i), ANSWER))
                for i in range(4)
            ]
            await asyncio.sleep(0.05)
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            while any(is_alive(member) for member in family):
                assert time.monotonic() - killed < 5, "the worker did not end as a unit within 5 s"
                await asyncio.sleep(0.02)
            for task in running:
                task.cancel()
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    await task
        assert worker.popen.wait(5) != 0
        deploy.processes.remove(worker)
