"""The decode loop with a tiny model; the hand-off's bytes are copied in this process."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.numerics.pipeline import BLOCK_TOKENS, Oracle, Pipeline
from tests.numerics.tiny import VOCAB, make_tiny_model
from wavepp_worker.base.errors import DeviceError, OverloadedError, TransferError, WavePPError
from wavepp_worker.config.schema import DecodeBatchConfig, DecodeConfig, ModelConfig
from wavepp_worker.decode.batcher import Batcher
from wavepp_worker.decode.loop import Answer, DecodeLoop
from wavepp_worker.decode.request import DecodeRequest, StopRules
from wavepp_worker.decode.runner import ModelRunner
from wavepp_worker.transfer.fetch import UnsettledError
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.wire.mailbox import Sampling, StageHandoff

BOUNDS = (0, 2, 5)  # layers of the two prefill stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", seed=3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


class Prefill:
    """A prefill worker in this process: computes prompts in two stages, hands out slots."""

    def __init__(self, folder: Path) -> None:
        self._pipeline = Pipeline(folder, BOUNDS, blocks=256)
        self._next_block = 0
        self.tables: dict[str, list[int]] = {}
        self.declined: list[str] = []

    def serve(self, prompt: Sequence[int]) -> Handoff:
        blocks = -(-len(prompt) // BLOCK_TOKENS)
        table = list(range(self._next_block, self._next_block + blocks))[::-1]
        self._next_block += blocks
        logits = self._pipeline.prefill(prompt, table, [len(prompt)])
        name = f"hold-{len(self.tables)}"
        self.tables[name] = table
        return Handoff(
            fingerprint="f",
            prompt_tokens=len(prompt),
            block_tokens=BLOCK_TOKENS,
            first_token=int(logits[-1].argmax()),
            stages=tuple(
                StageHandoff(stage, (first, stop), "tcp://127.0.0.1:1", name)
                for stage, (first, stop) in enumerate(itertools.pairwise(BOUNDS))
            ),
        )


class FakeReader:
    """Copies what `StateReader` would transfer; `gate` and `error` stand for a bad network."""

    def __init__(self, prefill: Prefill, runner: ModelRunner) -> None:
        self._prefill, self._runner = prefill, runner
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: TransferError | None = None

    async def fetch(
        self,
        handoff: Handoff,
        block_ids: Sequence[int],
        is_wanted: Callable[[], bool],
        state_slot: int | None = None,
    ) -> None:
        assert state_slot is None, "these models keep no states"
        while not self.gate.is_set():
            if not is_wanted():
                raise TransferError("no longer wanted")
            await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        table = self._prefill.tables[handoff.stages[0].hold]
        for stage, store in zip(handoff.stages, self._prefill._pipeline.stores, strict=True):
            first, stop = stage.layers
            for there, here in zip(table, block_ids, strict=True):
                self._runner.store.pool[here, first:stop] = store.pool[there]

    async def decline(self, handoff: Handoff) -> None:
        self._prefill.declined.append(handoff.stages[0].hold)

    def stats(self) -> dict[str, float]:
        return {}


class Rig:
    def __init__(
        self,
        folder: Path,
        cache_tokens: int,
        requests_max: int,
        queue_max: int,
        computes_lost_state: bool,
    ) -> None:
        config = DecodeConfig(
            model=ModelConfig(path=str(folder)),
            block_tokens=BLOCK_TOKENS,
            device="cpu",
            batch=DecodeBatchConfig(cache_tokens=cache_tokens),
        )
        self.runner = ModelRunner(config)
        self.prefill = Prefill(folder)
        self.reader = FakeReader(self.prefill, self.runner)
        self.batcher = Batcher(
            self.runner.blocks, BLOCK_TOKENS, requests_max, queue_max, chunk_tokens=32
        )
        self.loop = DecodeLoop(
            self.runner,
            self.reader,  # type: ignore[arg-type]
            self.batcher,
            computes_lost_state=computes_lost_state,
        )

    def ask(self, prompt: Sequence[int], tokens_max: int, **changes: Any) -> DecodeRequest:
        fields: dict[str, Any] = {
            "prompt": tuple(prompt),
            "handoff": self.prefill.serve(prompt),
            "sampling": Sampling(),
            "stops": StopRules(tokens_max=tokens_max),
        }
        return DecodeRequest(**(fields | changes))

    async def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 10
        while not self.loop.is_idle():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)
        self.batcher.check_invariants()
        assert self.batcher.used_blocks() == 0


@asynccontextmanager
async def make_rig(
    folder: Path,
    *,
    cache_tokens: int = 1024,
    requests_max: int = 8,
    queue_max: int = 32,
    computes_lost_state: bool = True,
) -> AsyncIterator[Rig]:
    rig = Rig(folder, cache_tokens, requests_max, queue_max, computes_lost_state)
    rig.loop.start()
    try:
        yield rig
    finally:
        await rig.loop.close()
        await rig.loop.close()


async def collect(answer: Answer) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        picked = await asyncio.wait_for(answer.next(), 20)
        if picked is None:
            return tokens, "cancelled"
        tokens.append(picked.token)
        if picked.finish_reason:
            return tokens, picked.finish_reason


def make_prompt(seed: int, length: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(6, VOCAB) for _ in range(length)]


async def test_answers_equal_transformers_token_for_token(folder: Path, oracle: Oracle) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate((1, 15, 16, 17, 50, 93))]
    async with make_rig(folder) as rig:
        answers = [rig.loop.submit(rig.ask(prompt, 20)) for prompt in prompts]
        results = await asyncio.gather(*(collect(answer) for answer in answers))
        await rig.wait_until_idle()
    for prompt, (tokens, reason) in zip(prompts, results, strict=True):
        assert (tokens, reason) == (oracle.greedy(prompt, 20), "length")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
async def test_other_families_answer_as_transformers_does(tmp_path: Path, family: str) -> None:
    """Handed over by two stages: keys and values beside experts, and latents."""
    folder = make_tiny_model(tmp_path, family, seed=3)
    oracle = Oracle(folder)
    prompts = [make_prompt(seed, length) for seed, length in enumerate((1, 17, 50))]
    async with make_rig(folder) as rig:
        answers = [rig.loop.submit(rig.ask(prompt, 8)) for prompt in prompts]
        results = await asyncio.gather(*(collect(answer) for answer in answers))
        await rig.wait_until_idle()
    for prompt, (tokens, reason) in zip(prompts, results, strict=True):
        assert (tokens, reason) == (oracle.greedy(prompt, 8), "length")


async def test_evicted_answers_are_computed_again_and_stay_right(
    folder: Path, oracle: Oracle
) -> None:
    prompts = [make_prompt(10 + seed, 14) for seed in range(4)]
    async with make_rig(folder, cache_tokens=8 * BLOCK_TOKENS) as rig:
        answers = [rig.loop.submit(rig.ask(prompt, 40)) for prompt in prompts]
        results = await asyncio.gather(*(collect(answer) for answer in answers))
        await rig.wait_until_idle()
        assert rig.batcher.evictions > 0
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        assert tokens == oracle.greedy(prompt, 40)


async def test_tokens_stream_before_the_answer_is_complete(folder: Path) -> None:
    async with make_rig(folder) as rig:
        rig.reader.gate.clear()
        answer = rig.loop.submit(rig.ask(make_prompt(1, 20), 5))
        first = await asyncio.wait_for(answer.next(), 5)  # known from the prefill worker
        assert first is not None and first.finish_reason == ""
        rig.reader.gate.set()
        tokens, reason = await collect(answer)
        assert (len(tokens), reason) == (4, "length")


async def test_the_first_token_may_be_the_last(folder: Path) -> None:
    async with make_rig(folder) as rig:
        by_length = rig.loop.submit(rig.ask(make_prompt(1, 20), 1))
        assert (await collect(by_length))[1] == "length"
        request = rig.ask(make_prompt(2, 20), 9)
        assert request.handoff is not None
        stops = StopRules(tokens_max=9, stop_tokens=frozenset({request.handoff.first_token}))
        by_token = rig.loop.submit(rig.ask(make_prompt(2, 20), 9, stops=stops))
        assert await collect(by_token) == ([request.handoff.first_token], "stop")
        await rig.wait_until_idle()
        assert rig.prefill.declined == ["hold-0", "hold-2"]


async def test_a_stop_token_ends_the_answer_but_not_before_the_minimum(
    folder: Path, oracle: Oracle
) -> None:
    prompt = make_prompt(4, 30)
    greedy = oracle.greedy(prompt, 12)
    stop = next(token for token in greedy[3:] if greedy.index(token) >= 3)
    at = greedy.index(stop)
    async with make_rig(folder) as rig:
        rules = StopRules(tokens_max=12, stop_tokens=frozenset({stop}))
        assert await collect(rig.loop.submit(rig.ask(prompt, 12, stops=rules))) == (
            greedy[: at + 1],
            "stop",
        )
        rules = StopRules(tokens_max=12, tokens_min=12, stop_tokens=frozenset({stop}))
        tokens, reason = await collect(rig.loop.submit(rig.ask(prompt, 12, stops=rules)))
        assert (len(tokens), tokens[:at]) == (12, greedy[:at])
        assert stop not in tokens[:11]
        assert reason in ("length", "stop")


async def test_a_seeded_draw_does_not_depend_on_the_company(folder: Path) -> None:
    prompt = make_prompt(5, 25)
    sampling = Sampling(temperature=1.0, seed=11)
    async with make_rig(folder) as rig:
        alone = await collect(rig.loop.submit(rig.ask(prompt, 10, sampling=sampling)))
        others = [rig.loop.submit(rig.ask(make_prompt(20 + n, 9), 10)) for n in range(3)]
        together = rig.loop.submit(rig.ask(prompt, 10, sampling=sampling))
        assert await collect(together) == alone
        for other in others:
            await collect(other)


async def test_a_penalty_changes_the_answer(folder: Path, oracle: Oracle) -> None:
    prompt = make_prompt(6, 30)
    async with make_rig(folder) as rig:
        answer = rig.loop.submit(rig.ask(prompt, 24, presence_penalty=1e6))
        tokens, _ = await collect(answer)
    assert len(set(tokens)) == len(tokens)
    assert tokens != oracle.greedy(prompt, 24)


async def test_a_probe_needs_no_prefill_worker(folder: Path, oracle: Oracle) -> None:
    prompt = make_prompt(7, 70)
    async with make_rig(folder) as rig:
        answer = rig.loop.submit(rig.ask(prompt, 3, handoff=None))
        assert await collect(answer) == (oracle.greedy(prompt, 3), "length")
        await rig.wait_until_idle()


@pytest.mark.parametrize("moment", ["waiting", "fetching", "running"])
async def test_a_cancelled_answer_frees_its_blocks(folder: Path, moment: str) -> None:
    async with make_rig(folder, requests_max=1) as rig:
        if moment == "waiting":
            rig.reader.gate.clear()
            ahead = rig.loop.submit(rig.ask(make_prompt(1, 20), 3))
        if moment == "fetching":
            rig.reader.gate.clear()
        answer = rig.loop.submit(rig.ask(make_prompt(2, 20), 500))
        assert await answer.next() is not None
        if moment == "running":
            assert await answer.next() is not None
        else:
            await asyncio.sleep(0)
        rig.loop.cancel(answer)
        rig.loop.cancel(answer)
        assert (await collect(answer))[1] == "cancelled"
        if moment == "waiting":
            rig.reader.gate.set()
            assert (await collect(ahead))[1] == "length"
        await rig.wait_until_idle()
        # A hand-off that nobody took up is declined; the others ended with their fetch.
        assert rig.prefill.declined == (["hold-1"] if moment == "waiting" else [])


async def test_a_lost_hand_off_is_computed_here(folder: Path, oracle: Oracle) -> None:
    prompts = [make_prompt(seed, length) for seed, length in enumerate((1, 16, 93))]
    async with make_rig(folder) as rig:
        rig.reader.error = TransferError("the exporter is gone")
        answers = [rig.loop.submit(rig.ask(prompt, 12)) for prompt in prompts]
        results = await asyncio.gather(*(collect(answer) for answer in answers))
        assert rig.loop.lost_count == len(prompts)
        await rig.wait_until_idle()
    for prompt, result in zip(prompts, results, strict=True):
        assert result == (oracle.greedy(prompt, 12), "length")


async def test_a_foreign_hand_off_is_an_error_not_work(folder: Path) -> None:
    async with make_rig(folder) as rig:
        rig.reader.error = IncompatibleError("other weights")
        with pytest.raises(IncompatibleError, match="other weights"):
            await collect(rig.loop.submit(rig.ask(make_prompt(1, 20), 5)))
        assert rig.loop.lost_count == 0
        await rig.wait_until_idle()


async def test_a_failed_hand_off_can_fail_one_answer(folder: Path) -> None:
    async with make_rig(folder, computes_lost_state=False) as rig:
        rig.reader.error = TransferError("the exporter is gone")
        answer = rig.loop.submit(rig.ask(make_prompt(1, 20), 5))
        with pytest.raises(TransferError, match="exporter is gone"):
            await collect(answer)
        rig.reader.error = None
        assert (await collect(rig.loop.submit(rig.ask(make_prompt(1, 20), 5))))[1] == "length"
        await rig.wait_until_idle()


async def test_a_full_queue_refuses(folder: Path) -> None:
    async with make_rig(folder, requests_max=1, queue_max=2) as rig:
        rig.reader.gate.clear()
        answers = [rig.loop.submit(rig.ask(make_prompt(1, 20), 3))]
        await answers[0].next()
        await asyncio.sleep(0.01)
        answers += [rig.loop.submit(rig.ask(make_prompt(n, 20), 3)) for n in (2, 3)]
        with pytest.raises(OverloadedError):
            rig.loop.submit(rig.ask(make_prompt(4, 20), 3))
        rig.reader.gate.set()
        for answer in answers:
            assert (await collect(answer))[1] == "length"


@pytest.mark.parametrize("cause", ["step", "bug", "unsettled"])
async def test_a_broken_worker_ends_every_answer_with_an_error(folder: Path, cause: str) -> None:
    async with make_rig(folder) as rig:
        running = rig.loop.submit(rig.ask(make_prompt(1, 20), 500))
        for _ in range(3):
            await running.next()
        if cause == "unsettled":
            rig.reader.error = UnsettledError("cannot stop")
            rig.loop.submit(rig.ask(make_prompt(2, 20), 5))
        else:
            error = RuntimeError("no memory") if cause == "step" else KeyError("bug")

            def fail(*_: object) -> None:
                raise error

            rig.runner._stage.forward = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(WavePPError, match="the decode worker failed"):
            await collect(running)
        await asyncio.wait_for(rig.loop.failed.wait(), 5)
        with pytest.raises(DeviceError):
            rig.loop.submit(rig.ask(make_prompt(3, 20), 5))


async def test_closing_ends_what_is_left(folder: Path) -> None:
    async with make_rig(folder) as rig:
        answer = rig.loop.submit(rig.ask(make_prompt(1, 20), 800))
        await answer.next()
        await rig.loop.close()
        assert (await collect(answer))[1] == "cancelled"
