"""The engine on scripted ranks: one terminal chunk or one error, whatever the ranks do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo.llm.exceptions import Disconnected, EngineShutdown, HttpError, InvalidArgument

from tests.unit.serving.scripted import BLOCK, CACHE_TOKENS, Bench, Context, make_config, until
from wavepp_worker.base.errors import PeerError
from wavepp_worker.cache.hashing import scope_key, sequence_keys, split_keys
from wavepp_worker.transfer.handoff import Handoff
from wavepp_worker.wire.mailbox import (
    CacheView,
    Fatal,
    Gone,
    KvDelta,
    Rejected,
    ReportMessage,
    Sampling,
    Stats,
)

PROMPT = list(range(10, 20))  # two full blocks and a half


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(make_config())
    await bench.start()
    yield bench
    await bench.engine.cleanup()


def metric(bench: Bench, name: str, **labels: str) -> float | None:
    return bench.engine._metrics.registry.get_sample_value(name, labels)


# ── start and stop ───────────────────────────────────────────────────────────────────────────


async def test_start_registers_what_the_ranks_allocated() -> None:
    """FS-81: the sizes are those after start-up."""
    bench = Bench(make_config())
    registered = await bench.start()
    assert registered.model == "/models/tiny"
    assert registered.served_model_name == "tiny"
    assert registered.llm.kv_cache_block_size == BLOCK
    assert registered.llm.total_kv_blocks == CACHE_TOKENS // BLOCK
    assert registered.llm.max_num_batched_tokens == 64
    assert registered.llm.context_length == 4096
    assert registered.runtime_data["wavepp_stages"] == 2
    await bench.engine.cleanup()


async def test_cleanup_is_orderly_and_idempotent() -> None:
    bench = Bench(make_config())
    await bench.engine.cleanup()  # never started
    await bench.start()
    await bench.engine.cleanup()
    assert bench.ranks.calls == ["shutdown", "stop", "kill", "close"]
    await bench.engine.cleanup()
    assert bench.ranks.calls.count("shutdown") == 1
    assert bench.left == []


async def test_ranks_that_die_while_starting_fail_start_with_their_reason() -> None:
    bench = Bench(make_config())
    bench.ranks.exited.set_result("loop1 exited with status 1; last output: no such file")
    with pytest.raises(PeerError, match="no such file"):
        await bench.engine.start(5)
    await bench.engine.cleanup()
    assert "kill" in bench.ranks.calls
    assert bench.left == []


async def test_ranks_that_are_not_ready_in_time_fail_start() -> None:
    bench = Bench(make_config())
    with pytest.raises(PeerError, match=r"not ready within 0\.5 s"):
        await bench.engine.start(5)
    await bench.engine.cleanup()


async def test_a_request_before_start_is_sent_elsewhere() -> None:
    with pytest.raises(EngineShutdown):
        await Bench(make_config()).ask(PROMPT)


# ── serving ──────────────────────────────────────────────────────────────────────────────────


async def test_a_request_is_hashed_announced_and_answered(bench: Bench) -> None:
    task = bench.ask(PROMPT, sampling_options={"temperature": 0}, routing={"cache_salt": "tenant"})
    announce = await bench.announced(1)
    packed = b"".join(token.to_bytes(4, "little") for token in PROMPT)
    assert announce.tokens == packed
    assert announce.prompt_tokens == 10
    assert announce.keys == sequence_keys(packed, BLOCK, scope_key("fp", salt="tenant"))
    assert announce.sampling == Sampling(temperature=0.0)
    bench.ranks.finish(announce.rid, endpoint=4, token=42)
    (chunk,) = await task
    assert chunk["token_ids"] == [42]
    assert chunk["finish_reason"] == "length"
    assert chunk["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    handoff = Handoff.from_params(chunk["disaggregated_params"]["kv_transfer_params"])
    handoff.check_fits("fp", BLOCK, 4)
    assert (handoff.first_token, handoff.prompt_tokens) == (42, 10)
    assert bench.ranks.cancelled == []
    assert await bench.engine.is_quiescent() is False, "its holds are open"
    bench.ranks.say(Gone(announce.rid))
    await bench.ranks.settle()
    assert await bench.engine.is_quiescent() is True
    assert metric(bench, "wavepp_requests_total", outcome="served") == 1
    assert metric(bench, "wavepp_prompt_tokens_total") == 10
    assert metric(bench, "wavepp_cached_tokens_total") == 4
    assert metric(bench, "wavepp_live_requests") == 0


async def test_eight_interleaved_requests_get_their_own_answers() -> None:
    config = make_config()
    bench = Bench(config)
    await bench.start()
    tasks = [bench.ask([index + 1] * 5) for index in range(4)]  # the bound of the queue
    await bench.announced(4)
    for announce in reversed(bench.ranks.announced):
        bench.ranks.finish(announce.rid, token=announce.tokens[0])
    answers = [chunk["token_ids"] for (chunk,) in await asyncio.gather(*tasks)]
    assert answers == [[1], [2], [3], [4]]
    await bench.engine.cleanup()


async def test_the_same_request_id_twice_is_two_requests(bench: Bench) -> None:
    """FS-51: each gets an inner id of its own."""
    first, second = (bench.ask(PROMPT, Context("same")) for _ in range(2))
    await bench.announced(2)
    rids = [announce.rid for announce in bench.ranks.announced]
    assert len(set(rids)) == 2
    for rid in rids:
        bench.ranks.finish(rid, token=rid)
    assert [chunk["token_ids"] for (chunk,) in (await first, await second)] == [[r] for r in rids]


async def test_bad_requests_are_refused_before_any_rank_hears_of_them(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tools that run in the same process may have disabled the loggers they found.
    """FS-52, FS-53: client errors, and the good request finishes."""
    monkeypatch.setattr(logging.getLogger("wavepp_worker.serving.engine"), "disabled", False)
    good = bench.ask(PROMPT)
    await bench.announced(1)
    with caplog.at_level(logging.DEBUG, "wavepp_worker"):
        for tokens in ([], [300], [-1], [1] * (CACHE_TOKENS + 1), None, [[1]]):
            with pytest.raises(InvalidArgument):
                await bench.ask(tokens)  # type: ignore[arg-type]
    lines = [r for r in caplog.records if "request failed" in r.getMessage()]
    assert len(lines) == 6, "one line per failed request"
    assert len(bench.ranks.announced) == 1
    bench.ranks.finish(bench.ranks.announced[0].rid)
    assert len(await good) == 1


async def test_the_client_is_told_what_is_wrong(bench: Bench) -> None:
    """FS-53: the message names the position."""
    with pytest.raises(InvalidArgument, match=r"token_ids\[1\] = 300 .* \[0, 300\)"):
        await bench.ask([1, 300])


async def test_logs_and_metrics_hold_no_prompt(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS-89: at the default level neither text nor token ids, whatever is wrong."""
    monkeypatch.setattr(logging.getLogger("wavepp_worker.serving.engine"), "disabled", False)
    good, bad, text = 271, 987654321, "my secret"
    with caplog.at_level(logging.INFO, "wavepp_worker"):
        task = bench.ask([good] * 10)
        bench.ranks.finish((await bench.announced(1)).rid)
        await task
        requests: list[dict[str, Any]] = [
            {"tokens": [good, bad]},
            {"tokens": [good, text]},
            {"tokens": [good], "stop_conditions": {"stop_token_ids": [text]}},
            {"tokens": [good], "routing": {"lora_name": text}},
            {"tokens": [good] * (CACHE_TOKENS + 1)},
        ]
        for request in requests:
            with pytest.raises(InvalidArgument):
                await bench.ask(**request)
        task = bench.ask([good])
        bench.ranks.exited.set_result("loop1 (pid 5) was killed by SIGKILL")
        with pytest.raises(EngineShutdown):
            await task
        await until(lambda: bench.left)
    assert len([line for line in caplog.messages if "request failed" in line]) == 6
    logged = "\n".join(caplog.messages)
    assert "SIGKILL" in logged, "what the ranks say of themselves is logged"
    families = bench.engine._metrics.registry.collect()
    named = str([(sample.name, sample.labels) for family in families for sample in family.samples])
    for marker in (str(good), str(bad), text):
        assert marker not in logged
        assert marker not in named


