"""What Dynamo's KV router learns, and what it does with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    BLOCK,
    decode_config,
    deployment,
    free_port,
    prefill_config,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

SESSIONS, FOLLOW_UPS = 6, 6


def complete(url: str, prompt: list[int]) -> dict[str, Any]:
    reply = httpx.post(
        f"{url}/v1/completions",
        json={
            "model": "tiny", "prompt": prompt, "max_tokens": 2, "ignore_eos": True,
            "temperature": 0,
            "nvext": {"extra_fields": ["worker_id", "timing"]},
        },
        timeout=60,
    )  # fmt: skip
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def home_of(reply: dict[str, Any]) -> int:
    """Return the prefill worker that served a request."""
    return int(reply["nvext"]["worker_id"]["prefill_worker_id"])


def control(port: int, name: str) -> dict[str, Any]:
    reply = httpx.post(f"http://127.0.0.1:{port}/engine/control/{name}", json={}, timeout=10)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_follow_ups_return_to_their_prefix_and_the_view_stays_true(tmp_path: Path) -> None:
    """FS-74: also after an eviction storm."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", seed=3)
    ports = (free_port(), free_port())
    draw = random.Random(7)
    with deployment(tmp_path) as deploy:
        for index, port in enumerate(ports):
            config = prefill_config(folder, 2, cache={"device_tokens": 1536})
            deploy.prefill(config, f"prefill{index}", DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        url = deploy.frontend()
        deploy.wait_for_model("tiny")
        wait_until(
            lambda: all(control_ready(port) for port in ports), 60, "both prefill workers serve"
        )
        hits = 0
        prompts = [[draw.randrange(3, 250) for _ in range(8 * BLOCK)] for _ in range(SESSIONS)]
        homes = [home_of(complete(url, prompt)) for prompt in prompts]
        for _ in range(FOLLOW_UPS):
            for index, prompt in enumerate(prompts):
                prompt += [draw.randrange(3, 250) for _ in range(BLOCK)]
                hits += home_of(complete(url, prompt)) == homes[index]
        assert hits >= 0.95 * SESSIONS * FOLLOW_UPS, f"{hits} of {SESSIONS * FOLLOW_UPS}"

        # Eviction storm: far more distinct tokens than both caches hold.
        for _ in range(40):
            complete(url, [draw.randrange(3, 250) for _ in range(12 * BLOCK)])
        for port in ports:
            wait_until(lambda port=port: is_true_view(control(port, "cache_view")), 10, "view")
            view = control(port, "cache_view")
            assert is_true_view(view), view
            assert view["router_blocks"], "nothing is published after the storm"


def control_ready(port: int) -> bool:
    try:
        return "router_blocks" in control(port, "cache_view")
    except (httpx.HTTPError, AssertionError):
        return False


def is_true_view(view: dict[str, Any]) -> bool:
    """Return whether the router was told exactly what all ranks can resume."""
    ranks = [set(rank["blocks"]) for rank in view["ranks"]]
    return bool(ranks) and set(view["router_blocks"]) == set.intersection(*ranks)
