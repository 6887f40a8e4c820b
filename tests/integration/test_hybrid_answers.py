"""Models with recurrent layers, end to end: answers equal the reference's, token for token.

transformers is the reference, but for Kimi K3, of which it has none.

Blocks and states go from prefill stages to decode through NIXL.  What can be reused ends at a
snapshot: every 64 tokens here, and at the last block boundary of a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

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
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.k3_reference import K3Reference
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 11 * BLOCK + 5)
ANSWER = 10
INTERVAL = 64


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("qwen3_5", 1),
        ("qwen3_5", 2),
        ("qwen3_next", 2),
        ("qwen3_next", 3),
        ("kimi_linear", 2),
        ("kimi_k3", 2),
        pytest.param("kimi_k3", 3, marks=pytest.mark.slow),
    ],
)
async def test_answers_equal_the_reference(tmp_path: Path, family: str, stages: int) -> None:
    """FS-26, FS-28: cold, copied, repeated, extended and shared prompts."""
    folder = tmp_path / "model"
    make_tiny_model(folder, family, seed=stages)
    answer_to = greedy_of(folder, family)
    port = free_port()
    config = prefill_config(folder, stages, cache={"snapshot_interval_tokens": INTERVAL})
    with deployment(tmp_path) as deploy:
        deploy.prefill(config, DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            computed = 0
            for length in LENGTHS:
                prompt = prompt_of(length, seed=3)
                want = answer_to(prompt, ANSWER)
                (first, cached_first), (second, cached_second) = await asyncio.gather(
                    pipe.generate(prompt, ANSWER), pipe.generate(prompt, ANSWER)
                )
                assert first == want, f"cold, {length} tokens"
                assert second == want, f"resubmitted, {length} tokens"
                third, cached_third = await pipe.generate(prompt, ANSWER)
                assert third == want, f"reused, {length} tokens"
                assert cached_third == (length - 1) // BLOCK * BLOCK
                computed += 3 * length - cached_first - cached_second - cached_third
            for text, reused in (
                (prompt + want + prompt_of(30, seed=4), 11 * BLOCK),  # the conversation goes on
                (prompt[: 7 * BLOCK] + prompt_of(40, seed=5), INTERVAL),  # not at its 7th block
            ):
                answer, cached = await pipe.generate(text, ANSWER)
                assert answer == answer_to(text, ANSWER)
                assert cached == reused
                computed += len(text) - cached
        wait_until(
            lambda: (
                per_rank(port, "wavepp_tokens_computed_total")
                == dict.fromkeys(range(stages), float(computed))
            ),
            5,
            f"every stage computed only the suffixes: {computed} tokens; "
            f"saw {per_rank(port, 'wavepp_tokens_computed_total')}",
        )


async def test_stages_that_keep_unlike_many_snapshots_agree(tmp_path: Path) -> None:
    """FS-35: stage 0 has room for two snapshots beside its requests, stage 1 for many."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "kimi_linear", seed=4)
    answer_to = greedy_of(folder, "kimi_linear")
    cache = {"snapshot_interval_tokens": INTERVAL, "state_slots": [4, 40]}
    config = prefill_config(folder, 2, cache=cache, admission={"batch_requests_max": 2})
    prompts = [prompt_of(5 * INTERVAL + 7 * index, seed=index) for index in range(3)]
    port = free_port()
    with deployment(tmp_path) as deploy:
        deploy.prefill(config, DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            reused = []
            for turn in range(3):
                for index, prompt in enumerate(prompts):
                    answer, cached = await pipe.generate(prompt, ANSWER)
                    assert answer == answer_to(prompt, ANSWER), (turn, index)
                    reused.append((turn, index, cached))
                    prompts[index] = prompt + answer + prompt_of(20, seed=100 * turn + index)
            # The same prompt twice in a row: its newest snapshot is on both stages.
            _, cached = await pipe.generate(prompts[0], ANSWER)
            answer, again = await pipe.generate(prompts[0], ANSWER)
            assert answer == answer_to(prompts[0], ANSWER)
            assert again == (len(prompts[0]) - 1) // BLOCK * BLOCK
            assert min(cached for turn, _, cached in reused if turn) < 5 * INTERVAL, reused
        evicted = per_rank(port, "wavepp_evicted_blocks_total")
        assert evicted[0] > 0 == evicted[1], evicted


def greedy_of(folder: Path, family: str) -> Callable[[list[int], int], list[int]]:
    """Return what computes the greedy answer to a prompt."""
    if family == "kimi_k3":
        return K3Reference(folder).greedy
    model = reference(folder)
    return lambda prompt, count: greedy(model, prompt, count)


async def test_a_lost_state_is_computed_by_decode(tmp_path: Path) -> None:
    """The hold has run out: decode computes the prompt itself, from a zeroed slot."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "qwen3_5", seed=9)
    model = reference(folder)
    prompts = [prompt_of(5 * BLOCK + 3, seed) for seed in range(3)]
    with deployment(tmp_path) as deploy:
        deploy.prefill(prefill_config(folder, 2, transfer={"hold_s": 0.2}))
        deploy.decode(decode_config(folder, batch={"cache_tokens": 4096, "requests_max": 1}))
        async with pipeline(deploy) as pipe:
            for prompt in prompts:  # the one slot has held other states
                answer, _ = await pipe.generate(prompt, ANSWER)
                assert answer == greedy(model, prompt, ANSWER)
            handed = await pipe.prefill(prompts[0])
            await asyncio.sleep(1.0)  # the hold is over
            answer = await pipe.decode(prompts[0], handed, ANSWER)
            assert answer == greedy(model, prompts[0], ANSWER)
        assert "hand-off lost" in deploy.logs()
