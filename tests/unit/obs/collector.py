"""An OpenTelemetry collector for tests: takes OTLP over HTTP or gRPC on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

LOOPBACK = "127.0.0.1"
STATUS_ERROR = 2


class Span:
    """One received span; ids in hex, times in seconds since the epoch."""

    def __init__(self, span: Any, service: str) -> None:
        self.name: str = span.name
        self.service = service
        self.trace_id: str = span.trace_id.hex()
        self.span_id: str = span.span_id.hex()
        self.parent_id: str = span.parent_span_id.hex()
        self.began_at = span.start_time_unix_nano / 1e9
        self.ended_at = span.end_time_unix_nano / 1e9
        self.is_error = span.status.code == STATUS_ERROR
        self.message: str = span.status.message
        self.facts = {
            item.key: getattr(item.value, item.value.WhichOneof("value") or "string_value")
            for item in span.attributes
        }


class Collector:
    """What has been received so far."""

    def __init__(self) -> None:
        self.url = ""
        self.received = threading.Condition()
        self.spans: list[Span] = []

    def take(self, request: Any) -> None:
        with self.received:
            for resource in request.resource_spans:
                service = next(
                    (a.value.string_value for a in resource.resource.attributes
                     if a.key == "service.name"), "",
                )  # fmt: skip
                for scope in resource.scope_spans:
                    self.spans += [Span(span, service) for span in scope.spans]
            self.received.notify_all()

    def wait_for(self, name: str, count: int = 1, timeout_s: float = 20.0) -> list[Span]:
        """Return the spans of this name once there are `count`; fails after `timeout_s`."""
        with self.received:
            is_there = self.received.wait_for(lambda: len(self.named(name)) >= count, timeout_s)
            assert is_there, (name, [span.name for span in self.spans])
            return self.named(name)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collect(protocol: str) -> Iterator[Collector]:
    """Run a collector for "http/protobuf" or "grpc"."""
    collector = Collector()
    with _http(collector) if protocol == "http/protobuf" else _grpc(collector):
        yield collector


@contextmanager
def _http(collector: Collector) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(wire.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer((LOOPBACK, 0), Handler) as server:
        collector.url = f"http://{LOOPBACK}:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _grpc(collector: Collector) -> Iterator[None]:
    class Service(TraceServiceServicer):  # type: ignore[misc]  # generated code is untyped
        def Export(self, request: Any, context: Any) -> Any:
            collector.take(request)
            return wire.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    collector.url = f"http://{LOOPBACK}:{server.add_insecure_port(f'{LOOPBACK}:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(0).wait()