async def test_rejections_of_the_leader_reach_the_client(bench: Bench) -> None:
    for code, kind in (("never_fits", InvalidArgument), ("overloaded", HttpError)):
        task = bench.ask(PROMPT)
        announce = await bench.announced(len(bench.ranks.announced) + 1)
        bench.ranks.say(Rejected(announce.rid, code, "a reason"))
        with pytest.raises(kind, match="a reason"):
            await task
    assert await bench.engine.is_quiescent() is True
    assert bench.ranks.cancelled == []


async def test_a_full_queue_answers_429(bench: Bench) -> None:
    tasks = [bench.ask(PROMPT) for _ in range(4)]
    await bench.announced(4)
    with pytest.raises(HttpError) as caught:
        await bench.ask(PROMPT)
    assert caught.value.code == 429
    for announce in bench.ranks.announced:
        bench.ranks.finish(announce.rid)
    await asyncio.gather(*tasks)


# ── giving up ────────────────────────────────────────────────────────────────────────────────


async def test_a_client_that_gives_up_cancels_once(bench: Bench) -> None:
    """I49: one final answer; what comes after the cancel is ignored."""
    context = Context()
    task = bench.ask(PROMPT, context)
    announce = await bench.announced(1)
    context.stop()
    (chunk,) = await task
    assert chunk["finish_reason"] == "cancelled"
    assert bench.ranks.cancelled == [announce.rid]
    bench.ranks.finish(announce.rid)  # too late
    await bench.ranks.settle()
    assert await bench.engine.is_quiescent() is True


