"""What the LoopMachine's driver needs from a device: one asynchronous stream of waves.

Real adapters live in `runtime.stage_stream` (CPU thread, CUDA streams); the conformance suite in
tests/conformance runs against each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from wavepp_worker.wire.mailbox import Copy, Sampling


class ChunkState(Struct, frozen=True):
    """A recurrent window's part of a chunk; device slots of that window."""

    window: int
    working: int  # read before the chunk, advanced by it
    snapshot: int = -1  # the state after the chunk's last token is also kept here; -1: it is not


class WaveChunk(Struct, frozen=True):
    """One request's part of a wave, with everything the device needs."""

    rid: int
    start: int  # tokens before this chunk
    length: int
    # Per window: slots of blocks 0 .. ceil((start + length) / B) - 1 at least; () if recurrent.
    tables: Sequence[Sequence[int]]
    tokens: bytes = b""  # first stage: u32 little-endian, exactly this chunk
    wants_token: bool = False  # last stage, last span: sample the first answer token
    sampling: Sampling = Sampling()
    states: tuple[ChunkState, ...] = ()  # one per recurrent window


class WaveFenced(Struct, frozen=True):
    """A wave's fence passed.  `tokens` holds (rid, token, logprob) on the last stage."""

    wave: int
    tokens: tuple[tuple[int, int, float], ...] = ()
    error: str = ""


class StageStream(Protocol):
    """The device side of one rank.  All calls return at once.

    Waves run in call order and copies run in call order; between the two, `copies_before` is all
    the order there is.
    """

    def run(self, wave: int, chunks: Sequence[WaveChunk], copies_before: int) -> None:
        """Enqueue: receive the wave's activations (stage > 0), forward, send them (not last).

        Args:
            wave: its number.
            chunks: its spans.
            copies_before: calls of `copy`, from the first ever, whose result the wave sees.
        """

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue cache copies; they never wait for a wave."""

    def poll(self) -> list[WaveFenced]:
        """Return the waves whose fence passed since the last call, in wave order."""

    def fileno(self) -> int:
        """Return a descriptor that turns readable when `poll` has something; poll drains it."""

    def close(self) -> None:
        """Stop; pending waves may be lost.  Idempotent."""
