"""One stage's side of push hand-offs: events in, commands out.  Pure.

    registration ──┐
                   ├─▶ both there, decode connected ──▶ Write ──▶ done ──▶ Release
    prompt stored ─┘
         either waits for the other until its own deadline

Decode has no generation check: bytes that arrive after it gave its blocks to another request would
corrupt that one.  So a registration is trusted for `registration_s` from its receipt: afterwards no
write is begun, and one under way is aborted.  Decode goes on after a *count* of notices, so every
registration gets at most one write: two of one stage would count for a stage that never wrote.

A prompt's slots are released exactly once, and never while a write may read them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from msgspec import Struct

from wavepp_worker.base.errors import TransferError, check
from wavepp_worker.vllm_decode.protocol import (
    PushRegistration,
    completion_notice,
    pair_blocks,
    producer_request_id,
)


class Outcome(StrEnum):
    """Why a prompt's slots were released."""

    WRITTEN = "written"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REPLACED = "replaced"
    CROWDED_OUT = "crowded_out"


# ── events ───────────────────────────────────────────────────────────────────────────────────


class PromptStored(Struct, frozen=True):
    """The prompt's cache is complete on this stage; its slots stay until `Release`."""

    rid: int
    request_id: str  # as decode knows it, without its suffix
    block_ids: tuple[int, ...]


class Registered(Struct, frozen=True):
    """A registration arrived."""

    registration: PushRegistration


class PeerConnected(Struct, frozen=True):
    """Answer to `Connect`: decode's metadata are loaded."""

    engine_id: str
    block_count: int


class PeerLost(Struct, frozen=True):
    """Answer to `Connect`, or later: decode cannot be reached.  Writes end by `WriteEnded`."""

    engine_id: str


class WriteEnded(Struct, frozen=True):
    """Answer to `Write`: the memory of both sides is no longer touched."""

    rid: int
    is_done: bool


class Cancelled(Struct, frozen=True):
    """Nobody waits for the request any more."""

    rid: int


class TimePassed(Struct, frozen=True):
    """A deadline may have come."""


Event = PromptStored | Registered | PeerConnected | PeerLost | WriteEnded | Cancelled | TimePassed


# ── commands ─────────────────────────────────────────────────────────────────────────────────


class Connect(Struct, frozen=True):
    """Fetch decode's metadata and load them; `PeerConnected` or `PeerLost` follows."""

    engine_id: str
    host: str
    port: int


class Disconnect(Struct, frozen=True):
    """Forget a decode engine's metadata; nothing is written to it."""

    engine_id: str


class Write(Struct, frozen=True):
    """Post one WRITE with its notice; the notice alone if there are no pairs."""

    rid: int
    engine_id: str
    pairs: tuple[tuple[int, int], ...]  # (our block, decode's block)
    notice: bytes


class AbortWrite(Struct, frozen=True):
    """Stop a posted WRITE; `WriteEnded` follows once it is quiet."""

    rid: int


class Release(Struct, frozen=True):
    """The prompt's slots may be used again."""

    rid: int
    outcome: Outcome


class Dropped(Struct, frozen=True):
    """A registration will not be served; decode's own deadline ends its request."""

    request_id: str  # decode's, in full
    reason: str


Command = Connect | Disconnect | Write | AbortWrite | Release | Dropped


class PushSettings(Struct, frozen=True, kw_only=True):
    """Deadlines and bounds of one stage.  Seconds."""

    engine_id: str  # ours
    stages: int
    hold_s: float  # a stored prompt waits so long for its registration
    registration_s: float  # decode's blocks are trusted so long; below decode's own deadline
    prompts_max: int = 1024
    registrations_max: int = 1024
    peers_max: int = 256  # decode engines; a restarted one has another id
    spent_max: int = 65_536  # served or dropped registrations remembered, against repetition


@dataclass(slots=True)
class _Prompt:
    rid: int
    block_ids: tuple[int, ...]
    deadline: float
    serves: str = ""  # decode's request id; empty until its write is posted
    is_aborted: bool = False
    ended_as: Outcome = Outcome.FAILED  # if the write does not complete


@dataclass(slots=True)
class _Waiting:
    registration: PushRegistration
    deadline: float


