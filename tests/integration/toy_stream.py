"""The stream of a digest stage: a compute thread, a copy thread, and gates that a test can close.

    LOOP ── run ──▶ compute thread ── gate "wave" ── receive ── digest ── send ──▶ next stage
         ── copy ─▶ copy thread ───── gate "copy" ── digest
                    a wave begins when the copies that it names are done  [algorithms 16.2]

The two threads work side by side as the two CUDA streams do, so a copy that may not run beside
an earlier wave shows as a wrong answer.  Activations go over a TCP socket with one wave under way
and one waiting, as between real stages.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from wavepp_worker.base.errors import describe
from wavepp_worker.executor.ports import WaveChunk, WaveFenced
from wavepp_worker.sim.digest import DigestStage, answer_of
from wavepp_worker.wire.mailbox import Copy

HOP_WAVES_MAX = 2  # one that the neighbour computes, one that waits
CLOSE_TIMEOUT_S = 1.0
GATE_NAMES = ("wave", "hop", "copy")  # before a wave, its receive, and a batch of copies


class Gates:
    """Named places where a thread stops while a test wants it to, and how long each step takes."""

    def __init__(self, delays_s: dict[str, float]) -> None:
        self._changed = threading.Condition()
        self._closed: set[str] = set()
        self._waiting: dict[str, int] = {}  # gate -> what waits there
        self._delays_s = delays_s
        self._never = threading.Event()

    def set(self, name: str, is_open: bool) -> None:
        """Open or close a gate."""
        with self._changed:
            (self._closed.discard if is_open else self._closed.add)(name)
            self._changed.notify_all()

    def waiting(self) -> dict[str, int]:
        """Return gate -> number of the wave or copy batch that is stopped there."""
        with self._changed:
            return dict(self._waiting)

    def pass_through(self, name: str, number: int) -> None:
        """Take the step's time, then wait until the gate is open."""
        if delay_s := self._delays_s.get(name, 0.0):
            self._never.wait(delay_s)
        with self._changed:
            if name in self._closed:
                self._waiting[name] = number
                self._changed.wait_for(lambda: name not in self._closed)
                del self._waiting[name]


class Hop:
    """This stage's sockets to its neighbours.  Used by the compute thread alone."""

    def __init__(self, host: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._in: zmq.Socket[bytes] | None = None
        self._out = self._context.socket(zmq.PUSH)
        self._out.sndhwm = self._out.rcvhwm = HOP_WAVES_MAX
        self._out.linger = 0
        self.address = f"tcp://{host}:{self._out.bind_to_random_port(f'tcp://{host}')}"

    def connect(self, address: str) -> None:
        """Receive from the stage before this one."""
        self._in = self._context.socket(zmq.PULL)
        self._in.rcvhwm = HOP_WAVES_MAX
        self._in.linger = 0
        self._in.connect(address)

    def receive(self, wave: int, chunks: Sequence[WaveChunk]) -> Any:
        """Return the wave's activations; None on the first stage.

        Raises:
            ValueError: they belong to another wave or other spans.  [FS-04]
        """
        if self._in is None:
            return None
        label, activations = msgspec.msgpack.decode(self._in.recv())
        expected = [wave, [[chunk.rid, chunk.start, chunk.length] for chunk in chunks]]
        if label != expected:
            raise ValueError(f"activations of {label}, expected {expected}")
        return activations

    def send(self, wave: int, chunks: Sequence[WaveChunk], activations: Any) -> None:
        """Pass a wave's activations on; waits while the neighbour has enough."""
        label = (wave, [(chunk.rid, chunk.start, chunk.length) for chunk in chunks])
        self._out.send(msgspec.msgpack.encode((label, activations)))


class StreamCounts:
    """Stands where the real streams have their times."""

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()  # by kind

    def stats(self) -> dict[str, float]:
        return {f"toy_{kind}_copies": float(count) for kind, count in self.copied.items()}


class DigestStream:
    """A `StageStream` around a digest stage."""

    def __init__(
        self,
        stage: DigestStage,
        hop: Hop,
        gates: Gates,
        *,
        is_last: bool,
        broken_wave: int | None = None,
    ) -> None:
        self._broken_wave = broken_wave
        self._stage, self._hop, self._gates, self._is_last = stage, hop, gates, is_last
        self._waves: SimpleQueue[tuple[int, Sequence[WaveChunk], int] | None] = SimpleQueue()
        self._copies: SimpleQueue[Sequence[Copy] | None] = SimpleQueue()
        self._copies_done = 0  # batches
        self._copied = threading.Condition()
        self._wave = 0
        self._fenced: deque[WaveFenced] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.executed: list[tuple[int, int, int, int]] = []  # wave, rid, start, length
        self.times = StreamCounts()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), daemon=True)
            for work in (self._compute, self._copy)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, wave: int, chunks: Sequence[WaveChunk], copies_before: int) -> None:
        self._waves.put((wave, chunks, copies_before))

    def copy(self, copies: Sequence[Copy]) -> None:
        self._copies.put(copies)

    def poll(self) -> list[WaveFenced]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        fenced = []
        while self._fenced:
            fenced.append(self._fenced.popleft())
        return fenced

    def fileno(self) -> int:
        return self._bell

    def close(self) -> None:
        self._waves.put(None)
        self._copies.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _compute(self) -> None:
        while (job := self._waves.get()) is not None:
            self._wave, chunks, copies_due = job
            wave = self._wave
            with self._copied:
                self._copied.wait_for(lambda: self._copies_done >= copies_due)  # noqa: B023
            self._gates.pass_through("wave", wave)
            if wave == self._broken_wave:
                raise RuntimeError("a kernel of this wave failed")
            self._gates.pass_through("hop", wave)
            inputs = self._hop.receive(wave, chunks) or [[]] * len(chunks)
            outputs = [
                self._stage.run(chunk, given) for chunk, given in zip(chunks, inputs, strict=True)
            ]
            if not self._is_last:
                self._hop.send(wave, chunks, outputs)
            self.executed += [(wave, chunk.rid, chunk.start, chunk.length) for chunk in chunks]
            tokens = tuple(
                (chunk.rid, answer_of(output[-1]), 0.0)
                for chunk, output in zip(chunks, outputs, strict=True)
                if chunk.wants_token
            )
            self._report(WaveFenced(wave, tokens))

    def _copy(self) -> None:
        while (copies := self._copies.get()) is not None:
            self._gates.pass_through("copy", self._copies_done + 1)
            self._stage.copy(copies)
            self.times.copied.update(copy.kind for copy in copies)
            with self._copied:
                self._copies_done += 1
                self._copied.notify_all()

    def _guard(self, work: Callable[[], None]) -> None:
        """Report what ends a thread, as the real streams do."""
        try:
            work()
        except Exception as error:
            self._report(WaveFenced(self._wave, error=describe(error)))

    def _report(self, fenced: WaveFenced) -> None:
        self._fenced.append(fenced)
        os.eventfd_write(self._bell, 1)
