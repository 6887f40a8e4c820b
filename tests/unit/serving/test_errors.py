"""Each kind of error has its place in Dynamo."""

from __future__ import annotations

import pytest
from dynamo.llm.exceptions import (
    Cancelled,
    Disconnected,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
)

from wavepp_worker.base.errors import (
    ConfigError,
    DeviceError,
    OverloadedError,
    PeerError,
    RequestCancelledError,
    RequestError,
    TransferError,
    WavePPError,
)
from wavepp_worker.serving.errors import RequestTimeoutError, error_code, to_dynamo

CASES = [
    (RequestError("empty_prompt", "text"), InvalidArgument, "empty_prompt"),
    (OverloadedError("text"), HttpError, "overloaded"),
    (RequestTimeoutError("text"), HttpError, "timeout"),
    (RequestCancelledError("text"), Cancelled, "cancelled"),
    (TransferError("text"), Disconnected, "transfer"),
    (PeerError("text"), EngineShutdown, "worker_failed"),
    (DeviceError("text"), EngineShutdown, "worker_failed"),
    (ConfigError("text"), Unknown, "internal"),
]


@pytest.mark.parametrize(("ours", "theirs", "code"), CASES, ids=lambda v: type(v).__name__)
def test_mapping(ours: WavePPError, theirs: type[Exception], code: str) -> None:
    mapped = to_dynamo(ours)
    assert type(mapped) is theirs
    assert "text" in str(mapped)
    assert error_code(ours) == code


def test_http_codes() -> None:
    assert to_dynamo(OverloadedError("x")).code == 429  # type: ignore[attr-defined]
    assert to_dynamo(RequestTimeoutError("x")).code == 504  # type: ignore[attr-defined]
