"""The engine in front of vLLM decode workers: what it answers, and that it answers it whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import Disconnected, InvalidArgument

from tests.unit.runtime.test_vllm_pool import Desk
from tests.unit.serving.scripted import CACHE_TOKENS, Bench, Context, make_config
from wavepp_worker.config.schema import CacheConfig, DecodePoolConfig
from wavepp_worker.serving.registration import worker_config
from wavepp_worker.wire.mailbox import Finished, Gone, Ready, Sampling

CONFIG = msgspec.structs.replace(
    make_config(),
    cache=CacheConfig(block_tokens=64),
    decode_pool=DecodePoolConfig(kind="vllm-push", block_tokens=32),
)
PROMPT = list(range(10, 80))


@pytest.fixture
def desks() -> Iterator[list[Desk]]:
    context: zmq.Context[Any] = zmq.Context()
    made = [Desk(context, stage, {"a": "life", "ended": None}) for stage in range(2)]
    yield made
    for desk in made:
        desk.close()
    context.destroy(linger=0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(CONFIG)
    await bench.start()
    yield bench
    await bench.engine.cleanup()


def finish(bench: Bench, rid: int, desks: list[Desk], hold: str) -> None:
    for desk in desks:
        bench.ranks.say(Ready(rid, desk.stage, desk.handoff(hold)))
    bench.ranks.say(Finished(rid, 0, 42, -0.5))


async def test_decode_is_told_where_to_register_under_dynamos_request_id(
    bench: Bench, desks: list[Desk]
) -> None:
    task = bench.ask(PROMPT, Context("0b5e4c5a"))
    announce = await bench.announced(1)
    finish(bench, announce.rid, desks, "a")
    (chunk,) = await task
    assert (chunk["finish_reason"], chunk["token_ids"]) == ("length", [42])
    params = chunk["disaggregated_params"]["kv_transfer_params"]
    assert params["remote_engine_id"] == "life"
    assert params["remote_request_id"] == "0b5e4c5a"
    assert (params["pp_size"], params["remote_num_tokens"]) == (2, 70)
    assert params["remote_block_ids"] == [[0, 1, 2]]
    assert [desk.asked for desk in desks] == [[("a", "0b5e4c5a")]] * 2
    assert bench.ranks.cancelled == [], "the stages hold it for decode"
    bench.ranks.say(Gone(announce.rid))
    await bench.ranks.settle()
    assert await bench.engine.is_quiescent() is True


async def test_an_answer_that_would_be_incomplete_is_an_error_and_frees_the_stages(
    bench: Bench, desks: list[Desk]
) -> None:
    task = bench.ask(PROMPT)
    announce = await bench.announced(1)
    finish(bench, announce.rid, desks, "ended")
    with pytest.raises(Disconnected):
        await task
    assert bench.ranks.cancelled == [announce.rid]


async def test_how_to_sample_is_decodes_business(bench: Bench, desks: list[Desk]) -> None:
    task = bench.ask(
        PROMPT,
        sampling_options={"temperature": 0.7, "min_p": 0.1, "guided_decoding": {"json": "{}"}},
        output_options={"logprobs": 5},
    )
    announce = await bench.announced(1)
    assert announce.sampling == Sampling()
    finish(bench, announce.rid, desks, "a")
    await task


@pytest.mark.parametrize(
    "extra", [{"sampling_options": {"n": 2}}, {"output_options": {"prompt_logprobs": 1}}]
)
async def test_what_one_hand_over_cannot_serve_is_refused(
    bench: Bench, extra: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match="supported"):
        await bench.ask(PROMPT, **extra)
    assert bench.ranks.announced == []


async def test_probes_reach_no_decode_worker(bench: Bench, desks: list[Desk]) -> None:
    payload = await bench.engine.health_check_payload()
    task = bench.ask(PROMPT, **{k: v for k, v in payload.items() if k != "token_ids"})
    announce = await bench.announced(1)
    finish(bench, announce.rid, desks, "a")
    (chunk,) = await task
    assert "disaggregated_params" not in chunk
    assert [desk.asked for desk in desks] == [[], []]


async def test_it_registers_as_a_prefill_worker_with_its_own_block_size() -> None:
    assert worker_config(CONFIG).disaggregation_mode == DisaggregationMode.PREFILL
    bench = Bench(CONFIG)
    registered = await bench.start()
    assert registered.llm.kv_cache_block_size == 64
    assert registered.llm.total_kv_blocks == CACHE_TOKENS // 64
    await bench.engine.cleanup()
