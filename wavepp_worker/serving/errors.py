"""Our errors → Dynamo's exceptions.  The only place that knows what Dynamo does with each.

    RequestError           InvalidArgument   HTTP 400 with our text, never retried
    OverloadedError        HttpError 429     the client may retry later
    RequestTimeoutError    HttpError 504     a retry elsewhere would wait as long again
    RequestCancelledError  Cancelled         HTTP 499
    TransferError          Disconnected      migrated; this worker stays in rotation
    PeerError, DeviceError EngineShutdown    migrated; this worker leaves the rotation at once

"Migrated": Dynamo's frontend sends the request to another worker when `--migration-limit` allows.
Verified for 1.6.1 with two workers: after `EngineShutdown` the failing worker got no further
request, after `Disconnected` it went on getting its share.
"""

from __future__ import annotations

from collections.abc import Callable

from dynamo.llm.exceptions import (
    Cancelled,
    Disconnected,
    EngineShutdown,
    HttpError,
    InvalidArgument,
    Unknown,
)

from wavepp_worker.base.errors import (
    DeviceError,
    OverloadedError,
    PeerError,
    RequestCancelledError,
    RequestError,
    TransferError,
    WavePPError,
)


class RequestTimeoutError(WavePPError):
    """A request was not served within `serving.request_timeout_s`."""


# (ours, code for logs and metrics, Dynamo's); no class here is a base of another.
_KINDS: tuple[tuple[type[WavePPError], str, Callable[[str], Exception]], ...] = (
    (RequestError, "bad_request", InvalidArgument),
    (OverloadedError, "overloaded", lambda text: HttpError(429, text)),
    (RequestTimeoutError, "timeout", lambda text: HttpError(504, text)),
    (RequestCancelledError, "cancelled", Cancelled),
    (TransferError, "transfer", Disconnected),
    (PeerError, "worker_failed", EngineShutdown),
    (DeviceError, "worker_failed", EngineShutdown),
)


def to_dynamo(error: WavePPError) -> Exception:
    """Return the exception to raise from `generate` for `error`."""
    for kind, _, make in _KINDS:
        if isinstance(error, kind):
            return make(str(error))
    unknown: Exception = Unknown(str(error))
    return unknown


def error_code(error: WavePPError) -> str:
    """Return a short reason for logs and metrics, from a small closed set."""
    if isinstance(error, RequestError):
        return error.code
    return next((code for kind, code, _ in _KINDS if isinstance(error, kind)), "internal")
