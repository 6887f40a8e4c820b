"""A worker of four real processes on two ranks, with digests instead of a model.

    test ── ToyWorker ── FrontDoor, RankSupervisor ──▶ WAVE0, WAVE1  production, Dynamo discovery
                    └── reads every hand-off ────────▶ LOOP0, LOOP1  production, digest stages

`ToyWorker` plays the serving process and the decode worker: it announces, cancels, reads what
each stage holds and compares it with what a cold, lonely run of the prompt leaves there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import zmq
import zmq.asyncio

from tests.integration.toy_processes import DEADLINE_S, POLL_S, is_alive, poll_until
from tests.integration.toy_setup import BLOCK, FACTS, pack
from tests.integration.toy_wire import (
    ANSWERS,
    QUESTIONS,
    SPEC_VARIABLE,
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
    ToySpec,
    desk_address,
    save_spec,
)
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import Config
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.supervisor import ROLES, RankSupervisor
from wavepp_worker.sim.digest import answer_of, reference
from wavepp_worker.wire.mailbox import (
    Announce,
    CacheView,
    Fatal,
    Finished,
    Gone,
    Ready,
    Rejected,
    ReportMessage,
    StageHandoff,
    Stats,
    WorkerReady,
)

REPOSITORY = Path(__file__).resolve().parents[2]
TOY_ROLES = {"wave": "tests.integration.toy_wave", "loop": "tests.integration.digest_loop"}


@dataclass
class Request:
    """What the serving process knows of one request."""

    rid: int
    prompt: tuple[int, ...]
    stages: int
    finished: Finished | None = None
    handoffs: dict[int, StageHandoff] = field(default_factory=dict)
    is_cancelled: bool = False
    is_gone: bool = False
    rejected: Rejected | None = None

    @property
    def is_complete(self) -> bool:
        return self.finished is not None and len(self.handoffs) == self.stages


class ToyWorker:
    """One life of a worker, seen from the serving process."""

    def __init__(self, config: Config, spec: ToySpec) -> None:
        plan = derive(config, FACTS)
        roles = TOY_ROLES if spec.touches else {**TOY_ROLES, "wave": ROLES["wave"]}
        self._stages = config.cluster.stages
        self.supervisor = RankSupervisor(config, plan, FACTS, "toy", roles=roles)
        self.front = FrontDoor(self.supervisor.run_dir, config.cluster.host)
        self.requests: dict[int, Request] = {}
        self.fatals: list[Fatal] = []
        self.is_ready = False
        self.report_count = 0
        self._views: dict[int, dict[int, CacheView]] = {}
        self._stats: dict[tuple[str, int], dict[str, float]] = {}
        self._windows = [
            [
                WindowSpec(kind=window.kind, slots=window.slots, span_tokens=window.span_tokens,
                           chunk_tokens=window.chunk_tokens)  # type: ignore[arg-type]
                for window in windows
            ]
            for windows in spec.windows
        ]  # fmt: skip
        self._rids = itertools.count(1)
        self._tickets = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._desks: dict[str, tuple[zmq.asyncio.Socket, asyncio.Lock]] = {}
        self._news = asyncio.Condition()
        self._reader = asyncio.ensure_future(self._read_reports())

    # ── as the serving process ───────────────────────────────────────────────────────────────

    def announce(self, prompt: Sequence[int]) -> Request:
        """Send a request; its rid is 1, 2, ... in order."""
        request = Request(next(self._rids), tuple(prompt), self._stages)
        self.requests[request.rid] = request
        tokens = pack(prompt)
        keys = sequence_keys(tokens, BLOCK, scope_key("toy"))
        self.front.announce(Announce(request.rid, len(prompt), keys, tokens))
        return request

    def cancel(self, request: Request) -> None:
        """Give a request up; the terminal chunk has not been sent."""
        request.is_cancelled = True
        self.front.cancel(request.rid)

    async def finish(self, prompt: Sequence[int]) -> Request:
        """Send a request, read its hand-offs, check everything, and see it gone."""
        request = self.announce(prompt)
        await self.take(request)
        return request

    async def take(self, request: Request) -> None:
        """Wait for a request's answer, read and check its hand-off on every stage."""
        await self.until(lambda: request.is_complete or request.rejected, f"answer {request.rid}")
        assert not request.rejected, request.rejected
        await asyncio.gather(*(self.read(request, rank) for rank in range(self._stages)))
        self.check_answer(request)
        await self.until(lambda: request.is_gone, f"request {request.rid} gone")

    def check_answer(self, request: Request) -> None:
        assert request.finished is not None
        output, _ = self.expected(request.prompt)
        assert request.finished.token == answer_of(output), request.finished
        assert request.finished.endpoint % BLOCK == 0
        assert request.finished.endpoint < len(request.prompt)

    def expected(self, prompt: Sequence[int]) -> tuple[bytes, list[tuple[tuple[bytes, ...], ...]]]:
        return reference(self._windows, BLOCK, pack(prompt))

    async def views(self, number: int) -> list[CacheView]:
        """Return the cache view of every rank."""
        self.front.request_view(number)
        views = self._views.setdefault(number, {})
        await self.until(lambda: len(views) == self._stages, "cache views")
        return [views[rank] for rank in range(self._stages)]

    async def until_quiet(self) -> None:
        """Wait until nothing is held anywhere and every rank's books add up."""
        await self.until(
            lambda: all(r.is_gone for r in self.requests.values() if not r.rejected), "all gone"
        )
        for view in await self.views(len(self._views) + 1):
            assert (view.lease_count, view.escrow_count, view.sequence_count) == (0, 0, 0), view
            assert not any(view.referenced + view.reserved), view
            assert not any(view.host_referenced + view.host_reserved), view
            for free, cached, total in zip(view.free, view.cached, view.total, strict=True):
                assert free + cached == total, view

    def has_states(self, rank: int) -> bool:
        return any(spec.is_recurrent for spec in self._windows[rank])

    def stat(self, role: str, rank: int, name: str) -> float:
        """Return a counter of one process as last reported; 0 before that."""
        return self._stats.get((role, rank), {}).get(name, 0.0)

    # ── as a decode worker ───────────────────────────────────────────────────────────────────

    async def read(self, request: Request, rank: int) -> None:
        """Read one stage's hold twice, check it against a cold run, and end the hold."""
        ticket = f"ticket {next(self._tickets)}"
        address = request.handoffs[rank].control_address
        assert await self.ask(address, Open(request.handoffs[rank].hold, ticket)) == Done()
        expected = Content(self.expected(request.prompt)[1][rank])
        for _ in range(2):
            assert await self.ask(address, Read(ticket)) == expected, (request, rank)
        assert await self.ask(address, Close(ticket)) == Done()

    async def is_refused(self, request: Request) -> bool:
        """Return whether every stage refuses to open a request's hold."""
        answers = [
            await self.ask(handoff.control_address, Open(handoff.hold, "too late"))
            for handoff in request.handoffs.values()
        ]
        return answers == [Refused()] * self._stages

    async def ask(self, address: str, question: Question) -> Answer:
        """Put one question to a desk."""
        if address not in self._desks:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.connect(address)
            self._desks[address] = (socket, asyncio.Lock())
        socket, lock = self._desks[address]
        async with asyncio.timeout(DEADLINE_S), lock:
            await socket.send(QUESTIONS.encode(question))
            return ANSWERS.decode(await socket.recv())

    async def gate(self, rank: int, name: str, is_open: bool) -> None:
        """Open or close a gate of a stage's stream."""
        assert await self.ask(self.desk(rank), SetGate(name, is_open)) == Done()

    async def look(self, rank: int) -> Picture:
        picture = await self.ask(self.desk(rank), Look())
        assert isinstance(picture, Picture)
        return picture

    async def until_at_gate(self, rank: int, name: str) -> None:
        """Wait until a stage's thread is stopped at a gate."""
        deadline = time.monotonic() + DEADLINE_S
        while name not in (await self.look(rank)).waiting:
            assert time.monotonic() < deadline, f"nothing comes to gate {name} of stage {rank}"
            await asyncio.sleep(POLL_S)

    def desk(self, rank: int) -> str:
        return desk_address(self.supervisor.run_dir, rank)

    # ── as the one who does harm ─────────────────────────────────────────────────────────────

    def has_run_dir(self) -> bool:
        return Path(self.supervisor.run_dir).exists()

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.supervisor._children}

    async def failure(self, within_s: float) -> str:
        """Return why the worker failed; check that nothing of it is left."""
        started_at = time.monotonic()
        async with asyncio.timeout(within_s):
            reason = await asyncio.shield(self.supervisor.exited)
        left_s = within_s - (time.monotonic() - started_at)
        await poll_until(lambda: not any(map(is_alive, self.pids().values())), left_s, "all ended")
        assert not self.has_run_dir()
        assert all(child.status != 0 for child in self.supervisor._children)
        return reason

    async def until(self, is_done: Callable[[], object], what: str) -> None:
        """Wait for a report that makes `is_done` true; fail at once if the worker fails."""

        async def wait() -> None:
            async with self._news:
                await self._news.wait_for(is_done)

        waiting = asyncio.ensure_future(wait())
        try:
            await asyncio.wait(
                [waiting, self.supervisor.exited], timeout=DEADLINE_S, return_when="FIRST_COMPLETED"
            )
            assert not self.supervisor.exited.done(), self.supervisor.exited.result()
            assert waiting.done(), f"not within {DEADLINE_S} s: {what}"
        finally:
            waiting.cancel()

    async def close(self) -> None:
        self._reader.cancel()
        await self.supervisor.kill()
        self.front.close()
        self._context.destroy(linger=0)

    async def _read_reports(self) -> None:
        async for report in self.front:
            async with self._news:
                self.report_count += 1
                self._take_report(report)
                self._news.notify_all()

    def _take_report(self, report: ReportMessage) -> None:
        match report:
            case WorkerReady():
                self.is_ready = True
            case Finished(rid=rid):
                assert self.requests[rid].finished is None
                self.requests[rid].finished = report
            case Ready(rid=rid, rank=rank, handoff=handoff):
                assert rank not in self.requests[rid].handoffs
                self.requests[rid].handoffs[rank] = handoff
            case Gone(rid=rid):
                assert not self.requests[rid].is_gone
                self.requests[rid].is_gone = True
            case Rejected(rid=rid):
                self.requests[rid].rejected = report
            case Stats(rank=rank, role=role, values=values):
                self._stats[role, rank] = values
            case CacheView(rank=rank, number=number):
                self._views.setdefault(number, {})[rank] = report
            case Fatal():
                self.fatals.append(report)
                self.supervisor.note_fatal(report)


@asynccontextmanager
async def toy_worker(config: Config, spec: ToySpec, folder: Path) -> AsyncIterator[ToyWorker]:
    """Start a worker, wait until it is ready, and end it whatever happens.

    Args:
        folder: holds the worker's spec and Dynamo's discovery; a second life may use it again.
    """
    settings = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "PYTHONPATH": str(REPOSITORY),
        SPEC_VARIABLE: str(folder / "toy.json"),
    }
    save_spec(spec, folder / "toy.json")
    worker = ToyWorker(config, spec)
    try:
        with patch.dict(os.environ, settings):
            await worker.supervisor.start(worker.front.report_address)
        await worker.until(lambda: worker.is_ready, "worker ready")
        yield worker
    finally:
        await worker.close()


async def stop_in_order(worker: ToyWorker) -> None:
    """End a healthy worker; every process exits with status 0 and nothing is left."""
    worker.front.shutdown("test")
    assert await worker.supervisor.stop(grace_s=30.0)
    assert all(child.status == 0 for child in worker.supervisor._children)
    assert not worker.fatals
    assert not worker.has_run_dir()
