"""OpenTelemetry spans of requests, children of the span that Dynamo opened for them.

    engine.generate (Dynamo's)
      └─ wavepp.prefill
           ├─ hash ── queue ── lease ── wait ── execution ── handoff
           └─ hold                             ends after its parent, when the last reader has read

Spans are made when a request is over, from the times in its story.  Those are monotonic; one
offset per request, taken when it ends, turns all of them into wall-clock time, so a step of the
clock moves a request as a whole.

Off unless Dynamo's OTEL_EXPORT_ENABLED, or the standard OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, is set.  Everything else is OpenTelemetry's own environment.
The packages are optional: `pip install 'wavepp-worker[otel]'`.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.obs.story import Phase, Story

logger = logging.getLogger(__name__)

SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SPAN_NAME = "wavepp.prefill"
SERVICE_NAME = "wavepp"
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
DEFAULT_PROTOCOL = "grpc"  # Dynamo's too


class RecordedSpan:
    """A request's span that has ended; more children may be added."""

    def __init__(self, tracer: Any, span: Any, offset_ns: int) -> None:
        self._tracer = tracer
        self._offset_ns = offset_ns
        self._context = importlib.import_module("opentelemetry.trace").set_span_in_context(span)

    def add(self, phase: Phase) -> None:
        """Add one phase."""
        began = wall_ns(phase.began_at, self._offset_ns)
        child = self._tracer.start_span(phase.name, self._context, start_time=began)
        child.end(wall_ns(phase.ended_at, self._offset_ns))


class RequestSpans:
    """Makes spans and sends them from a thread of its own.

    Args:
        processor: an OpenTelemetry span processor.
        service: name of this worker in traces.
        give_up: ends an attempt to send that is under way.
    """

    def __init__(
        self,
        processor: Any,
        service: str = SERVICE_NAME,
        give_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.give_up = give_up
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        trace = importlib.import_module("opentelemetry.trace")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._provider = sdk.TracerProvider(
            resource=resources.Resource.create({"service.name": service}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("wavepp_worker")
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._status, self._error = trace.Status, trace.StatusCode.ERROR

    def record(self, story: Story, headers: Mapping[str, str] | None, error: str) -> RecordedSpan:
        """Make the spans of a request that is over.

        Args:
            headers: W3C trace headers; without them the request is a trace of its own.
            error: code of the failure; empty: none.
        """
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            SPAN_NAME,
            self._propagator.extract(dict(headers or {})),
            start_time=wall_ns(story.began_at, offset_ns),
            attributes=_attributes(story),
        )
        if error:
            span.set_status(self._status(self._error, error))
        recorded = RecordedSpan(self._tracer, span, offset_ns)
        for phase in story.phases:
            recorded.add(phase)
        span.end(wall_ns(story.ended_at, offset_ns))
        return recorded

    def close(self) -> None:
        """Send what is queued.

        Not for the asyncio loop: it waits, and while the collector is away it tries again until
        `give_up` is called.
        """
        self._provider.shutdown()


def wall_ns(at: float, offset_ns: int) -> int:
    """Return a monotonic time in seconds as nanoseconds since the epoch."""
    return int(at * 1e9) + offset_ns


def spans_from_environment(environment: Mapping[str, str]) -> RequestSpans | None:
    """Return the exporter that the environment asks for, or None.

    Raises:
        ConfigError: OTEL_EXPORTER_OTLP_PROTOCOL is not one that OpenTelemetry's Python has.
    """
    if not is_wanted(environment):
        return None
    protocol = (
        environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or DEFAULT_PROTOCOL
    )
    if protocol not in EXPORTERS:
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: must be one of {', '.join(EXPORTERS)}"
        )
    try:
        exporter = importlib.import_module(EXPORTERS[protocol]).OTLPSpanExporter()
        export = importlib.import_module("opentelemetry.sdk.trace.export")
    except ModuleNotFoundError as error:
        logger.warning(
            "no spans: %s is not installed; pip install 'wavepp-worker[otel]'", error.name
        )
        return None
    service = environment.get("OTEL_SERVICE_NAME") or SERVICE_NAME
    return RequestSpans(export.BatchSpanProcessor(exporter), service, exporter.shutdown)


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for traces."""
    if _is_true(environment.get("OTEL_SDK_DISABLED")):
        return False
    return _is_true(environment.get("OTEL_EXPORT_ENABLED")) or any(
        environment.get(name) for name in SWITCHES
    )


def _is_true(text: str | None) -> bool:
    return (text or "").strip().lower() in {"1", "true", "yes", "on"}


def _attributes(story: Story) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "wavepp.request_id": story.request_id,
        "wavepp.outcome": story.outcome,
        "wavepp.prompt_tokens": story.prompt_tokens,
        "wavepp.expected_tokens": story.expected_tokens,
    }
    if story.endpoint is not None:
        facts["wavepp.reused_tokens"] = story.endpoint
        facts["wavepp.computed_tokens"] = story.prompt_tokens - story.endpoint
    if story.attempts:
        facts["wavepp.attempts"] = story.attempts
    return facts
