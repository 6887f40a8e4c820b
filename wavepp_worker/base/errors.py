"""The error tree.

Three kinds are never mixed.  An *outcome* (a shortfall, a lower endpoint) is a value, not an
exception.  An *operating error* means the world failed and derives from `WavePPError`.  An
*invariant error* means that this program is wrong: nobody catches it, the rank stops and the
worker fails as a unit.
"""

from __future__ import annotations


class WavePPError(Exception):
    """Base of all operating errors."""


class ConfigError(WavePPError):
    """Configuration or model folder cannot be used; the message names the path in the file."""


class RequestError(WavePPError):
    """One request cannot be served and its sender is at fault; nothing else is affected.

    Attributes:
        code: short machine-readable reason, e.g. `prompt_too_long`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class OverloadedError(WavePPError):
    """The worker's bounded queues are full; the client may retry later."""


class RequestCancelledError(WavePPError):
    """The client gave up on a request."""


class PeerError(WavePPError):
    """A rank, or a process of a rank, is gone or silent: the worker fails as a unit."""


class TransferError(WavePPError):
    """One hand-off failed (refused, expired, peer gone); the request may be computed again."""


class DeviceError(WavePPError):
    """A forward or a copy failed on a device: the worker fails as a unit."""


class InvariantError(AssertionError):
    """The program is wrong.  Stop the rank; never catch this except at a process's top."""


def check(condition: bool, message: str, **facts: object) -> None:
    """Raise `InvariantError` unless `condition` holds; `facts` are appended as key=value.

    Unlike `assert` it survives `python -O`.
    """
    if not condition:
        detail = " ".join(f"{key}={value!r}" for key, value in facts.items())
        raise InvariantError(f"{message} {detail}".rstrip())


def describe(error: BaseException) -> str:
    """Return one readable line: our own errors as they are, others with their type."""
    text = " ".join(str(error).split())
    if isinstance(error, WavePPError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
