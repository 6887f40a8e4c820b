"""Dynamo's own frontend in front: chat, streaming, usage, and every kind of bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    BLOCK,
    Deployment,
    decode_config,
    deployment,
    free_port,
    prefill_config,
    wait_until,
)
from tests.integration.test_bad_days import is_quiet
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, str, int]]:
    folder = tmp_path_factory.mktemp("http")
    make_tiny_model(folder / "model", "llama", seed=9)
    port = free_port()
    with deployment(folder) as deploy:
        # The cache is smaller than the model's context, so that both limits can be met.
        deploy.prefill(
            prefill_config(folder / "model", 2, cache={"device_tokens": 512}),
            DYN_SYSTEM_PORT=str(port),
        )
        deploy.decode(decode_config(folder / "model"))
        url = deploy.frontend()
        deploy.wait_for_model("tiny")
        yield deploy, url, port


def post(url: str, body: dict[str, Any], path: str = "completions") -> httpx.Response:
    return httpx.post(
        f"{url}/v1/{path}", json={"model": "tiny", "max_tokens": 4, **body}, timeout=60
    )


def test_chat_answers_and_streams_the_same_text(served: tuple[Deployment, str, int]) -> None:
    _, url, _ = served
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 12}
    whole = post(url, body, "chat/completions")
    assert whole.status_code == 200, whole.text
    reply = whole.json()
    assert reply["usage"]["completion_tokens"] == 12
    pieces = []
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json={"model": "tiny", "stream": True, **body},
        timeout=60,
    ) as stream:  # fmt: skip
        for line in stream.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                delta = json.loads(line[6:])["choices"][0]["delta"]
                pieces.append(delta.get("content") or "")
    assert "".join(pieces) == reply["choices"][0]["message"]["content"]
    assert len([piece for piece in pieces if piece]) > 1, "streamed in one piece"


def test_reuse_is_reported_in_the_usage(served: tuple[Deployment, str, int]) -> None:
    _, url, _ = served
    prompt = [3 + i % 200 for i in range(6 * BLOCK + 5)]
    assert post(url, {"prompt": prompt}).status_code == 200
    usage = post(url, {"prompt": prompt}).json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK


BAD = {
    "empty prompt": {"prompt": []},
    "out of vocabulary": {"prompt": [5, 100_000]},
    "longer than the cache": {"prompt": [7] * 600},
    "longer than the model": {"prompt": [7] * 5000},
    "negative temperature": {"prompt": [5, 6], "temperature": -1},
    "top_p above one": {"prompt": [5, 6], "top_p": 1.5},
    "top_p below zero": {"prompt": [5, 6], "top_p": -0.5},
    "absurd temperature": {"prompt": [5, 6], "temperature": 1e9},
    "several choices": {"prompt": [5, 6], "n": 3},
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_the_next_request_is_fine(
    served: tuple[Deployment, str, int], case: str
) -> None:
    """FS-52, FS-53"""
    deploy, url, port = served
    reply = post(url, BAD[case])
    assert reply.status_code == 400, f"{reply.status_code} {reply.text}\n{deploy.logs()}"
    text = reply.text
    assert len(text) > 20 and "Traceback" not in text, text
    assert post(url, {"prompt": [5, 6, 7]}).status_code == 200
    wait_until(lambda: is_quiet(port), 10, "nothing is leaked")


def test_the_same_request_id_twice_is_served_twice(served: tuple[Deployment, str, int]) -> None:
    """FS-51"""
    _, url, _ = served
    headers = {"x-request-id": "5f5b2b3e-6a0b-4f0e-9df3-0f3a54b3a111"}
    body = {
        "model": "tiny",
        "prompt": [9, 8, 7],
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
    }
    replies = [
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60) for _ in "ab"
    ]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["choices"] == replies[1].json()["choices"]
