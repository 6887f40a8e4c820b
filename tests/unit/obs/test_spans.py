"""Spans through the real exporters, over real sockets."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from types import ModuleType

import pytest

from tests.unit.obs.collector import collect
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.obs import spans as spans_module
from wavepp_worker.obs.spans import RequestSpans, is_wanted, spans_from_environment
from wavepp_worker.obs.story import Story
from wavepp_worker.wire.mailbox import Finished, Timeline

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


def connect(url: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> RequestSpans:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_SERVICE_NAME": "prefill-a",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # read by the exporter itself
    spans = spans_from_environment(environment)
    assert spans is not None
    return spans


def served_story() -> Story:
    """Return a request that came 6 s ago and was answered 0 s ago."""
    at = time.monotonic() - 6
    story = Story("r1", at)
    story.announced(7, 96, 64, at + 0.5)
    timeline = Timeline(at + 0.6, at + 2, at + 3, at + 5, leased_at=at + 1, attempts=2)
    story.take(Finished(7, 32, 5, -0.1, timeline))
    story.end("served", at + 6)
    return story


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_request_arrives_as_a_child_of_the_span_that_waited_for_it(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collect(protocol) as collector:
        spans = connect(collector.url, protocol, monkeypatch)
        story = served_story()
        recorded = spans.record(story, HEADERS, error="")
        recorded.add(story.reach("hold", story.ended_at + 2))
        now = time.time()
        spans.close()
        (request,) = collector.wait_for("wavepp.prefill")
        collector.wait_for("hold")
    assert (request.trace_id, request.parent_id) == (TRACE, PARENT)
    assert request.service == "prefill-a"
    assert not request.is_error
    assert request.ended_at == pytest.approx(now, abs=1.0)
    assert request.ended_at - request.began_at == pytest.approx(6.0, abs=1e-3)
    assert request.facts == {
        "wavepp.request_id": "r1", "wavepp.outcome": "served", "wavepp.prompt_tokens": 96,
        "wavepp.expected_tokens": 64, "wavepp.reused_tokens": 32, "wavepp.computed_tokens": 64,
        "wavepp.attempts": 2,
    }  # fmt: skip
    phases = [span for span in collector.spans if span is not request]
    assert {span.parent_id for span in phases} == {request.span_id}
    assert {span.trace_id for span in phases} == {TRACE}
    told = {span.name: round(span.ended_at - span.began_at, 3) for span in phases}
    assert told == {
        "hash": 0.5, "queue": 0.5, "lease": 1.0, "wait": 1.0, "execution": 2.0, "handoff": 1.0,
        "hold": 2.0,
    }  # fmt: skip
    by_name = {span.name: span for span in phases}
    assert by_name["hash"].began_at == pytest.approx(request.began_at, abs=1e-6)
    assert by_name["handoff"].ended_at == pytest.approx(request.ended_at, abs=1e-6)


def test_a_failure_is_marked_and_an_unknown_parent_starts_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collect("http/protobuf") as collector:
        spans = connect(collector.url, "http/protobuf", monkeypatch)
        for headers in (None, {"traceparent": "nonsense"}):
            story = Story("r1", time.monotonic())
            story.end("timeout", time.monotonic())
            spans.record(story, headers, error="timeout")
        spans.close()
        first, second = collector.wait_for("wavepp.prefill", 2)
    assert first.is_error
    assert first.message == "timeout"
    assert first.parent_id == second.parent_id == ""
    assert first.trace_id != second.trace_id


def test_a_parent_that_is_not_sampled_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    with collect("http/protobuf") as collector:
        spans = connect(collector.url, "http/protobuf", monkeypatch)
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        spans.record(served_story(), unsampled, error="")
        spans.record(served_story(), None, error="")
        spans.close()
        collector.wait_for("wavepp.prefill")
    assert TRACE not in {span.trace_id for span in collector.spans}


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_collector_that_is_away_holds_nothing_up(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collect(protocol) as collector:
        url = collector.url
    spans = connect(url, protocol, monkeypatch)  # nobody listens there any more
    began = time.monotonic()
    spans.record(served_story(), HEADERS, error="")
    assert time.monotonic() - began < 1
    sending = asyncio.ensure_future(asyncio.to_thread(spans.close))
    _, unsent = await asyncio.wait([sending], timeout=0.1)
    assert unsent, "it tries again"
    spans.give_up()
    await asyncio.wait_for(sending, 5)


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORT_ENABLED": "0", "OTEL_SERVICE_NAME": "a"}, False),
        ({"OTEL_EXPORT_ENABLED": "1"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORT_ENABLED": "1", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_traces_are_off_unless_asked_for(environment: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environment) is wanted
    if not wanted:
        assert spans_from_environment(environment) is None


def test_a_protocol_that_does_not_exist_is_refused() -> None:
    environment = {"OTEL_EXPORT_ENABLED": "1", "OTEL_EXPORTER_OTLP_PROTOCOL": "pigeon"}
    with pytest.raises(ConfigError, match="pigeon"):
        spans_from_environment(environment)


def test_without_the_packages_the_worker_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> ModuleType:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return importlib.import_module(name)

    monkeypatch.setattr(spans_module, "importlib", type("I", (), {"import_module": missing}))
    monkeypatch.setattr(logging.getLogger(spans_module.__name__), "disabled", False)
    with caplog.at_level(logging.WARNING, spans_module.__name__):
        assert spans_from_environment({"OTEL_EXPORT_ENABLED": "1"}) is None
    (line,) = caplog.messages
    assert "wavepp-worker[otel]" in line