class PushMachine:
    """Matches registrations with stored prompts.  Times never go back.

    Only `handle` changes its state.
    """

    def __init__(self, settings: PushSettings) -> None:
        self._settings = settings
        # Every deadline is arrival + a constant, so these two are in deadline order.
        self._stored: OrderedDict[str, _Prompt] = OrderedDict()  # by producer's request id
        self._registered: OrderedDict[str, _Waiting] = OrderedDict()  # by producer's request id
        self._writing: dict[int, _Prompt] = {}  # by rid
        self._ending_at: dict[int, float] = {}  # of writes: the registration's deadline, by rid
        self._writing_to: dict[int, str] = {}  # engine, by rid
        # In order of the last registration.  Blocks of a connected engine; None: connecting.
        self._peers: OrderedDict[str, int | None] = OrderedDict()
        self._spent: OrderedDict[str, None] = OrderedDict()  # decode's request ids
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what to do, in order."""
        if isinstance(event, WriteEnded):  # before the deadlines: what has ended is not aborted
            self._end_write(event.rid, event.is_done)
        self._expire(now)
        match event:
            case PromptStored():
                self._store(event, now)
            case Registered(registration):
                self._register(registration, now)
            case PeerConnected(engine_id, block_count):
                if engine_id in self._peers:
                    self._peers[engine_id] = block_count
                    self._match_all(engine_id)
                else:
                    self._commands.append(Disconnect(engine_id))
            case PeerLost(engine_id):
                self._lose(engine_id)
            case Cancelled(rid):
                self._cancel(rid)
            case TimePassed() | WriteEnded():
                pass
            case _:
                assert_never(event)
        commands, self._commands = self._commands, []
        return commands

    def next_deadline(self) -> float | None:
        """Return when `TimePassed` is due at the latest."""
        running = [at for rid, at in self._ending_at.items() if not self._writing[rid].is_aborted]
        waiting = [next(iter(t.values())).deadline for t in (self._stored,) if t]
        waiting += [next(iter(t.values())).deadline for t in (self._registered,) if t]
        return min(running + waiting, default=None)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the books are wrong."""
        check(self._writing.keys() == self._ending_at.keys(), "a write has a deadline")
        check(self._writing.keys() == self._writing_to.keys(), "a write has a peer")
        served = [prompt.serves for prompt in self._writing.values()]
        check(len(set(served)) == len(served) and all(served), "one write per registration")
        rids = [prompt.rid for prompt in self._stored.values()]
        check(len(set(rids)) == len(rids), "a prompt is stored once")
        check(not self._writing.keys() & set(rids), "a prompt waits or is written")
        check(len(rids) + len(self._writing) <= self._settings.prompts_max, "prompts bounded")
        check(len(self._registered) <= self._settings.registrations_max, "registrations bounded")
        check(len(self._peers) <= self._settings.peers_max, "engines bounded")
        check(len(self._spent) <= self._settings.spent_max, "memory of ids bounded")
        for waiting in self._registered.values():
            registration = waiting.registration
            check(registration.request_id not in self._spent, "a waiting one was not served")
            check(registration.decode_engine_id in self._peers, "its engine is being connected")

    def _store(self, event: PromptStored, now: float) -> None:
        check(event.rid not in self._writing, "a request is stored once", rid=event.rid)
        older = self._stored.pop(event.request_id, None)
        if older is not None:  # Dynamo migrated the request: it was computed again
            self._release(older.rid, Outcome.REPLACED)
        if len(self._stored) + len(self._writing) >= self._settings.prompts_max:
            crowded = next(iter(self._stored), None)
            if crowded is None:  # all are being written: those may not be touched
                self._release(event.rid, Outcome.CROWDED_OUT)
                return
            self._release(self._stored.pop(crowded).rid, Outcome.CROWDED_OUT)
        self._stored[event.request_id] = _Prompt(
            event.rid, event.block_ids, now + self._settings.hold_s
        )
        self._match(event.request_id)

    def _register(self, registration: PushRegistration, now: float) -> None:
        if registration.request_id in self._spent:
            return  # a repetition: its notice was sent, or it was reported as dropped
        key = producer_request_id(registration.request_id)
        reason = self._refusal(registration)
        if reason:
            self._drop(registration, reason)
            return
        older = self._registered.get(key)
        if older is not None:
            if older.registration.request_id == registration.request_id:
                return  # a repetition does not make decode's blocks any younger
            self._drop(self._registered.pop(key).registration, "replaced by a newer one")
        if len(self._registered) >= self._settings.registrations_max:
            self._drop(registration, "too many registrations wait")
            return
        if not self._connect(registration):
            self._drop(registration, "too many decode engines are in use")
            return
        self._registered[key] = _Waiting(registration, now + self._settings.registration_s)
        self._match(key)

    def _connect(self, registration: PushRegistration) -> bool:
        """Make its engine known, in place of an idle one if need be; False if none is idle."""
        engine_id = registration.decode_engine_id
        if engine_id in self._peers:
            self._peers.move_to_end(engine_id)
            return True
        if len(self._peers) >= self._settings.peers_max:
            busy = {w.registration.decode_engine_id for w in self._registered.values()}
            busy.update(self._writing_to.values())
            idle = next((peer for peer in self._peers if peer not in busy), None)
            if idle is None:
                return False
            del self._peers[idle]
            self._commands.append(Disconnect(idle))
        self._peers[engine_id] = None
        self._commands.append(
            Connect(engine_id, registration.decode_host, registration.decode_port)
        )
        return True

    def _refusal(self, registration: PushRegistration) -> str:
        settings = self._settings
        if registration.remote_engine_id != settings.engine_id:
            return f"it is for engine {registration.remote_engine_id}"
        if registration.remote_pp_size != settings.stages:
            return f"it expects {registration.remote_pp_size} stages, there are {settings.stages}"
        if registration.decode_tp_size != 1 or registration.remote_tp_size != 1:
            return "only one tensor-parallel rank is supported on either side"
        if len(registration.local_block_ids) != 1:
            return "only one cache group is supported"
        return ""

    def _match(self, key: str) -> None:
        """Begin the write of a request if everything that it needs is there."""
        prompt, waiting = self._stored.get(key), self._registered.get(key)
        if prompt is None or waiting is None:
            return
        registration = waiting.registration
        block_count = self._peers[registration.decode_engine_id]
        if block_count is None:
            return
        theirs = registration.local_block_ids[0]
        del self._registered[key]
        try:
            pairs = pair_blocks(prompt.block_ids, theirs)
        except TransferError as error:
            self._drop(registration, str(error))
            return
        if max(theirs, default=0) >= block_count:
            self._drop(registration, f"block {max(theirs)} of a pool of {block_count}")
            return
        del self._stored[key]
        self._spend(registration.request_id)
        prompt.serves = registration.request_id
        self._writing[prompt.rid] = prompt
        self._ending_at[prompt.rid] = waiting.deadline
        self._writing_to[prompt.rid] = registration.decode_engine_id
        notice = completion_notice(registration.request_id, registration.remote_tp_size)
        self._commands.append(
            Write(prompt.rid, registration.decode_engine_id, tuple(pairs), notice)
        )

    def _match_all(self, engine_id: str) -> None:
        for key in [
            key
            for key, waiting in self._registered.items()
            if waiting.registration.decode_engine_id == engine_id
        ]:
            self._match(key)

    def _lose(self, engine_id: str) -> None:
        self._peers.pop(engine_id, None)
        for key, waiting in list(self._registered.items()):
            if waiting.registration.decode_engine_id == engine_id:
                del self._registered[key]
                self._drop(waiting.registration, "decode cannot be reached")
        for rid, peer in self._writing_to.items():
            if peer == engine_id:
                self._abort(self._writing[rid], Outcome.FAILED)

    def _end_write(self, rid: int, is_done: bool) -> None:
        prompt = self._writing.pop(rid, None)
        check(prompt is not None, "a write ends once", rid=rid)
        if prompt is None:
            return
        del self._ending_at[rid], self._writing_to[rid]
        self._release(rid, Outcome.WRITTEN if is_done else prompt.ended_as)

    def _cancel(self, rid: int) -> None:
        if rid in self._writing:
            self._abort(self._writing[rid], Outcome.CANCELLED)
            return
        for key, prompt in self._stored.items():
            if prompt.rid == rid:
                del self._stored[key]
                self._release(rid, Outcome.CANCELLED)
                return

    def _abort(self, prompt: _Prompt, outcome: Outcome) -> None:
        if not prompt.is_aborted:
            prompt.is_aborted = True
            prompt.ended_as = outcome
            self._commands.append(AbortWrite(prompt.rid))

    def _expire(self, now: float) -> None:
        while self._stored and now >= next(iter(self._stored.values())).deadline:
            _, prompt = self._stored.popitem(last=False)
            self._release(prompt.rid, Outcome.EXPIRED)
        while self._registered and now >= next(iter(self._registered.values())).deadline:
            _, waiting = self._registered.popitem(last=False)
            self._drop(waiting.registration, "its prompt was not stored in time")
        for rid, ending_at in self._ending_at.items():
            if now >= ending_at:
                self._abort(self._writing[rid], Outcome.EXPIRED)

    def _drop(self, registration: PushRegistration, reason: str) -> None:
        self._spend(registration.request_id)
        self._commands.append(Dropped(registration.request_id, reason))

    def _spend(self, request_id: str) -> None:
        self._spent[request_id] = None
        if len(self._spent) > self._settings.spent_max:
            self._spent.popitem(last=False)

    def _release(self, rid: int, outcome: Outcome) -> None:
        self._commands.append(Release(rid, outcome))
