"""What the engine tells of its requests: log lines, phases, spans."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dynamo.llm.exceptions import HttpError, InvalidArgument
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.unit.serving.scripted import Bench, Context, make_config
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.config.schema import ObsConfig
from wavepp_worker.obs.quiet import LINES_MAX
from wavepp_worker.obs.spans import RequestSpans
from wavepp_worker.obs.trace_file import merge_parts
from wavepp_worker.serving.stories import FLUSH_TIMEOUT_S
from wavepp_worker.wire.mailbox import Announce, Gone, KvDelta, Timeline

PROMPT = list(range(10, 20))  # two full blocks and a half
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tools that run in the same process may have disabled the loggers they found.
    monkeypatch.setattr(logging.getLogger("wavepp_worker.serving.engine"), "disabled", False)
    caplog.set_level(logging.INFO, "wavepp_worker")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(make_config())
    await bench.start()
    yield bench
    await bench.engine.cleanup()


def metric(bench: Bench, name: str, **labels: str) -> float | None:
    return bench.engine._metrics.registry.get_sample_value(name, labels)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("request ")]


def timeline() -> Timeline:
    now = time.monotonic()
    return Timeline(now, now + 0.001, now + 0.002, now + 0.003, leased_at=now, attempts=3)


async def serve(bench: Bench, context: Context | None = None, endpoint: int = 0) -> Announce:
    task = bench.ask(PROMPT, context)
    announce = await bench.announced(len(bench.ranks.announced) + 1)
    bench.ranks.finish(announce.rid, endpoint, timeline=timeline())
    await task
    return announce


async def test_a_quick_request_is_not_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await serve(bench)
    assert lines(caplog) == []


async def test_a_slow_request_is_told_once_with_its_phases(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(make_config(obs=ObsConfig(slow_request_s=1e-6)))
    await bench.start()
    await serve(bench, Context("slow\none"), endpoint=4)
    (line,) = lines(caplog)
    assert line.startswith("request slow: outcome=served request=slow?one seconds=")
    assert " prompt_tokens=10 expected=0 endpoint=4 computed=6 attempts=3 hash_ms=" in line
    for phase in ("queue", "lease", "wait", "execution", "handoff"):
        assert f" {phase}_ms=" in line
    await bench.engine.cleanup()


async def test_a_request_given_up_after_a_long_wait_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(make_config(obs=ObsConfig(slow_request_s=1e-6)))
    await bench.start()
    context = Context()
    task = bench.ask(PROMPT, context)
    await bench.announced(1)
    context.stop()
    await task
    task = bench.ask(PROMPT)
    await bench.announced(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    told = lines(caplog)
    assert len(told) == 2
    assert all("outcome=cancelled" in line and " unanswered_ms=" in line for line in told)
    assert metric(bench, "wavepp_requests_total", outcome="cancelled") == 2
    await bench.engine.cleanup()


async def test_a_failed_request_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(make_config(request_timeout_s=0.02))
    await bench.start()
    with pytest.raises(HttpError):
        await bench.ask(PROMPT)
    (line,) = lines(caplog)
    assert line.startswith("request failed: code=timeout request=request-1 seconds=0.0")
    assert " unanswered_ms=" in line
    assert line.endswith(": the prompt was not served within 0.02 s")
    await bench.engine.cleanup()


async def test_a_flood_of_bad_requests_does_not_flood_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """FS-104"""
    for _ in range(LINES_MAX + 200):
        with pytest.raises(InvalidArgument):
            await bench.ask([])
    assert len(lines(caplog)) == LINES_MAX
    await bench.engine.cleanup()
    assert "request failed: code=empty_prompt: 200 more in 10 s" in caplog.messages
    assert metric(bench, "wavepp_requests_total", outcome="empty_prompt") == LINES_MAX + 200


async def test_the_hold_ends_when_all_ranks_are_rid_of_it(bench: Bench) -> None:
    announce = await serve(bench)
    assert metric(bench, "wavepp_phase_seconds_count", phase="handoff") == 1
    assert metric(bench, "wavepp_phase_seconds_count", phase="lease") == 1
    assert metric(bench, "wavepp_phase_seconds_count", phase="hold") == 0
    bench.ranks.say(Gone(announce.rid))
    await bench.ranks.settle()
    assert metric(bench, "wavepp_phase_seconds_count", phase="hold") == 1


async def test_what_all_stages_hold_is_expected(bench: Bench) -> None:
    """A block that one stage lacks is not, nor is the block of the last token."""
    first = await serve(bench)
    keys = split_keys(first.keys)
    for rank, held in ((0, keys), (1, keys[:1])):
        bench.ranks.say(KvDelta(rank, 1, tuple((True, 0, key) for key in held)))
    await bench.ranks.settle()
    await serve(bench, endpoint=4)
    assert metric(bench, "wavepp_expected_tokens_total") == 4
    assert metric(bench, "wavepp_expected_hits_total", outcome="good") == 1
    bench.ranks.say(KvDelta(1, 2, ((True, 0, keys[1]),)))
    await bench.ranks.settle()
    await serve(bench, endpoint=4)
    assert metric(bench, "wavepp_expected_tokens_total") == 4 + 8
    assert metric(bench, "wavepp_expected_hits_total", outcome="poor") == 1
    task = bench.ask(PROMPT[:8])  # both blocks are held, but its last token is in the second
    announce = await bench.announced(4)
    bench.ranks.finish(announce.rid, 4)
    await task
    assert metric(bench, "wavepp_expected_tokens_total") == 4 + 8 + 4


async def test_requests_are_traced_below_dynamos_span() -> None:
    exporter = InMemorySpanExporter()
    bench = Bench(make_config(), spans=RequestSpans(SimpleSpanProcessor(exporter)))
    await bench.start()
    context = Context(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    announce = await serve(bench, context, endpoint=4)
    bench.ranks.say(Gone(announce.rid))
    await bench.ranks.settle()
    with pytest.raises(InvalidArgument):
        await bench.ask([], context)
    payload = await bench.engine.health_check_payload()
    assert payload is not None
    task = bench.ask(payload.pop("token_ids"), context, **payload)
    bench.ranks.finish((await bench.announced(2)).rid)
    await task
    await bench.engine.cleanup()
    spans = exporter.get_finished_spans()
    served, refused = [span for span in spans if span.name == "wavepp.prefill"]
    assert served.parent is not None
    assert f"{served.context.trace_id:032x}" == TRACE
    assert f"{served.parent.span_id:016x}" == PARENT
    assert served.attributes is not None and served.attributes["wavepp.reused_tokens"] == 4
    children = [s.name for s in spans if s.parent and s.parent.span_id == served.context.span_id]
    assert children == ["hash", "queue", "lease", "wait", "execution", "handoff", "hold"]
    assert refused.status.description == "empty_prompt"


async def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    """The rest is given up after a moment."""
    exporter = InMemorySpanExporter()
    given_up = threading.Event()

    class Stuck(SimpleSpanProcessor):
        def shutdown(self) -> None:
            assert given_up.wait(10)

    bench = Bench(make_config(), spans=RequestSpans(Stuck(exporter), give_up=given_up.set))
    await bench.start()
    await serve(bench)
    began = time.monotonic()
    await bench.engine.cleanup()
    assert FLUSH_TIMEOUT_S <= time.monotonic() - began < 5


async def test_a_timeline_has_every_request(tmp_path: Path) -> None:
    bench = Bench(make_config(obs=ObsConfig(trace_folder=str(tmp_path))))
    await bench.start()
    announce = await serve(bench, endpoint=4)
    bench.ranks.say(Gone(announce.rid))
    await bench.ranks.settle()
    with pytest.raises(InvalidArgument):
        await bench.ask([])
    await bench.engine.cleanup()
    merge_parts(tmp_path, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begun = [event["name"] for event in trace if event["ph"] == "b"]
    assert begun == [
        "request 1", "hash", "queue", "lease", "wait", "execution", "handoff", "hold",
    ]  # fmt: skip
    ended = {event["name"]: event for event in trace if event["ph"] == "e"}
    assert set(ended) == set(begun)
    assert ended["request 1"]["args"] == {"outcome": "served", "endpoint": 4, "attempts": 3}
    assert ended["request 1"]["ts"] == ended["handoff"]["ts"]
    assert [event["name"] for event in trace if event["ph"] == "i"] == ["refused: empty_prompt"]
