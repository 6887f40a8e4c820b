"""Outputs of the LoopMachine; its driver performs them in order, none of them waits."""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.wire.mailbox import Ask, Copy, Finished, Freed, StateSlots, WaveDone
from wavepp_worker.wire.waves import Release, WaveHeader, WaveResult


class SendToFollowers(Struct, frozen=True):
    """Rank 0: to every other LOOP, in the order given."""

    message: WaveHeader | Release


class SendResult(Struct, frozen=True):
    """Last rank, unless it is rank 0: to LOOP0."""

    result: WaveResult


class RunCopies(Struct, frozen=True):
    """Enqueue one Install's copies; they run in this order, beside the waves.  [algorithms 16.2]"""

    copies: tuple[Copy, ...]


class RunWave(Struct, frozen=True):
    """Enqueue on the stage's stream."""

    wave: int
    chunks: tuple[WaveChunk, ...]
    budget: int  # tokens that the planner allowed
    # As many `RunCopies`, counted from the first ever, are done before it starts; later ones, of
    # Installs that the wave does not need, may still be under way.  [I47]
    copies_before: int = 0


class OpenHold(Struct, frozen=True):
    """The prompt is complete on this stage: offer it to a reader and send `Ready`."""

    rid: int
    tables: tuple[tuple[int, ...], ...]  # per window: slot of block 0, 1, ...
    tokens: int  # prompt length
    states: tuple[StateSlots, ...] = ()  # the working state is the one after the prompt


class DropHold(Struct, frozen=True):
    """Nobody will read it; `HoldEnded` follows."""

    rid: int


class ToWave(Struct, frozen=True):
    """To this rank's WAVE."""

    message: WaveDone | Freed | Ask


class ToServing(Struct, frozen=True):
    """To the serving process."""

    message: Finished


LoopCommand = (
    SendToFollowers | SendResult | RunCopies | RunWave | OpenHold | DropHold | ToWave | ToServing
)
