"""P LoopMachines with delayed messages, asynchronous devices, cancels and reused slots.

Slots hold digests of exactly the prefix that was computed into them, and every stage chains its
digests from what it finds in its slots: a wave that runs too early, twice or on foreign slots
gives a wrong first token or a wrong hand-off.  [I34, I38, I41, I42, I46, I47, I48]
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from dataclasses import dataclass, field

import pytest

from wavepp_worker.base.types import Epoch, Instant, Rank
from wavepp_worker.executor.commands import (
    DropHold,
    LoopCommand,
    OpenHold,
    RunCopies,
    RunWave,
    SendResult,
    SendToFollowers,
    ToServing,
    ToWave,
)
from wavepp_worker.executor.events import HoldEnded, LoopEvent, Tick
from wavepp_worker.executor.loop import LoopMachine, LoopSettings
from wavepp_worker.executor.ports import WaveFenced
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.wire.mailbox import Copy, Drop, Freed, Install, WaveDone

B, M, K, SLOTS = 4, 16, 3, 24
STEPS_MAX = 60_000


def chain(before: str, tokens: bytes) -> str:
    return hashlib.sha256(before.encode() + tokens).hexdigest()[:16]


def block_digests(tokens: bytes) -> list[str]:
    """Digest of each block of a prompt, the last possibly partial one included."""
    digests, last = [], ""
    for at in range(0, len(tokens), 4 * B):
        last = chain(last, tokens[at : at + 4 * B])
        digests.append(last)
    return digests


def first_token(digest: str) -> int:
    return int(digest[:6], 16)


@dataclass
class Request:
    rid: int
    tokens: bytes
    endpoint: int
    ino: int = 0
    is_dropped: bool = False
    answers: list[int] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.tokens) // 4


class Device:
    """One stage: copies in order beside waves in order, activations from the stage before, fences
    later.
    """

    def __init__(self, rank: int, stages: int, rng: random.Random, world: World) -> None:
        self.rank, self.is_last, self.rng, self.world = rank, rank == stages - 1, rng, world
        self.slots: dict[int, str] = {}
        self.waves: deque[RunWave] = deque()
        self.batches: deque[RunCopies] = deque()
        self.batches_done = 0
        self.inbox: deque[tuple[int, list[bytes]]] = deque()  # activations: wave, tokens per chunk
        self.fences: deque[WaveFenced] = deque()
        self.copies_done = 0

    def rids_in_flight(self) -> set[int]:
        waves = {fence.wave for fence in self.fences}
        queued = {chunk.rid for run in self.waves for chunk in run.chunks}
        return queued | {rid for wave in waves for rid in self.world.rids_of_wave[wave]}

    def can_step(self) -> bool:
        return bool(self.batches) or self._can_run()

    def _can_run(self) -> bool:
        if not self.waves or self.waves[0].copies_before > self.batches_done:
            return False
        return self.rank == 0 or bool(self.inbox)

    def step(self) -> None:
        if self.batches and not (self._can_run() and self.rng.random() < 0.5):
            for copy in self.batches.popleft().copies:
                self.slots[copy.target] = self.world.host[copy.source]
                self.copies_done += 1
            self.batches_done += 1
            return
        job = self.waves.popleft()
        tokens = [chunk.tokens for chunk in job.chunks]
        if self.rank > 0:
            wave, tokens = self.inbox.popleft()
            assert wave == job.wave
        answers = []
        for chunk, part in zip(job.chunks, tokens, strict=True):
            assert len(part) == 4 * chunk.length
            assert chunk.start % B == 0
            first = chunk.start // B
            last = self.slots[chunk.tables[0][first - 1]] if first else ""
            for index, at in enumerate(range(0, len(part), 4 * B)):
                last = chain(last, part[at : at + 4 * B])
                self.slots[chunk.tables[0][first + index]] = last
            if chunk.wants_token:
                answers.append((chunk.rid, first_token(last), -1.0))
        self.fences.append(WaveFenced(job.wave, tuple(answers)))
        if not self.is_last:
            self.world.devices[self.rank + 1].inbox.append((job.wave, tokens))


class World:
    """All ranks, a scripted WAVE of each, and one random order of everything."""

    def __init__(self, seed: int, stages: int, request_count: int) -> None:
        self.rng = random.Random(seed)
        self.stages = stages
        self.host: dict[int, str] = {}  # host tier, the same on every stage here
        self.rids_of_wave: dict[int, set[int]] = {}
        self.devices = [Device(rank, stages, self.rng, self) for rank in range(stages)]
        self.machines = [self._machine(rank) for rank in range(stages)]
        self.to_loop: list[deque[Install | Drop]] = [deque() for _ in range(stages)]
        self.headers: list[deque[LoopEvent]] = [deque() for _ in range(stages)]
        self.results: deque[LoopEvent] = deque()
        self.to_wave: list[deque[WaveDone | Freed]] = [deque() for _ in range(stages)]
        self.holds: list[dict[int, OpenHold]] = [{} for _ in range(stages)]
        self.free = [list(range(SLOTS)) for _ in range(stages)]
        self.owned: list[dict[int, tuple[int, ...]]] = [{} for _ in range(stages)]
        self.ends: list[dict[int, int]] = [{} for _ in range(stages)]
        self.freed: list[list[int]] = [[] for _ in range(stages)]
        self.transfers = 0
        self.copies_sent = [0] * stages
        self.requests = {rid: self._request(rid) for rid in range(1, request_count + 1)}
        self.waiting = deque(self.requests.values())
        self.ino = 0
        self.now = 0.0

    def _machine(self, rank: int) -> LoopMachine:
        settings = LoopSettings(
            rank=Rank(rank),
            stages=self.stages,
            epoch=Epoch(1),
            block_tokens=B,
            ring_waves=2 * self.stages,
            admit_timeout_s=1e9,
            stall_timeout_s=1e9,
        )
        return LoopMachine(settings, GreedyPlanner(M, K, B) if rank == 0 else None)

    def _request(self, rid: int) -> Request:
        n = self.rng.choice((1, 3, 4, 5, 17, 30, 44))
        tokens = struct.pack(f"<{n}I", *(self.rng.randrange(1000) for _ in range(n)))
        return Request(rid, tokens, B * self.rng.randint(0, (n - 1) // B))

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        for _ in range(STEPS_MAX):
            steps = self._steps()
            if not steps and not self._wake_leader():
                break
            if not steps:
                continue
            self.now += 0.001
            self.rng.choice(steps)()
        else:
            pytest.fail("the world does not come to rest")
        self._check_rest()

    def _wake_leader(self) -> bool:
        """Give rank 0 the Tick that chance withheld; return whether it had something to plan."""
        commands = self.machines[0].handle(Tick(), Instant(self.now))
        self._perform(0, commands)
        return bool(commands)

    def _steps(self) -> list:  # type: ignore[type-arg]
        steps = []
        if self.waiting and self._fits(self.waiting[0]):
            steps.append(self._admit)
        cancellable = [r for r in self.requests.values() if r.ino and not r.is_dropped]
        if cancellable and self.rng.random() < 0.02:
            steps.append(lambda: self._drop(self.rng.choice(cancellable)))
        for rank in range(self.stages):
            device = self.devices[rank]
            if self.to_loop[rank]:
                steps.append(lambda r=rank: self._feed(r, self.to_loop[r].popleft()))
            if self.headers[rank]:
                steps.append(lambda r=rank: self._feed(r, self.headers[r].popleft()))
            if device.can_step():
                steps.append(device.step)
            if device.fences:
                steps.append(lambda r=rank: self._feed(r, self.devices[r].fences.popleft()))
            if self.to_wave[rank]:
                steps.append(lambda r=rank: self._take_report(r, self.to_wave[r].popleft()))
            if self.holds[rank]:
                steps.append(lambda r=rank: self._end_hold(r))
        if self.results:
            steps.append(lambda: self._feed(0, self.results.popleft()))
        return steps

    def _fits(self, request: Request) -> bool:
        return all(len(free) >= -(-request.n // B) for free in self.free)

    def _admit(self) -> None:
        request = self.waiting.popleft()
        self.ino += 1
        request.ino = self.ino
        digests = block_digests(request.tokens)
        reused = request.endpoint // B
        sources = []
        for digest in digests[:reused]:
            sources.append(len(self.host))
            self.host[len(self.host)] = digest
        for rank in range(self.stages):
            self.rng.shuffle(self.free[rank])
            table = tuple(self.free[rank].pop() for _ in digests)
            copies = tuple(
                Copy("onboard", 0, source, slot)
                for source, slot in zip(sources, table, strict=False)
            )
            self.copies_sent[rank] += len(copies)
            self.owned[rank][request.rid] = table
            self.to_loop[rank].append(
                Install(
                    request.ino,
                    request.rid,
                    request.n,
                    request.endpoint,
                    (table,),
                    copies,
                    tokens=request.tokens if rank == 0 else b"",
                )
            )

    def _drop(self, request: Request) -> None:
        request.is_dropped = True
        self.to_loop[0].append(Drop(request.rid, request.ino))

    def _end_hold(self, rank: int) -> None:
        rid = self.rng.choice(list(self.holds[rank]))
        hold = self.holds[rank].pop(rid)
        digests = block_digests(self.requests[rid].tokens)
        assert hold.tokens == self.requests[rid].n
        assert [self.devices[rank].slots[slot] for slot in hold.tables[0]] == digests
        self.transfers += 1
        self._feed(rank, HoldEnded(rid))

    def _feed(self, rank: int, event: LoopEvent) -> None:
        machine, now = self.machines[rank], Instant(self.now)
        self._perform(rank, machine.handle(event, now))
        if self.rng.random() < 0.7:
            self._perform(rank, machine.handle(Tick(), now))
        machine.check_invariants()
        assert self.machines[0].stats()["wavepp_ring_waves"] <= 2 * self.stages

    def _perform(self, rank: int, commands: list[LoopCommand]) -> None:
        device = self.devices[rank]
        for command in commands:
            match command:
                case RunWave():
                    rids = {chunk.rid for chunk in command.chunks}
                    assert self.rids_of_wave.setdefault(command.wave, rids) == rids
                    device.waves.append(command)
                case RunCopies():
                    device.batches.append(command)
                case SendToFollowers():
                    for follower in range(1, self.stages):
                        self.headers[follower].append(command.message)
                case SendResult():
                    self.results.append(command.result)
                case OpenHold():
                    assert command.rid not in self.holds[rank]
                    self.holds[rank][command.rid] = command
                case DropHold():
                    assert command.rid in self.holds[rank]  # ended later, by _end_hold
                case ToServing():
                    request = self.requests[command.message.rid]
                    assert command.message.endpoint == request.endpoint
                    request.answers.append(command.message.token)
                case ToWave():
                    if isinstance(command.message, Freed):
                        rid = command.message.rid
                        assert rid not in device.rids_in_flight()
                        assert rid not in self.holds[rank]
                    self.to_wave[rank].append(command.message)

    def _take_report(self, rank: int, message: WaveDone | Freed) -> None:
        if isinstance(message, WaveDone):
            for rid, end in message.ends:
                assert rid in self.owned[rank], "WaveDone after Freed"
                assert end > self.ends[rank].get(rid, self.requests[rid].endpoint)
                self.ends[rank][rid] = end
            return
        self.freed[rank].append(message.rid)
        self.free[rank].extend(self.owned[rank].pop(message.rid))

    def _check_rest(self) -> None:
        for machine in self.machines:
            assert machine.is_idle
        rids = sorted(self.requests)
        for rank in range(self.stages):
            assert sorted(self.freed[rank]) == rids
            assert sorted(self.free[rank]) == list(range(SLOTS))
            assert self.devices[rank].copies_done == self.copies_sent[rank]
            assert not self.devices[rank].inbox
        for request in self.requests.values():
            expected = first_token(block_digests(request.tokens)[-1])
            if request.is_dropped:
                assert request.answers in ([], [expected])
            else:
                assert request.answers == [expected]
                assert all(ends[request.rid] == request.n for ends in self.ends)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_once_everywhere_with_the_right_token(seed: int, stages: int) -> None:
    world = World(seed, stages, request_count=20)
    world.run()
    assert world.transfers > 0
