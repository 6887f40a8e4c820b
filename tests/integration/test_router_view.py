"""Dynamo's own KV router, fed by a real worker, knows exactly what every stage can resume."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    BLOCK,
    Deployment,
    Pipeline,
    deployment,
    free_port,
    prefill_config,
)
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

STAGES = 2
CACHE_BLOCKS = 24


class Observed:
    """One prefill worker and a router that watches it."""

    def __init__(self, client: Any, router: Any, port: int) -> None:
        self._client, self._router, self._port = client, router, port

    async def prefill(self, tokens: list[int], salt: str | None = None) -> int:
        """Prefill; return the tokens that were reused."""
        routing = {"cache_salt": salt} if salt else {}
        request = Pipeline.request(tokens, 1, routing=routing)
        (chunk,) = [c async for c in await self._client.round_robin(request, annotated=False)]
        return int(chunk["completion_usage"]["prompt_tokens_details"]["cached_tokens"])

    async def told(self) -> set[str]:
        """Return the blocks that Dynamo's router has in its index."""
        found: set[str] = set()
        for entry in json.loads(await self._router.dump_events()):
            stored = entry["event"]["data"].get("stored", {"blocks": []})
            found |= {f"{block['block_hash']:016x}" for block in stored["blocks"]}
        return found

    async def overlap(self, tokens: list[int], salt: str | None = None) -> int:
        """Return how many leading blocks of a prompt the router thinks are cached."""
        scores = await self._router.get_overlap_scores(tokens, cache_namespace=salt)
        return max([w["device_blocks"] for w in scores["workers"]], default=0)

    async def view(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{self._port}/engine/control/cache_view"
            return dict((await http.post(url, json={}, timeout=10)).json())

    async def until_all_agree(self) -> set[str]:
        """Wait until router, serving process and ranks say the same; return the blocks."""
        deadline = time.monotonic() + 10
        while True:
            view = await self.view()
            ranks = [set(rank["blocks"]) for rank in view["ranks"]]
            told = await self.told()
            if set(view["router_blocks"]) == set.intersection(*ranks) == told:
                return told
            assert time.monotonic() < deadline, (told, view)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def observed(
    deploy: Deployment, port: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Observed]:
    from dynamo.llm import KvRouter, KvRouterConfig  # reads DYN_* when imported
    from dynamo.runtime import DistributedRuntime

    for name, value in deploy.env.items():
        if name.startswith("DYN_"):
            monkeypatch.setenv(name, value)
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    try:
        endpoint = runtime.endpoint("dynamo.prefill.generate")
        client = await endpoint.client()
        deadline = time.monotonic() + 120
        while not client.instance_ids():
            deploy.check_alive()
            assert time.monotonic() < deadline, deploy.logs()
            await asyncio.sleep(0.05)
        yield Observed(client, KvRouter(endpoint, BLOCK, KvRouterConfig()), port)
    finally:
        runtime.shutdown()


async def test_the_router_is_told_exactly_what_all_stages_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS-74, FS-80, FS-87: Dynamo's own index, reuse, and the same prompt under salts."""
    make_tiny_model(tmp_path / "model", "llama", seed=1)
    port = free_port()
    draw = random.Random(3)
    prompt = [draw.randrange(3, 250) for _ in range(5 * BLOCK + 3)]
    with deployment(tmp_path) as deploy:
        config = prefill_config(
            tmp_path / "model",
            STAGES,
            cache={"device_tokens": CACHE_BLOCKS * BLOCK},
            transfer={"hold_s": 0.2},
        )
        deploy.prefill(config, DYN_SYSTEM_PORT=str(port))
        async with observed(deploy, port, monkeypatch) as worker:
            assert await worker.prefill(prompt) == 0
            assert len(await worker.until_all_agree()) == 5
            assert await worker.overlap(prompt) == 5
            assert await worker.overlap(prompt[: 3 * BLOCK]) == 3
            assert await worker.prefill(prompt) == 5 * BLOCK

            # The same tokens under a salt are other blocks, for the cache and for the router.
            assert await worker.overlap(prompt, "tenant") == 0
            assert await worker.prefill(prompt, "tenant") == 0
            assert len(await worker.until_all_agree()) == 10
            assert await worker.overlap(prompt, "tenant") == 5
            assert await worker.prefill(prompt, "tenant") == 5 * BLOCK
            assert await worker.prefill(prompt, "other") == 0

            # Far more prompts than fit: what was evicted anywhere is retracted.
            for _ in range(20):
                await worker.prefill([draw.randrange(3, 250) for _ in range(6 * BLOCK + 1)])
            told = await worker.until_all_agree()
            assert 0 < len(told) <= CACHE_BLOCKS
            assert await worker.overlap(prompt) == 0
            assert await worker.prefill(prompt) == 0
