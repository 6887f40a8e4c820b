"""A hybrid worker of real processes: answers, hand-offs, reconciliation, host tier, delays.

Every answer and every hand-off of every stage is compared with a cold, lonely run of the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.integration.toy import ToyWorker, stop_in_order, toy_worker
from tests.integration.toy_books import check_books, performed
from tests.integration.toy_setup import (
    BLOCK,
    STAGES,
    WAVE_TOKENS,
    attention,
    family_prompts,
    recurrent,
    sliding,
    toy_config,
)
from tests.integration.toy_wire import ToySpec

pytestmark = pytest.mark.dynamo

SNAPSHOTS = {"snapshot_interval_tokens": 4 * BLOCK}
LONGEST = 20 * BLOCK
CONCURRENCY = 8

LAYOUTS = {
    "hybrid, recurrent": ((attention(40, 24), recurrent(10, 4)), (recurrent(12, 6),)),
    "hybrid, attention": ((attention(44, 16), recurrent(12, 6)), (attention(40, 24),)),
    "attention, recurrent": ((attention(40, 24),), (recurrent(12, 6),)),
    "hybrid twice": ((attention(40, 12), recurrent(10, 4)), (recurrent(12, 3), attention(48, 24))),
    "sliding, recurrent": ((attention(44, 24), sliding(40, 24, 3 * BLOCK)), (recurrent(14, 4),)),
}


async def run_workload(
    worker: ToyWorker, prompts: Iterable[tuple[int, ...]], *, seed: int, cancel_share: float
) -> None:
    """Run prompts, some at once; cancel a share of them at random moments of the worker's life."""
    draw = random.Random(seed)
    places = asyncio.Semaphore(CONCURRENCY)

    async def run(prompt: tuple[int, ...], patience: int | None) -> None:
        async with places:
            if patience is None:
                await worker.finish(prompt)
                return
            request = worker.announce(prompt)
            moment = worker.report_count + patience
            await worker.until(
                lambda: worker.report_count >= moment or request.is_complete, "time to cancel"
            )
            worker.cancel(request)
            await worker.until(lambda: request.is_gone, f"{request.rid} cancelled and gone")

    await asyncio.gather(
        *(
            run(prompt, draw.randrange(8) if draw.random() < cancel_share else None)
            for prompt in prompts
        )
    )


USUAL = [("hybrid, recurrent", True), ("hybrid, attention", False), ("sliding, recurrent", True)]
WORKLOADS = [
    pytest.param(*workload, marks=[] if workload in USUAL else [pytest.mark.slow])
    for workload in itertools.product(LAYOUTS, (True, False))
]


@pytest.mark.parametrize(("layout", "auto_commit"), WORKLOADS)
async def test_every_answer_and_every_hand_off_is_right(
    layout: str, auto_commit: bool, tmp_path: Path
) -> None:
    """FS-01, FS-17, FS-26: shared prefixes, reuse, eviction, host tier and cancels."""
    config = toy_config(cache=SNAPSHOTS, admission={"auto_commit": auto_commit})
    async with toy_worker(config, ToySpec(windows=LAYOUTS[layout]), tmp_path) as worker:
        prompts = family_prompts(21, 80, LONGEST)
        await run_workload(worker, prompts, seed=22, cancel_share=0.2)
        await check_books(worker)
        assert worker.stat("wave", 0, "wavepp_reused_tokens_total") > 0
        moves = [performed(worker, rank) for rank in range(STAGES)]
        assert min(offloads for offloads, _, _ in moves) > 0
        assert max(onboards for _, onboards, _ in moves) > 0
        await stop_in_order(worker)


