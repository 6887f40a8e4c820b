"""Stages of WavePP push into a stock vLLM decode worker; answers equal transformers'.

Run by `make vllm-test`, in whose environment `WAVEPP_VLLM_PYTHON` names vLLM's interpreter.  One
vLLM per model family serves all numbers of stages: it takes a minute to start.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from graphs import vllm_decode
from tests.integration.deployment import (
    Deployment,
    Process,
    deployment,
    free_port,
    prefill_config,
    scrape,
    wait_until,
)
from tests.integration.test_bad_days import answers
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.tiny import SPECIAL_TOKENS, make_tiny_model
from wavepp_worker.config.schema import ModelConfig, VllmDecodeConfig

PYTHON = os.environ.get("WAVEPP_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.dynamo,
    pytest.mark.nixl,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="needs vLLM's environment: make vllm-test"),
]

BLOCK = 32  # of both sides
ANSWER = 24
START_S = 300.0
# Heads of 32: vLLM's CPU kernel knows no narrower ones.
SHAPE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}


def prompt_ending_clean(length: int, seed: int) -> list[int]:
    """Return random bytes and an "a": answers are compared as text, which must not begin within a
    character of the prompt."""
    letter = len(SPECIAL_TOKENS) + sorted(ByteLevel.alphabet()).index("a")
    return [*prompt_of(length - 1, seed), letter]


class Pool:
    """One family's model, its oracle, a stock vLLM decode worker and a frontend."""

    def __init__(self, deploy: Deployment, folder: Path) -> None:
        self.deploy, self.folder = deploy, folder
        self.model = reference(folder)
        self.decode_port = free_port()
        settings = VllmDecodeConfig(
            model=ModelConfig(path=str(folder), dtype="float32", context_tokens_max=2048),
            served_model_name="tiny",
            python=PYTHON,
            block_tokens=BLOCK,
            side_channel_port=free_port(),
        )
        log = deploy.folder / "vllm.log"
        command = [PYTHON, "-m", "dynamo.vllm", *vllm_decode.arguments(settings, "")]
        ports = {"DYN_SYSTEM_PORT": str(self.decode_port)}
        env = {**deploy.env, **vllm_decode.environment(settings), **ports}
        deploy.processes.append(Process("vllm", command, env, log))
        self.url = deploy.frontend()

    def prefill(self, stages: int, **changes: Any) -> Process:
        """Start a prefill worker and wait until prompts go through it."""
        port = free_port()
        config = prefill_config(
            self.folder,
            stages,
            cache={"block_tokens": BLOCK, "device_tokens": 8192},
            decode_pool={"kind": "vllm-push", "model": str(self.folder)},
            transfer={"hold_s": 20.0},
        )
        config["model"] |= changes
        worker = self.deploy.prefill(config, f"prefill{port}", DYN_SYSTEM_PORT=str(port))
        wait_until(lambda: answers(port), 120, "the prefill worker serves")
        wait_until(self._is_pushed, START_S, f"vLLM takes a prompt\n{self.deploy.logs()}")
        return worker

    def _is_pushed(self) -> bool:
        self.deploy.check_alive()
        before = self.received()
        body = {
            "model": "tiny",
            "prompt": prompt_ending_clean(3 * BLOCK, time.monotonic_ns() % 1000),
        }
        try:
            reply = httpx.post(
                f"{self.url}/v1/completions", json=body | {"max_tokens": 1}, timeout=30
            )
        except httpx.HTTPError:
            return False
        return reply.status_code == 200 and self.received() > before

    def stop(self, worker: Process) -> None:
        worker.stop()
        self.deploy.processes.remove(worker)

    async def ask(self, client: httpx.AsyncClient, prompt: list[int]) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True,
                "temperature": 0}  # fmt: skip
        reply = await client.post(f"{self.url}/v1/completions", json=body, timeout=90)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    def want(self, prompt: list[int]) -> str:
        """Return transformers' answer, as text: that is what the API gives."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        return str(tokenizer.decode(greedy(self.model, prompt, ANSWER)))

    def counted(self, source: str) -> float:
        """Return vLLM's own count of prompt tokens that came from `source`."""
        try:
            page = scrape(self.decode_port)
        except (httpx.HTTPError, AssertionError):
            return 0.0
        return sum(
            value
            for (name, labels), value in page.items()
            if name == "vllm:prompt_tokens_by_source_total"
            and re.search(f'source="{source}"', labels)
        )

    def received(self) -> float:
        return self.counted("external_kv_transfer")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pool(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp(request.param)
    folder = make_tiny_model(root / "model", request.param, seed=6, config=SHAPE)
    with deployment(root) as deploy:
        yield Pool(deploy, folder)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_answers_equal_transformers(pool: Pool, stages: int) -> None:
    """Cold, extended beyond what decode has, whole blocks, and several at once."""
    worker = pool.prefill(stages)
    computed, received = pool.counted("local_compute"), pool.received()
    asked = 0
    async with httpx.AsyncClient() as client:
        for length in (37, 2 * BLOCK, 4 * BLOCK, 100, 700):
            prompt = prompt_ending_clean(length, seed=10 * stages)
            assert await pool.ask(client, prompt) == pool.want(prompt), f"cold, {length} tokens"
            asked += length
        # Decode has the first blocks of this one, so less is pushed than was computed here.
        longer = prompt + prompt_ending_clean(75, seed=10 * stages + 1)
        hits = pool.counted("local_cache_hit")
        assert await pool.ask(client, longer) == pool.want(longer), "extended"
        assert pool.counted("local_cache_hit") - hits >= 700 // BLOCK * BLOCK - BLOCK
        crowd = [prompt_ending_clean(60 + 41 * index, seed=10 * stages + 2) for index in range(6)]
        texts = await asyncio.gather(*[pool.ask(client, prompt) for prompt in crowd])
        assert texts == [pool.want(prompt) for prompt in crowd], "several at once"
        asked += sum(map(len, crowd))
    assert pool.counted("local_compute") == computed, "decode computed no prompt"
    assert pool.received() - received >= asked
    pool.stop(worker)


@pytest.mark.parametrize("layer", [0, 4])
async def test_a_wrong_layer_shows(pool: Pool, layer: int, tmp_path: Path) -> None:
    """The stages run another model under the same name; one layer of either stage differs."""
    folder = tmp_path / "corrupt"
    shutil.copytree(pool.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{layer}.self_attn.k_proj.weight"].mul_(-1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    worker = pool.prefill(2, path=str(folder))
    prompt = prompt_ending_clean(150, seed=90 + layer)
    async with httpx.AsyncClient() as client:
        assert await pool.ask(client, prompt) != pool.want(prompt)
    pool.stop(worker)


async def test_a_killed_prefill_worker_is_replaced(pool: Pool) -> None:
    """What it held is lost with it; the next worker under the same name serves right."""
    worker = pool.prefill(2)
    prompts = [prompt_ending_clean(300 + index, seed=70) for index in range(4)]
    async with httpx.AsyncClient() as client:
        running = [asyncio.create_task(pool.ask(client, prompt)) for prompt in prompts]
        await asyncio.sleep(0.05)
        worker.popen.kill()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        pool.deploy.processes.remove(worker)
        other = pool.prefill(2)
        for prompt in prompts:
            assert await pool.ask(client, prompt) == pool.want(prompt)
    pool.stop(other)
