"""Messages of the wave plane (LOOP to LOOP), ahead of the activations.  [algorithms 12.2]

LOOP0 sends headers and releases directly to every rank, itself included, in one FIFO per rank.
The last LOOP sends results to LOOP0 in wave order.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.codec import Codec

SPAN_FIRST = 1
SPAN_LAST = 2
SPAN_SNAPSHOT = 4


class SpanEntry(Struct, array_like=True, frozen=True):
    """One request's part of a wave: tokens [start, start + length)."""

    rid: int
    ino: int
    start: int
    length: int
    flags: int = 0


class WaveHeader(Struct, array_like=True, frozen=True, tag="wave"):
    """What the next wave contains."""

    epoch: int
    wave: int
    tokens: int
    budget: int
    spans: tuple[SpanEntry, ...]


class Release(Struct, array_like=True, frozen=True, tag="release"):
    """Cancelled: no span of `rid` follows in this FIFO."""

    epoch: int
    rid: int
    ino: int


class FirstToken(Struct, array_like=True, frozen=True):
    """The last stage's answer for a request whose last span was in the wave."""

    rid: int
    token: int
    logprob: float


class WaveResult(Struct, array_like=True, frozen=True, tag="result"):
    """Last LOOP to LOOP0, after the fence, in wave order.  A nonempty `error` is fatal."""

    epoch: int
    wave: int
    first_tokens: tuple[FirstToken, ...] = ()
    error: str = ""


WaveMessage = WaveHeader | Release | WaveResult
WAVES: Codec[WaveMessage] = Codec(WaveMessage)