@pytest.mark.parametrize(("auto_commit", "verdict"), [(True, "retry"), (False, "trim")])
async def test_ranks_that_kept_different_prefixes_agree(
    auto_commit: bool, verdict: str, tmp_path: Path
) -> None:
    """FS-02, X1: rank 0 lost the tail of a prefix, rank 1 has no snapshot where that ends."""
    config = toy_config(
        cache=SNAPSHOTS, admission={"auto_commit": auto_commit, "headroom_factor": 0}
    )
    base = tuple(range(1, 10 * BLOCK + 1))  # snapshots on rank 1: 4, 8 and 9 blocks
    spec = ToySpec(windows=((attention(14),), (recurrent(12),)))
    async with toy_worker(config, spec, tmp_path) as worker:
        await worker.finish(base)
        await worker.finish(range(1000, 1000 + 7 * BLOCK))  # evicts blocks 7 and 8 on rank 0
        request = await worker.finish((*base, 1, 2, 3))
        assert request.finished is not None
        assert request.finished.endpoint == 4 * BLOCK
        await worker.until(
            lambda: worker.stat("wave", 0, f"wavepp_admission_{verdict}_total") == 1, verdict
        )
        await check_books(worker)
        await stop_in_order(worker)


async def test_a_slow_load_on_the_last_stage_stops_neither_admission_nor_rounds(
    tmp_path: Path,
) -> None:
    """FS-03: a prefix comes from the host tier, at once on stage 0 and late on the last stage."""
    config = toy_config(admission={"headroom_factor": 0})
    spec = ToySpec(windows=((attention(24, 48),), (attention(24, 48),)))
    base = tuple(range(1, 10 * BLOCK + 1))
    async with toy_worker(config, spec, tmp_path) as worker:
        await worker.finish(base)
        for salt in range(3):
            await worker.finish(range(1000 * salt + 1000, 1000 * salt + 1000 + 10 * BLOCK))
        await worker.gate(1, "copy", is_open=False)
        loading = worker.announce((*base, 1, 2, 3))
        await worker.until_at_gate(1, "copy")
        others = [worker.announce([salt] * 2 * BLOCK) for salt in range(3)]
        await worker.until(
            lambda: all(
                worker.stat("wave", rank, "wavepp_admitted_total") == 8 for rank in range(STAGES)
            ),
            "the others admitted everywhere",
        )
        await worker.until(lambda: 0 in others[-1].handoffs, "all computed on stage 0")
        assert loading.finished is None
        await worker.gate(1, "copy", is_open=True)
        await asyncio.gather(*(worker.take(request) for request in [loading, *others]))
        assert loading.finished is not None
        assert loading.finished.endpoint == 10 * BLOCK
        await check_books(worker)
        assert performed(worker, 1)[1] > 0
        await stop_in_order(worker)


async def test_a_slow_link_changes_no_answer(tmp_path: Path) -> None:
    """FS-07: cold prompts of 1 to 3 wave budgets over a slow hop, then the same from the cache."""
    spec = ToySpec(windows=LAYOUTS["hybrid, recurrent"], delays_s={"hop1": 0.004})
    lengths = [int(share * WAVE_TOKENS) for share in (1, 1.1, 1.5, 3)]
    prompts = [(salt, *range(length - 1)) for salt in range(4) for length in lengths]
    async with toy_worker(toy_config(cache=SNAPSHOTS), spec, tmp_path) as worker:
        for _ in range(2):
            await run_workload(worker, prompts, seed=0, cancel_share=0.0)
        assert worker.stat("wave", 0, "wavepp_reused_tokens_total") > 0
        await check_books(worker)
        await stop_in_order(worker)


async def test_stages_of_unequal_speed_keep_every_answer_right(tmp_path: Path) -> None:
    """FS-03, FS-28: slow copies here, slow waves there, cancels everywhere."""
    delays_s = {"copy0": 0.002, "copy1": 0.02, "wave0": 0.003, "hop1": 0.002}
    spec = ToySpec(windows=LAYOUTS["hybrid twice"], delays_s=delays_s)
    async with toy_worker(toy_config(cache=SNAPSHOTS), spec, tmp_path) as worker:
        prompts = family_prompts(31, 60, LONGEST)
        await run_workload(worker, prompts, seed=32, cancel_share=0.4)
        await check_books(worker)
        await stop_in_order(worker)
