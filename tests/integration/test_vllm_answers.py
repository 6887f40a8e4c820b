"""Dynamo's frontend, a WavePP prefill worker, and a decode worker that speaks vLLM's protocol."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.integration.deployment import (
    Deployment,
    deployment,
    free_port,
    prefill_config,
    scrape,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model
from wavepp_worker.config.schema import Config
from wavepp_worker.model.spec import read_facts
from wavepp_worker.vllm_decode.agreement import agree

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]
OURS, THEIRS = 64, 32
STAGES = 2


class Served:
    def __init__(self, deploy: Deployment, model: Path, url: str, port: int) -> None:
        self.deploy, self.model, self.url, self.port = deploy, model, url, port

    def ask(self, prompt: list[int], **more: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def total(self, name: str, label: str = "") -> float:
        found = scrape(self.port)
        return sum(v for (n, labels), v in found.items() if n == name and label in labels)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("vllm")
    model = folder / "model"
    make_tiny_model(model, "llama", seed=9)
    tree = prefill_config(
        model,
        STAGES,
        cache={"block_tokens": OURS},
        decode_pool={"kind": "vllm-push", "block_tokens": THEIRS},
    )
    config = msgspec.convert(tree, Config)
    terms = agree(config, read_facts(model, "float32"))
    settings = folder / "standin.json"
    settings.write_text(
        json.dumps({"path": str(model), "hash": terms.compatibility_hash, "block_tokens": THEIRS})
    )
    port = free_port()
    with deployment(folder) as deploy:
        deploy.prefill(tree, DYN_SYSTEM_PORT=str(port))
        deploy.start("decode", "tests.integration.vllm_standin", str(settings))
        url = deploy.frontend()
        deploy.wait_for_model("tiny")
        yield Served(deploy, model, url, port)


@functools.cache
def load(model: Path) -> tuple[Any, Any]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return network, AutoTokenizer.from_pretrained(model)


def reference(model: Path, prompt: list[int]) -> str:
    network, tokenizer = load(model)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(network(torch.tensor([tokens])).logits[0, -1].argmax()))
    answer: str = tokenizer.decode(tokens[len(prompt) :])
    return answer


@pytest.mark.parametrize("length", [1, 64, 200])
def test_answers_from_the_pushed_cache_are_those_of_transformers(
    served: Served, length: int
) -> None:
    prompt = [3 + (7 * at + length) % 200 for at in range(length)]
    for _ in range(2):  # the second time the prefill worker reuses its own blocks
        reply = served.ask(prompt)
        assert reply.status_code == 200, reply.text + served.deploy.logs()
        assert reply.json()["choices"][0]["text"] == reference(served.model, prompt)


def test_options_that_prefill_does_not_have_are_left_to_decode(served: Served) -> None:
    assert served.ask([5] * 40, logprobs=3).status_code == 200
    assert served.ask([5] * 40, n=2).status_code == 400


def test_the_bytes_are_counted_and_nothing_stays_held(served: Served) -> None:
    written = 'outcome="written"'
    assert served.ask([9] * 100).status_code == 200
    wait_until(
        lambda: (
            served.total("wavepp_push_requests_total", written)
            == STAGES * served.total("wavepp_requests_total", 'outcome="served"')
            > 0
        ),
        10, "every stage has written every prompt",
    )  # fmt: skip
    wait_until(lambda: served.total("wavepp_push_holds") == 0, 10, "no hold is left")
    assert served.total("wavepp_push_bytes_total") > 0
