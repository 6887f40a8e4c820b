"""The hold desk of a digest stage: production lifetimes, and content over a plain socket.

It stands where `transfer.desk.HoldDesk` stands in the LOOP process, inside the poll loop.  Instead
of NIXL descriptors it hands out what the held slots contain at the moment of each `Read`, so a
test can look twice during one hold.  The same socket takes a test's wishes for the stage.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import zmq

from tests.integration.toy_stream import DigestStream, Gates
from tests.integration.toy_wire import (
    ANSWERS,
    QUESTIONS,
    Answer,
    Close,
    Content,
    Done,
    Look,
    Open,
    Picture,
    Question,
    Read,
    Refused,
    SetGate,
)
from wavepp_worker.executor.ports import ChunkState
from wavepp_worker.sim.digest import DigestStage
from wavepp_worker.transfer.holds import HoldTable, TransferHold
from wavepp_worker.transport.sockets import open_socket
from wavepp_worker.wire.mailbox import StageHandoff


class DigestDesk:
    """Answers readers; owns every hold of the stage."""

    def __init__(
        self,
        rank: int,
        context: zmq.Context[Any],
        address: str,
        holds: HoldTable,
        stage: DigestStage,
        stream: DigestStream,
        gates: Gates,
    ) -> None:
        self._rank, self._holds, self._stage, self._stream, self._gates = (
            rank, holds, stage, stream, gates
        )  # fmt: skip
        self._readers: dict[str, int] = {}  # ticket -> rid
        self._slots: dict[int, tuple[Sequence[Sequence[int]], list[int], int]] = {}
        self.socket = open_socket(context, zmq.ROUTER)
        self.socket.bind(address)
        self.address = address

    def open_hold(
        self,
        rid: int,
        tables: Sequence[Sequence[int]],
        tokens: int,
        states: Sequence[ChunkState],
        now: float,
    ) -> StageHandoff:
        name = secrets.token_urlsafe(12)
        working = [state.working for state in states]
        self._holds.offer(rid, name, (), tokens, now)
        self._slots[rid] = (tables, working, tokens)
        return StageHandoff(self._rank, (self._rank, self._rank + 1), self.address, name)

    def release(self, rid: int) -> None:
        self._holds.withdraw(rid)

    def poll(self, now: float) -> list[int]:
        while self.socket.poll(0):
            reader, frame = self.socket.recv_multipart()
            answer = self._answer(QUESTIONS.decode(frame), now)
            self.socket.send_multipart([reader, ANSWERS.encode(answer)])
        self._holds.expire(now)
        ended = self._holds.take_ended()
        for rid in ended:
            del self._slots[rid]
        return ended

    def next_deadline(self) -> float | None:
        return self._holds.next_deadline()

    def stats(self, now: float) -> dict[str, float]:
        counts = self._holds.counts
        return {
            "wavepp_holds": float(len(self._holds)),
            "wavepp_holds_read_total": float(counts.read),
            "wavepp_holds_expired_total": float(counts.expired),
            "wavepp_holds_withdrawn_total": float(counts.withdrawn),
        }

    def close(self) -> None:
        self.socket.close()

    def _answer(self, question: Question, now: float) -> Answer:
        match question:
            case Open(hold, ticket):
                opened = self._holds.open(hold, ticket, now)
                if not isinstance(opened, TransferHold):
                    return Refused()
                self._readers[ticket] = opened.rid
                return Done()
            case Read(ticket):
                return self._read(ticket, now)
            case Close(ticket):
                return Done() if self._holds.close(ticket, now) else Refused()
            case SetGate(name, is_open):
                self._gates.set(name, is_open)
                return Done()
            case Look():
                return Picture(
                    self._gates.waiting(),
                    tuple(self._stream.executed),
                    dict(self._stream.times.copied),
                )

    def _read(self, ticket: str, now: float) -> Answer:
        if not self._holds.renew(ticket, now):
            return Refused()
        tables, working, tokens = self._slots[self._readers[ticket]]
        return Content(self._stage.content(tables, working, tokens))
