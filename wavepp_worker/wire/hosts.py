"""Messages between the hosts of one worker: one JSON object a line on one TCP connection a host.

other host ── Join, Beat, Lost ──────────────▶ first host
first host ── Welcome or Refused, Beat, End ─▶ other host
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import PeerError

LINE_BYTES_MAX: Final = 16 << 10


class Join(Struct, frozen=True, tag="join"):
    """A host offers to run `ranks`."""

    group: str
    epoch: int  # the life it means to join; 0: the one that runs
    ranks: tuple[int, ...]
    host: str  # its cluster.host
    digests: dict[str, str]  # as `shared_digests` returns them


class Welcome(Struct, frozen=True, tag="welcome"):
    """The host is in: what its ranks have to know."""

    epoch: int
    namespace: str  # Dynamo namespace
    report_address: str  # ZeroMQ endpoint of serving's PULL socket


class Refused(Struct, frozen=True, tag="refused"):
    """The host is not let in."""

    reason: str


class Beat(Struct, frozen=True, tag="beat"):
    """The sender is alive."""


class Lost(Struct, frozen=True, tag="lost"):
    """The sender's ranks are ending: the worker fails as a unit."""

    reason: str


class End(Struct, frozen=True, tag="end"):
    """The worker ends, in order unless it `failed`."""

    reason: str
    failed: bool


HostMessage = Join | Welcome | Refused | Beat | Lost | End
REASON_CHARS_MAX: Final = 2000  # escapes make a character at most six bytes

_decoder: msgspec.json.Decoder[HostMessage] = msgspec.json.Decoder(HostMessage)


def encode_line(message: HostMessage) -> bytes:
    """Return `message` as one line."""
    line = msgspec.json.encode(message) + b"\n"
    if len(line) > LINE_BYTES_MAX:
        raise PeerError(f"message of {len(line)} bytes exceeds {LINE_BYTES_MAX}")
    return line


def decode_line(line: bytes) -> HostMessage:
    """Return the message in `line`; PeerError if it is none."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(f"not a message between hosts: {error}") from error
