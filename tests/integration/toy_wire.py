"""What a digest worker is told at its start, and what its readers and tests say to its desks."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from wavepp_worker.wire.codec import Codec
from wavepp_worker.wire.mailbox import WindowReport

SPEC_VARIABLE = "WAVEPP_TOY"


class Touch(Struct, frozen=True, kw_only=True):
    """What happens to a WAVE process at one kind of frame on its rounds link.

    way     "send" or "receive"
    frame   "announce", "LEASE", "TRIM", "COMMIT", "RELEASE": a broadcast that carries one;
            "PREPARED", "COMMITTED", ...: a vote with that status;  "gathered";  "any"
    action  "stop": the process stops itself (SIGSTOP) before the frame;  "drop": it never
            arrives;  "repeat": it arrives twice;  "slow": `delay_s` pass first
    """

    rank: int
    way: str
    frame: str
    action: str
    rid: int = 0  # only frames about this request; 0: all
    times: int = 1  # then no more; 0: every time
    delay_s: float = 0.0


class ToySpec(Struct, frozen=True, kw_only=True):
    """The part of a digest worker that is not in the production configuration."""

    windows: tuple[tuple[WindowReport, ...], ...]  # per rank
    delays_s: dict[str, float] = {}  # "wave0", "copy1", ...: how long each such step takes
    touches: tuple[Touch, ...] = ()
    lost_waves: tuple[int, ...] = ()  # headers that LOOP0 never sends
    broken_waves: dict[int, int] = {}  # rank -> wave at which its stage raises


def save_spec(spec: ToySpec, path: Path) -> None:
    """Write the spec where the worker's processes find it by `SPEC_VARIABLE`."""
    path.write_bytes(msgspec.json.encode(spec))


def load_spec() -> ToySpec:
    """Return the spec of this process's worker."""
    return msgspec.json.decode(Path(os.environ[SPEC_VARIABLE]).read_bytes(), type=ToySpec)


def desk_address(run_dir: str, rank: int) -> str:
    """Return where a stage's desk listens."""
    return f"ipc://{run_dir}/desk{rank}"


# ── readers and tests → desk ─────────────────────────────────────────────────────────────────


class Open(Struct, array_like=True, frozen=True, tag="open"):
    """Start reading a hold."""

    hold: str
    ticket: str


class Read(Struct, array_like=True, frozen=True, tag="read"):
    """Return what the held slots contain now."""

    ticket: str


class Close(Struct, array_like=True, frozen=True, tag="close"):
    """The read is over; the hold ends."""

    ticket: str


class SetGate(Struct, array_like=True, frozen=True, tag="gate"):
    """Stop the stage before its next wave or copy batch, or let it go on."""

    name: str  # "wave" | "copy"
    is_open: bool


class Look(Struct, array_like=True, frozen=True, tag="look"):
    """Ask for a `Picture`."""


# ── desk → readers and tests ─────────────────────────────────────────────────────────────────


class Done(Struct, array_like=True, frozen=True, tag="done"):
    """It is so.  To `Close`: the slots were held until now.  [A54]"""


class Refused(Struct, array_like=True, frozen=True, tag="refused"):
    """The hold is unknown, was opened before or has ended."""


class Content(Struct, array_like=True, frozen=True, tag="content"):
    """Per window of the stage: digests in the order of the prompt, or the one state."""

    windows: tuple[tuple[bytes, ...], ...]


class Picture(Struct, array_like=True, frozen=True, tag="picture"):
    """What a stage has done."""

    waiting: dict[str, int]  # gate -> number of the wave or copy batch stopped there
    executed: tuple[tuple[int, int, int, int], ...]  # (wave, rid, start, length) in order
    copied: dict[str, int]  # kind -> copies performed


Question = Open | Read | Close | SetGate | Look
Answer = Done | Refused | Content | Picture
QUESTIONS: Codec[Question] = Codec(Question)
ANSWERS: Codec[Answer] = Codec(Answer)
