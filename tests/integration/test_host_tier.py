"""The host tier of real stages: what the device has no room for comes back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.integration.deployment import (
    BLOCK,
    Pipeline,
    decode_config,
    deployment,
    free_port,
    per_rank,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

STAGES, PROMPTS, LENGTH, ANSWER = 2, 6, 12 * BLOCK + 5, 4
DEVICE_BLOCKS, HOST_BLOCKS = 16, 128
LOGPROB_TOLERANCE = 2e-5  # fp32 rounding


def view(port: int) -> dict[str, Any]:
    reply = httpx.post(f"http://127.0.0.1:{port}/engine/control/cache_view", json={}, timeout=10)
    return dict(reply.json())


async def test_prompts_come_back_from_the_host_with_the_same_answers(tmp_path: Path) -> None:
    """FS-30, FS-36, FS-91 for attention: a working set of five device caches, sent twice.

    Tokens alone are a coarse sieve: a wrong block of a late layer seldom changes them.  The first
    token's logprob looks at every block of every layer, and it must be that of transformers.
    """
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", seed=5)
    model = reference(folder)
    port = free_port()
    cache = {"device_tokens": DEVICE_BLOCKS * BLOCK, "host_tokens": HOST_BLOCKS * BLOCK}
    prompts = [prompt_of(LENGTH, seed=20 + number) for number in range(PROMPTS)]
    with deployment(tmp_path) as deploy:
        deploy.prefill(prefill_config(folder, STAGES, cache=cache), DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            for prompt in prompts:
                assert await ask(pipe, model, prompt) == 0
            for prompt in prompts:
                longer = prompt + prompt_of(BLOCK, seed=3)
                # All of it, though the device holds one prompt only.
                assert await ask(pipe, model, longer) == 12 * BLOCK
        for name in ("wavepp_offloaded_blocks_total", "wavepp_onboarded_blocks_total"):
            wait_until(lambda name=name: min(per_rank(port, name).values()) > 12, 10, name)
        for name in ("wavepp_offload_bytes_total", "wavepp_onboard_bytes_total"):
            wait_until(lambda name=name: min(per_rank(port, name).values()) > 0, 10, name)
        wait_until(lambda: is_at_rest(view(port)), 40, "the books of both tiers close")


async def ask(pipe: Pipeline, model: Any, prompt: list[int]) -> int:
    """Send a prompt; return how many tokens came from the cache.  Answer and logprob are right."""
    result = await pipe.prefill(prompt)
    handoff = result["disaggregated_params"]["kv_transfer_params"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    want = float(logits.log_softmax(-1).max())
    assert handoff["first_logprob"] == pytest.approx(want, abs=LOGPROB_TOLERANCE)
    assert await pipe.decode(prompt, result, ANSWER) == greedy(model, prompt, ANSWER)
    return int(result["completion_usage"]["prompt_tokens_details"]["cached_tokens"])


def is_at_rest(answer: dict[str, Any]) -> bool:
    """Nothing is held, and on both tiers of every rank all slots are accounted for."""
    for rank in answer["ranks"]:
        for tier, total in ((rank, DEVICE_BLOCKS), (rank["host"], HOST_BLOCKS)):
            counted = sum(tier[part][0] for part in ("free", "cached", "referenced", "reserved"))
            if counted != total or tier["total"][0] != total:
                return False
        if rank["sequences"] or rank["referenced"][0] or rank["host"]["referenced"][0]:
            return False
    return len(answer["ranks"]) == STAGES


async def test_a_host_tier_that_cannot_be_had_is_refused_at_start(tmp_path: Path) -> None:
    """FS-93: too large a setting fails at start, with the figures, and not in service."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", seed=5)
    with deployment(tmp_path) as deploy:
        cache = {"device_tokens": 1024, "host_tokens": BLOCK * (1 << 36)}
        process = deploy.prefill(prefill_config(folder, 1, cache=cache))
        wait_until(lambda: process.popen.poll() is not None, 60, "the worker gives up")
        assert process.popen.returncode != 0
        assert "cache.host_tokens" in process.tail(80)
