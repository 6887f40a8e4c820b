"""Real weights: SmolLM2-135M-Instruct through two stages equals transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.deployment import (
    REPOSITORY,
    decode_config,
    deployment,
    pipeline,
    prefill_config,
)
from tests.integration.test_greedy import reference
from tools.fetch_model import default_folder

pytestmark = [pytest.mark.slow, pytest.mark.dynamo, pytest.mark.nixl, pytest.mark.timeout(900)]

ANSWER = 16
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three primary colours.",
    "How many legs does a spider have, and why do people fear it?",
    "Explain in two sentences what a cache is.",
    "Translate 'good morning' into Spanish and into German.",
)
PARAGRAPH = (
    "The harbour was built by the old town's fishermen, who carried each stone from the hill by "
    "hand; {n} boats lay there in summer, and in winter only the pilot's. "
)
LONG = tuple(
    "".join(PARAGRAPH.format(n=n) for n in range(count)) + "How many boats lay there in winter?"
    for count in (8, 16, 34)
)


@pytest.fixture(scope="module")
def demo_model() -> Path:
    """Return the demo model's folder, prepared as `make serve` does."""
    folder = Path(os.environ.get("WAVEPP_MODEL") or default_folder())
    subprocess.run(
        [sys.executable, str(REPOSITORY / "tools/fetch_model.py"), str(folder)], check=True
    )
    return folder


def greedy_with_cache(model: object, prompt: list[int]) -> list[int]:
    """Return transformers' greedy answer: the prompt in one shot, then token by token."""
    with torch.inference_mode():
        output = model.generate(  # type: ignore[attr-defined]
            torch.tensor([prompt]), max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1,
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        )  # fmt: skip
    return output[0, len(prompt) :].tolist()


async def test_chat_prompts_equal_transformers(tmp_path: Path, demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = reference(demo_model)
    config = prefill_config(
        demo_model, 2, cache={"device_tokens": 8192}, planner={"wave_tokens_max": 512}
    )
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in (*QUESTIONS, *LONG)
    ]
    assert len(prompts) >= 8 and 1_200 < max(map(len, prompts)) <= 1_500, list(map(len, prompts))
    with deployment(tmp_path) as deploy:
        deploy.prefill(config)
        deploy.decode(decode_config(demo_model, batch={"cache_tokens": 8192}))
        async with pipeline(deploy) as pipe:
            for prompt in prompts:
                want = greedy_with_cache(model, prompt)
                answer, _ = await pipe.generate(prompt, ANSWER)
                assert answer == want, f"{len(prompt)} tokens: {tokenizer.decode(prompt)[-80:]}"
