"""Killed processes, vanished clients, dead decode workers: nothing hangs, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    BLOCK,
    Deployment,
    decode_config,
    deployment,
    free_port,
    is_alive,
    prefill_config,
    wait_until,
)
from tests.integration.test_router import control
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

ROLES = (
    ("components.prefill_worker",),
    *((f"{role}_process", f"--rank {rank}") for role in ("wave", "loop") for rank in (0, 1)),
)


def start(
    deploy: Deployment, folder: Path, workers: int = 1, **overrides: Any
) -> tuple[str, list[int]]:
    make_tiny_model(folder, "llama", seed=5)
    ports = [free_port() for _ in range(workers)]
    for index, port in enumerate(ports):
        deploy.prefill(
            prefill_config(folder, 2, **overrides), f"prefill{index}", DYN_SYSTEM_PORT=str(port)
        )
    deploy.decode(decode_config(folder))
    url = deploy.frontend("--migration-limit", "2")
    deploy.wait_for_model("tiny")
    wait_until(lambda: all(answers(port) for port in ports), 60, "all prefill workers serve")
    return url, ports


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError, AssertionError):
        return "ranks" in control(port, "cache_view")
    return False


def is_quiet(port: int) -> bool:
    """Return whether a worker holds nothing and its books add up, on every stage."""
    for rank in control(port, "cache_view")["ranks"]:
        if rank["leases"] or rank["escrows"] or rank["sequences"]:
            return False
        for free, cached, total in zip(rank["free"], rank["cached"], rank["total"], strict=True):
            if free + cached != total:
                return False
    return True


async def ask(client: httpx.AsyncClient, url: str, tokens: list[int], max_tokens: int = 4) -> int:
    body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True}
    return (await client.post(f"{url}/v1/completions", json=body, timeout=90)).status_code


async def until_busy(client: httpx.AsyncClient, port: int) -> None:
    """Wait until a worker's stages have requests; each question waits for its answer."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        reply = await client.post(f"http://127.0.0.1:{port}/engine/control/cache_view", json={})
        if any(rank["sequences"] for rank in reply.json()["ranks"]):
            return
    raise AssertionError("no request reached the stages within 20 s")


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, 250) for _ in range(length)]


@pytest.mark.parametrize("victim", ROLES, ids=lambda words: "-".join(words).replace(" ", ""))
async def test_a_killed_process_ends_its_worker_and_the_other_one_serves(
    tmp_path: Path, victim: tuple[str, ...]
) -> None:
    """FS-08"""
    draw = random.Random(11)
    with deployment(tmp_path) as deploy:
        url, ports = start(deploy, tmp_path / "model", workers=2)
        doomed = next(p for p in deploy.processes if p.name == "prefill0")
        family = [doomed.pid, *doomed.children()]
        pid = doomed.pid if victim[0].startswith("components") else doomed.child(*victim)
        async with httpx.AsyncClient() as client:
            running = [
                asyncio.create_task(ask(client, url, random_prompt(draw, 20 * BLOCK)))
                for _ in range(12)
            ]
            await until_busy(client, ports[0])
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            while any(is_alive(member) for member in family):
                assert time.monotonic() - killed < 5, "the worker did not end as a unit within 5 s"
                await asyncio.sleep(0.02)
            statuses = await asyncio.gather(*running)
            assert statuses == [200] * len(statuses), statuses
            assert await ask(client, url, random_prompt(draw, 50)) == 200
        assert doomed.popen.wait(5) != 0
        deploy.processes.remove(doomed)


async def test_clients_that_vanish_leave_nothing_behind(tmp_path: Path) -> None:
    """FS-01 in part: cancels at random moments around a shared prefix, without injected delays."""
    draw = random.Random(13)
    with deployment(tmp_path) as deploy:
        url, ports = start(deploy, tmp_path / "model", transfer={"hold_s": 2.0})
        base = random_prompt(draw, 12 * BLOCK)

        async def vanish() -> None:
            prompt = base[: draw.randrange(len(base))] + random_prompt(draw, draw.randrange(1, 150))
            timeout = draw.choice([0.002, 0.01, 0.03, 0.1, 0.3, 5])
            with contextlib.suppress(httpx.HTTPError):
                async with httpx.AsyncClient(timeout=timeout) as client:
                    await client.post(
                        f"{url}/v1/completions",
                        json={"model": "tiny", "prompt": prompt, "max_tokens": 3},
                    )

        for _ in range(20):
            await asyncio.gather(*(vanish() for _ in range(10)))
        wait_until(lambda: is_quiet(ports[0]), 30, f"quiet: {control(ports[0], 'cache_view')}")
        async with httpx.AsyncClient() as client:
            assert await ask(client, url, base) == 200


async def test_a_dead_decode_worker_frees_its_holds(tmp_path: Path) -> None:
    """FS-61, FS-67: a new decode worker is served without a restart of prefill."""
    draw = random.Random(17)
    with deployment(tmp_path) as deploy:
        url, ports = start(deploy, tmp_path / "model", transfer={"hold_s": 2.0})
        decode = next(p for p in deploy.processes if p.name == "decode")
        async with httpx.AsyncClient() as client:
            running = [
                asyncio.create_task(ask(client, url, random_prompt(draw, 20 * BLOCK), 64))
                for _ in range(8)
            ]
            await until_busy(client, ports[0])
            os.killpg(decode.pid, signal.SIGKILL)
            decode.popen.wait(5)
            deploy.processes.remove(decode)
            await asyncio.gather(*running, return_exceptions=True)
            wait_until(lambda: is_quiet(ports[0]), 30, f"quiet: {control(ports[0], 'cache_view')}")
            deploy.decode(decode_config(tmp_path / "model"), "decode2")
            deploy.wait_for_model("tiny")
            assert await ask(client, url, random_prompt(draw, 40)) == 200
