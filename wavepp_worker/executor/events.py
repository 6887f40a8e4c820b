"""Inputs of the LoopMachine.  Most are messages of the wire, taken as they come."""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.executor.ports import WaveFenced
from wavepp_worker.wire.mailbox import Admitting, Drop, Install, Refused, Waiting
from wavepp_worker.wire.waves import Release, WaveHeader, WaveResult


class HoldEnded(Struct, frozen=True):
    """The reader is done with a held request, or its hold ran out or was dropped."""

    rid: int


class Tick(Struct, frozen=True):
    """Everything that had arrived was handed in: plan, and look at the alarms.

    The driver sends one after each batch of events, so that requests that arrived together can
    share a wave, and one when `next_deadline` comes.
    """


LoopEvent = (
    Install
    | Drop
    | Admitting
    | Waiting
    | Refused
    | WaveHeader
    | Release
    | WaveResult
    | WaveFenced
    | HoldEnded
    | Tick
)