async def test_a_stream_that_is_closed_cancels_once(bench: Bench) -> None:
    task = bench.ask(PROMPT)
    announce = await bench.announced(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.ranks.cancelled == [announce.rid]


async def test_giving_up_after_the_answer_cancels_nothing(bench: Bench) -> None:
    """I49"""
    context = Context()
    stream = bench.engine.generate({"token_ids": PROMPT}, context)
    first: asyncio.Task[Any] = asyncio.ensure_future(anext(stream))
    announce = await bench.announced(1)
    bench.ranks.finish(announce.rid)
    assert (await first)["finish_reason"] == "length"
    context.stop()
    await stream.aclose()
    assert bench.ranks.cancelled == []


async def test_a_request_that_takes_too_long_is_cancelled() -> None:
    bench = Bench(make_config(request_timeout_s=0.05))
    await bench.start()
    with pytest.raises(HttpError) as caught:
        await bench.ask(PROMPT)
    assert caught.value.code == 504
    assert bench.ranks.cancelled == [1]
    await bench.engine.cleanup()


async def test_gone_without_an_answer_is_retried_elsewhere(bench: Bench) -> None:
    task = bench.ask(PROMPT)
    announce = await bench.announced(1)
    bench.ranks.say(Gone(announce.rid))
    with pytest.raises(Disconnected):
        await task


# ── the router, probes, controls ─────────────────────────────────────────────────────────────


async def test_probes_run_through_the_ranks_and_free_their_hold(bench: Bench) -> None:
    payload = await bench.engine.health_check_payload()
    assert payload is not None
    tokens = payload.pop("token_ids")
    task = bench.ask(tokens, **payload)
    announce = await bench.announced(1)
    bench.ranks.finish(announce.rid)
    (chunk,) = await task
    assert "disaggregated_params" not in chunk
    assert bench.ranks.cancelled == [announce.rid]
    assert metric(bench, "wavepp_requests_total", outcome="probe") == 1


class Sink:
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def publish_batch(self, batch: list[dict[str, Any]]) -> None:
        self.records += batch


async def test_the_router_learns_what_every_stage_holds(bench: Bench) -> None:
    """FS-80: the salt travels with the block."""
    sink = Sink()
    (source,) = await bench.engine.kv_event_sources()
    source.on_ready(sink)
    task = bench.ask(PROMPT, routing={"cache_salt": "tenant"})
    announce = await bench.announced(1)
    first, second = split_keys(announce.keys)
    bench.ranks.say(KvDelta(0, 1, ((True, 0, first), (True, 0, second))))
    bench.ranks.say(KvDelta(1, 1, ((True, 0, first),)))
    bench.ranks.finish(announce.rid)
    await task
    (record,) = sink.records
    assert record["token_ids"] == PROMPT[:BLOCK]
    assert record["block_hashes"] == [int.from_bytes(first[:8], "little", signed=True)]
    assert record["parent_hash"] is None
    assert record["cache_salt"] == "tenant"
    assert metric(bench, "wavepp_router_blocks") == 1


def make_view(rank: int, number: int, *keys: bytes) -> CacheView:
    device = {"free": (3,), "cached": (2,), "referenced": (1,), "reserved": (0,), "total": (6,)}
    host = {"free": (8,), "cached": (7,), "referenced": (5,), "reserved": (4,), "total": (24,)}
    return CacheView(
        rank=rank,
        number=number,
        keys=(keys,),
        **device,
        **{f"host_{name}": counts for name, counts in host.items()},
        lease_count=0,
        escrow_count=0,
        sequence_count=1,
    )


async def test_cache_view_shows_router_and_ranks_side_by_side(bench: Bench) -> None:
    task = bench.ask(PROMPT)
    announce = await bench.announced(1)
    first, second = split_keys(announce.keys)
    control = asyncio.ensure_future(bench.engine.engine_control("cache_view", {}))
    await until(lambda: bench.ranks.views)
    (number,) = bench.ranks.views
    bench.ranks.say(KvDelta(0, 1, ((True, 0, first), (True, 0, second))))
    bench.ranks.say(make_view(0, number, first, second))
    bench.ranks.say(make_view(1, number + 1))  # an answer to somebody else
    bench.ranks.say(KvDelta(1, 1, ((True, 0, first),)))
    bench.ranks.say(make_view(1, number, first))
    view = await control
    name = f"{int.from_bytes(first[:8], 'little'):016x}"
    assert view["router_blocks"] == [name]
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1]
    assert len(view["ranks"][0]["blocks"]) == 2
    assert view["ranks"][1] == {
        "rank": 1, "blocks": [name], "free": [3], "cached": [2], "referenced": [1],
        "reserved": [0], "total": [6], "leases": 0, "escrows": 0, "sequences": 1,
        "host": {"free": [8], "cached": [7], "referenced": [5], "reserved": [4], "total": [24]},
    }  # fmt: skip
    bench.ranks.finish(announce.rid)
    await task


