"""Two decode workers behind Dynamo's real frontend, with a scripted prefill worker."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.integration.deployment import (
    Deployment,
    decode_config,
    deployment,
    free_port,
    pipeline,
    scrape,
    wait_until,
)
from tests.numerics.pipeline import Oracle
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

BYTE_ZERO = 6  # token of the first byte in the tiny tokenizer's alphabet
SPOILED = 5  # prompts that begin with it lose their first hand-off
HOLD_S = 20.0


class Served(NamedTuple):
    url: str
    deploy: Deployment
    metrics: list[int]  # port of each decode worker's metrics

    def complete(self, prompt: Any, max_tokens: int, **extra: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body | extra, timeout=60)

    def freed(self) -> int:
        """Return how many hand-offs of the prefill worker ended on every stage."""
        log = next(process for process in self.deploy.processes if process.name == "prefill").log
        return log.read_text(errors="replace").count("freed")

    def is_quiet(self) -> bool:
        names = ("requests", "waiting_requests", "used_blocks")
        values = [
            value
            for port in self.metrics
            for (name, _), value in scrape(port).items()
            if name.removeprefix("wavepp_decode_") in names
        ]
        assert len(values) == len(names) * len(self.metrics)
        return not any(values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with deployment(tmp_path_factory.mktemp("decode")) as deploy:
        settings = {
            "path": str(model),
            "bounds": [0, 2, 5],
            "hold_s": HOLD_S,
            "spoiled_token": SPOILED,
        }
        path = deploy.folder / "prefill-settings.json"
        path.write_text(json.dumps(settings))
        deploy.start("prefill", "tests.integration.scripted_prefill", str(path))
        config = decode_config(
            model, batch={"cache_tokens": 1024, "requests_max": 4}, lost_state="fail"
        )
        ports = [free_port(), free_port()]
        for name, port in zip(("decode", "decode2"), ports, strict=True):
            deploy.decode(config, name, DYN_SYSTEM_PORT=str(port))
        url = deploy.frontend("--migration-limit", "2")
        deploy.wait_for_model("tiny")
        served = Served(url, deploy, ports)
        wait_until(lambda: all(is_serving(port) for port in ports), 60, "both decode workers")
        yield served


def is_serving(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def make_prompt(seed: int, length: int, first: int = BYTE_ZERO) -> list[int]:
    chance = random.Random(seed)
    return [first, *(chance.randrange(BYTE_ZERO, 262) for _ in range(length - 1))]


async def test_answers_equal_transformers_token_for_token(served: Served, model: Path) -> None:
    oracle = Oracle(model)
    prompts = [make_prompt(n, 16 * n + 13) for n in range(6)]
    async with pipeline(served.deploy) as both:
        answers = await asyncio.gather(*(both.generate(prompt, 16) for prompt in prompts))
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        assert tokens == oracle.greedy(prompt, 16)
    wait_until(served.is_quiet, 10, "nothing is held")


def test_tokens_are_streamed(served: Served) -> None:
    body = {
        "model": "tiny", "prompt": "stream me", "max_tokens": 12, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as reply:
        events = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert sum(1 for chunk in chunks if chunk["choices"]) >= 8  # not one big chunk
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 12)


def test_logprobs_and_finish_reason(served: Served) -> None:
    reply = served.complete("more", 4, logprobs=0, ignore_eos=True).json()
    (choice,) = reply["choices"]
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == 4
    assert all(value <= 0 for value in values)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "extra"),
    [
        ("x", {"n": 2}),
        ("x", {"temperature": 5000.0}),
        ("x", {"frequency_penalty": 9}),
        ([BYTE_ZERO] * 1200, {}),
        ([BYTE_ZERO, 5000], {}),
    ],
)
def test_bad_requests_are_refused(served: Served, prompt: Any, extra: dict[str, Any]) -> None:
    assert served.complete(prompt, 4, **extra).status_code in (400, 422)
    assert served.complete("x", 4).status_code == 200


def test_a_refused_request_declines_its_hand_off(served: Served) -> None:
    before = served.freed()
    reply = served.complete([BYTE_ZERO] * 1100, 4)  # the prefill worker takes it
    assert reply.status_code == 400
    assert "1100 tokens; this decode worker takes at most 1023" in reply.text
    wait_until(lambda: served.freed() > before, HOLD_S / 2, "the hold ends before its deadline")


def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    body = {
        "model": "tiny", "prompt": "leave", "max_tokens": 900, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as reply:
        for _, _line in zip(range(4), reply.iter_lines(), strict=False):
            pass
    wait_until(served.is_quiet, 10, "the request is gone long before its 900 tokens")


def test_a_one_token_answer_declines_its_hand_off(served: Served) -> None:
    before = served.freed()
    assert served.complete("one", 1).json()["usage"]["completion_tokens"] == 1
    wait_until(lambda: served.freed() > before, HOLD_S / 2, "the hold ends before its deadline")


def test_a_lost_hand_off_is_computed_again_on_another_worker(served: Served) -> None:
    """Dynamo asks only workers that the request has not tried: one decode worker is not enough."""
    prompt = make_prompt(9, 40, first=SPOILED)
    reply = served.complete(prompt, 8, ignore_eos=True)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] >= 7
    logs = [p.log.read_text() for p in served.deploy.processes if p.name.startswith("decode")]
    assert sum("was cancelled" in log for log in logs) == 1
    again = served.complete(prompt, 8, ignore_eos=True)  # this one is not spoiled
    assert again.json()["choices"][0]["text"] == reply.json()["choices"][0]["text"]
    served.deploy.check_alive()
