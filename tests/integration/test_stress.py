"""A crowd on a cache too small for it: shared prefixes, eviction, cancels, forgotten hand-offs.

Every answer that completes equals transformers', and in the end nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.deployment import (
    BLOCK,
    Pipeline,
    decode_config,
    deployment,
    free_port,
    per_rank,
    pipeline,
    prefill_config,
    scrape,
    wait_until,
)
from tests.integration.test_bad_days import is_quiet
from tests.integration.test_greedy import greedy, reference
from tests.integration.test_router import control, is_true_view
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

SEEDS = (1,)
STAGES = 2
PROMPTS, CONCURRENCY, FAMILIES = 150, 12, 4
LENGTH_MAX = 300
CACHE_TOKENS = 768  # about 2.5 of the longest prompts; the families' trunks alone need more
FATES = {"answer": 12, "cancel": 4, "forget": 2, "hang up": 2}
REQUEST_TIMEOUT_S = 30


def prompts_of(draw: random.Random) -> list[list[int]]:
    """Return prompts that leave a few trunks, and earlier prompts, at random depths."""

    def fresh(length: int) -> list[int]:
        return [draw.randrange(3, 250) for _ in range(length)]

    trunks = [fresh(LENGTH_MAX) for _ in range(FAMILIES)]
    prompts: list[list[int]] = []
    for _ in range(PROMPTS):
        length = draw.randint(1, LENGTH_MAX)
        parent = draw.choice(trunks if not prompts or draw.random() < 0.6 else prompts[-20:])
        shared = min(len(parent), draw.choice([0, BLOCK, draw.randint(0, length), length]), length)
        prompts.append(parent[:shared] + fresh(length - shared))
    return prompts


async def given_up(pipe: Pipeline, prompt: list[int], after_s: float) -> bool:
    """Stop a prefill after a while; return whether it had not ended by then."""
    from dynamo.runtime import Context

    context = Context()
    prefill = asyncio.create_task(pipe.prefill_chunks(prompt, context=context))
    _, unfinished = await asyncio.wait([prefill], timeout=after_s)
    context.stop_generating()
    await prefill
    return bool(unfinished)


async def hang_up(pipe: Pipeline, prompt: list[int], after_s: float) -> None:
    """Fetch the state, then drop the answer's stream."""
    result = await pipe.prefill(prompt)
    answer = asyncio.create_task(pipe.decode(prompt, result, 200))
    await asyncio.wait([answer], timeout=after_s)
    answer.cancel()
    await asyncio.wait([answer])


def total(port: int, name: str) -> float:
    """Return the sum of a metric's samples."""
    return sum(value for (sample, _), value in scrape(port).items() if sample == name)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny forwards on threads that wait for busy cores are 20 times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_crowd_gets_right_answers_and_leaves_nothing_behind(
    tmp_path: Path, seed: int
) -> None:
    """FS-19, FS-57, FS-59: cancels, forgotten hand-offs, repeats; a cache that is too small."""
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", seed=seed)
    draw = random.Random(seed)
    prompts = prompts_of(draw)
    fates = draw.choices(list(FATES), list(FATES.values()), k=PROMPTS)
    counts = [draw.randint(3, 4) for _ in prompts]
    pauses = [draw.choice([0.0, 0.002, 0.01, 0.03, 0.1, 0.3]) for _ in prompts]
    port, decode_port = free_port(), free_port()
    with deployment(tmp_path) as deploy:
        deploy.prefill(
            prefill_config(
                folder, STAGES, cache={"device_tokens": CACHE_TOKENS}, transfer={"hold_s": 1.0}
            ),
            DYN_SYSTEM_PORT=str(port),
        )
        deploy.decode(decode_config(folder), DYN_SYSTEM_PORT=str(decode_port))
        model = reference(folder)  # while the workers start
        wanted = {
            index: greedy(model, prompts[index], counts[index])
            for index in range(PROMPTS)
            if fates[index] == "answer"
        }
        seen: dict[str, int] = {"reused": 0, "cancelled": 0}

        async with pipeline(deploy) as pipe:
            turnstile = asyncio.Semaphore(CONCURRENCY)

            async def serve(index: int) -> None:
                prompt, fate, pause = prompts[index], fates[index], pauses[index]
                if fate == "cancel":
                    seen["cancelled"] += await given_up(pipe, prompt, pause)
                elif fate == "forget":
                    await pipe.prefill(prompt)
                elif fate == "hang up":
                    await hang_up(pipe, prompt, pause)
                else:
                    answer, cached = await pipe.generate(prompt, counts[index])
                    what = f"seed {seed}, prompt {index}: {len(prompt)} tokens, {cached} cached"
                    assert answer == wanted[index], what
                    assert cached % BLOCK == 0 and cached < len(prompt), what
                    seen["reused"] += cached

            async def one(index: int) -> None:
                async with turnstile:
                    try:
                        await asyncio.wait_for(serve(index), REQUEST_TIMEOUT_S)
                    except TimeoutError:
                        view = await asyncio.to_thread(control, port, "cache_view")
                        raise AssertionError(f"{fates[index]} {index} hangs: {view}") from None

            await asyncio.gather(*(one(index) for index in range(PROMPTS)))

            def is_idle() -> bool:
                return is_quiet(port) and is_true_view(control(port, "cache_view"))

            wait_until(is_idle, 10, f"quiet and true: {control(port, 'cache_view')}")
            wait_until(  # figures are reported twice a second
                lambda: max(per_rank(port, "wavepp_holds").values()) == 0, 5, "no hold is left"
            )
            for name in ("wavepp_decode_requests", "wavepp_decode_used_blocks"):
                wait_until(lambda name=name: total(decode_port, name) == 0, 5, f"{name} is 0")
            # The test has met what it is about.
            assert seen["cancelled"] > 0 and seen["reused"] > 0, seen
            assert min(per_rank(port, "wavepp_evicted_blocks_total").values()) > PROMPTS
            assert min(per_rank(port, "wavepp_holds_expired_total").values()) > 0