async def test_unknown_controls_are_errors(bench: Bench) -> None:
    assert bench.engine.supported_controls() == {"cache_view"}
    assert (await bench.engine.engine_control("nonsense", {}))["status"] == "error"


class LoadSink:
    def __init__(self) -> None:
        self.snapshots: list[Any] = []

    def publish(self, rank: int, snapshot: Any) -> None:
        self.snapshots.append(snapshot)


async def test_the_router_is_told_the_load_of_the_fullest_stage(bench: Bench) -> None:
    sink = LoadSink()
    assert bench.engine.component_metrics_dp_ranks() == [0]
    bench.engine.attach_snapshot_publisher(sink)
    for rank, used in ((0, 10.0), (1, 30.0)):
        shares = {"wavepp_referenced_blocks": used - 1.0, "wavepp_reserved_blocks": 2.0}
        values = {f'{name}{{window="0"}}': share for name, share in shares.items()}
        values['wavepp_referenced_blocks{window="1"}'] = 1.0
        bench.ranks.say(Stats(rank, "wave", values))
    await bench.ranks.settle()
    last = sink.snapshots[-1]
    assert (last.kv_used_blocks, last.kv_total_blocks) == (32, CACHE_TOKENS // BLOCK)
    assert last.gpu_cache_usage == 32 / 256
    assert last.kv_cache_hit_rate is None, "no request yet"


# ── loss of the worker ───────────────────────────────────────────────────────────────────────


class Endpoint:
    def __init__(self, hangs: bool = False) -> None:
        self.hangs = hangs
        self.unregistered_count = 0

    async def unregister_endpoint_instance(self) -> None:
        self.unregistered_count += 1
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        raise RuntimeError("discovery is gone")


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_lost_rank_ends_all_requests_and_the_process_within_two_seconds(
    bench: Bench, hangs: bool
) -> None:
    """FS-08: every request gets an error, discovery is left, and the reason is the first one."""
    endpoint = Endpoint(hangs)
    await bench.engine.on_endpoint_ready(endpoint)
    tasks = [bench.ask(PROMPT) for _ in range(3)]
    await bench.announced(3)
    lost = time.monotonic()
    bench.ranks.exited.set_result("loop1 (pid 5) was killed by SIGKILL")
    for task in tasks:
        with pytest.raises(EngineShutdown, match="loop1"):
            await task
    assert time.monotonic() - lost < 0.2
    with pytest.raises(EngineShutdown, match="loop1"):
        await bench.ask(PROMPT)
    await until(lambda: bench.left, 2)
    assert bench.left == [1]
    assert endpoint.unregistered_count == 1
    assert "shutdown" not in bench.ranks.calls
    assert bench.ranks.calls[-2:] == ["kill", "close"]


@pytest.mark.parametrize(
    "report",
    [
        Fatal(1, "wave", "invariant broken"),
        KvDelta(0, 7, ()),  # deltas 1 to 6 were lost
        Stats(0, "loop", {"not a name": 1.0}),
    ],
    ids=["fatal", "lost delta", "bad metric"],
)
async def test_what_cannot_be_mended_ends_the_worker(bench: Bench, report: ReportMessage) -> None:
    """FS-75: a lost delta of a rank is among these."""
    task = bench.ask(PROMPT)
    await bench.announced(1)
    bench.ranks.say(report)
    with pytest.raises(EngineShutdown):
        await task
    await until(lambda: bench.left, 2)


async def test_a_leader_that_stopped_reading_ends_the_worker(bench: Bench) -> None:
    bench.ranks.is_blocked = True
    with pytest.raises(EngineShutdown, match="stopped reading"):
        await bench.ask(PROMPT)
    await until(lambda: bench.left, 2)


async def test_memory_ends_with_the_requests(bench: Bench) -> None:
    for _ in range(3):
        task = bench.ask(PROMPT)
        announce = await bench.announced(len(bench.ranks.announced) + 1)
        assert metric(bench, "wavepp_catalog_blocks") == 2
        bench.ranks.finish(announce.rid)
        await task
        bench.ranks.say(Gone(announce.rid))
        await bench.ranks.settle()
        assert metric(bench, "wavepp_catalog_blocks") == 0
