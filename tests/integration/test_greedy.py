"""Answers through prefill stages, NIXL and decode equal transformers, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.integration.deployment import (
    BLOCK,
    decode_config,
    deployment,
    free_port,
    per_rank,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 10 * BLOCK + 7)
ANSWER = 8


def reference(folder: Path) -> object:
    """Return transformers' own model: fp32, eager."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def greedy(model: object, prompt: list[int], count: int) -> list[int]:
    """Return `count` greedy tokens, each from one forward over the whole text so far."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]  # type: ignore[operator]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_answers_equal_transformers(tmp_path: Path, family: str, stages: int) -> None:
    """FS-17, FS-18, FS-22, FS-73: cold, copied, repeated and extended prompts; lengths around B."""
    folder = tmp_path / "model"
    make_tiny_model(folder, family, seed=stages)
    model = reference(folder)
    port = free_port()
    with deployment(tmp_path) as deploy:
        deploy.prefill(prefill_config(folder, stages), DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            computed = 0
            for length in LENGTHS:
                prompt = prompt_of(length, seed=1)
                want = greedy(model, prompt, ANSWER)
                # Cold, with a copy of the same prompt while the first still runs.
                (first, cached_first), (second, cached_second) = await asyncio.gather(
                    pipe.generate(prompt, ANSWER), pipe.generate(prompt, ANSWER)
                )
                assert first == want, f"cold, {length} tokens"
                assert second == want, f"resubmitted, {length} tokens"
                # Reused: every full block but the one that holds the last token.
                third, cached_third = await pipe.generate(prompt, ANSWER)
                assert third == want, f"reused, {length} tokens"
                assert cached_third == (length - 1) // BLOCK * BLOCK
                computed += 3 * length - cached_first - cached_second - cached_third
            # A second prompt that shares k blocks reports exactly k * B cached tokens.
            shared = prompt_of(LENGTHS[-1], seed=1)[: 7 * BLOCK] + prompt_of(40, seed=2)
            answer, cached = await pipe.generate(shared, ANSWER)
            assert answer == greedy(model, shared, ANSWER)
            assert cached == 7 * BLOCK
            computed += len(shared) - cached
        wait_until(
            lambda: (
                per_rank(port, "wavepp_tokens_computed_total")
                == dict.fromkeys(range(stages), float(computed))
            ),
            5,
            f"every stage computed only the suffixes: {computed} tokens; "
            f"saw {per_rank(port, 'wavepp_tokens_computed_total')}",
        )
