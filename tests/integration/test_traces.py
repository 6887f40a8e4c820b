"""A request's spans join the trace that Dynamo's frontend began."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.integration.deployment import decode_config, deployment, prefill_config
from tests.numerics.tiny import make_tiny_model
from tests.unit.obs.collector import Span, collect

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

CALLER, CALLER_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_our_spans_are_below_dynamos_in_the_callers_trace(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", seed=9)
    with collect("grpc") as collector:
        settings = {
            "OTEL_EXPORT_ENABLED": "1",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with deployment(tmp_path, **settings) as deploy:
            deploy.prefill(prefill_config(tmp_path / "model", 2))
            deploy.decode(decode_config(tmp_path / "model"))
            url = deploy.frontend()
            deploy.wait_for_model("tiny")
            reply = httpx.post(
                f"{url}/v1/completions",
                json={"model": "tiny", "prompt": "hello " * 40, "max_tokens": 4},
                headers={"traceparent": f"00-{CALLER}-{CALLER_SPAN}-01"},
                timeout=60,
            )
            assert reply.status_code == 200
            prompt_tokens = reply.json()["usage"]["prompt_tokens"]
        spans = {span.span_id: span for span in collector.spans if span.trace_id == CALLER}

    def path(span: Span) -> list[str]:
        above = spans.get(span.parent_id)
        return [span.name] if above is None else [*path(above), span.name]

    (request,) = [span for span in spans.values() if span.name == "wavepp.prefill"]
    way = path(request)
    assert way[0] == "http-request", "the frontend's own span"
    assert way[-2:] == ["engine.generate", "wavepp.prefill"]
    assert request.facts["wavepp.prompt_tokens"] == prompt_tokens
    phases = {span.name: span for span in spans.values() if span.parent_id == request.span_id}
    assert {"hash", "queue", "wait", "execution", "handoff", "hold"} <= set(phases)
    # The clocks are the same: our span lies within Dynamo's that waited for it.
    frontend = next(span for span in spans.values() if span.name == "http-request")
    slack_s = 0.005
    assert frontend.began_at - slack_s <= request.began_at
    assert request.ended_at <= frontend.ended_at + slack_s
