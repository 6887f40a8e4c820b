"""The device side of one rank: `executor.ports.StageStream` on a CPU thread or on CUDA streams.

    run(wave) ─▶ receive (stage > 0) ─▶ forward ─▶ send (not last) ─▶ fence ─▶ poll()

Both keep two receives posted, so a hop works while the stage computes, and both wake the poll
loop through an eventfd.  Errors end up in `WaveFenced.error`; after one, nothing more runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch import Tensor

from wavepp_worker.base.errors import describe
from wavepp_worker.executor.ports import WaveChunk, WaveFenced
from wavepp_worker.model.metadata import WaveBatch, build_batch
from wavepp_worker.runtime.device_clock import DeviceClock
from wavepp_worker.runtime.gaps import CopyMarks, WaveMarks
from wavepp_worker.runtime.loop_timeline import Marks
from wavepp_worker.runtime.stage_work import (
    Answer,
    Doorbell,
    StageWork,
    StreamTimes,
    pair_answers,
)
from wavepp_worker.transport.activations import Incoming
from wavepp_worker.wire.mailbox import Copy

RECEIVES_MAX: Final = 2  # receives posted ahead: buffers of one running and one waiting wave
_cuda: Any = torch.cuda  # Stream and Event have no type annotations
CLOSE_TIMEOUT_S: Final = 1.0  # a thread that waits for a neighbour is left to the process's end


@dataclass(slots=True)
class _Wave:
    wave: int
    chunks: Sequence[WaveChunk]
    copies_before: int
    incoming: Incoming | None = None
    is_receiving: bool = False


class CpuStageStream:
    """A compute thread with blocking gloo hops, and a copy thread beside it.

    The caller's thread stays free for sockets.

    Args:
        marks: told what the thread did and when; None: nobody wants to know.
    """

    def __init__(self, work: StageWork, marks: Marks | None = None) -> None:
        self._work = work
        self._marks = marks
        self._waves: SimpleQueue[_Wave | None] = SimpleQueue()
        self._batches: SimpleQueue[Sequence[Copy] | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards the next three
        self._fenced: deque[WaveFenced] = deque()
        self._copies_done = 0
        self._is_failed = False
        self._wave = 0  # begun last
        self._copying: tuple[tuple[float, float], ...] = ()  # how long copies kept it waiting
        self._bell = Doorbell()
        self._forward_ended_at: float | None = None
        self.times = StreamTimes()
        self._threads = [
            threading.Thread(target=self._guard, args=(work_off,), name=name, daemon=True)
            for name, work_off in (("compute", self._compute), ("copies", self._copy))
        ]
        for thread in self._threads:
            thread.start()

    def run(self, wave: int, chunks: Sequence[WaveChunk], copies_before: int) -> None:
        """Enqueue a wave."""
        self._waves.put(_Wave(wave, chunks, copies_before))

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue cache copies."""
        self._batches.put(copies)

    def poll(self) -> list[WaveFenced]:
        """Return the waves that ended since the last call."""
        self._bell.drain()
        with self._changed:
            fenced = list(self._fenced)
            self._fenced.clear()
        return fenced

    def fileno(self) -> int:
        """Return the eventfd for a poll set."""
        return self._bell.fileno()

    def close(self) -> None:
        """End the threads after what is enqueued, if that takes no longer than a moment."""
        self._waves.put(None)
        self._batches.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._bell.close()

    def _guard(self, work_off: Callable[[], None]) -> None:
        """Report what ends a thread before its time."""
        try:
            work_off()
        except Exception as error:  # the thread's top: whatever failed is reported, then it ends
            self._report(WaveFenced(self._wave, error=describe(error)))

    def _report(self, fenced: WaveFenced) -> None:
        """Add a fence, unless the other thread has failed; after an error nothing more runs."""
        with self._changed:
            if self._is_failed:
                return
            self._is_failed = bool(fenced.error)
            self._fenced.append(fenced)
            self._changed.notify_all()
        self._bell.ring()

    def _copy(self) -> None:
        """Run batches in order until the closing None or the first error."""
        while (copies := self._batches.get()) is not None and not self._is_failed:
            began_at = time.monotonic()
            self._work.copy(copies, self.times)
            if self._marks is not None:
                self._marks.append(copy_marks(copies, began_at))
            with self._changed:
                self._copies_done += 1
                self._changed.notify_all()

    def _compute(self) -> None:
        """Run waves in order until the closing None or the first error."""
        ahead: deque[_Wave | None] = deque()
        while True:
            self._look_ahead(ahead)
            job = ahead.popleft()
            if job is None or not self._await_copies(job.copies_before):
                return
            self._wave = job.wave
            self._report(WaveFenced(job.wave, self._run(job)))

    def _await_copies(self, count: int) -> bool:
        """Wait until so many batches are done; return False if there will not be so many."""
        self._copying = ()
        with self._changed:
            if self._copies_done < count:
                began_at = time.monotonic()
                self._changed.wait_for(lambda: self._is_failed or self._copies_done >= count)
                self._copying = ((began_at, time.monotonic()),)
            return not self._is_failed

    def _look_ahead(self, ahead: deque[_Wave | None]) -> None:
        """Take in everything that is enqueued, at least one job, and post the next receives."""
        if not ahead:
            ahead.append(self._waves.get())
        while not self._waves.empty():  # this thread is the only reader
            ahead.append(self._waves.get())
        for job in islice((job for job in ahead if job is not None), RECEIVES_MAX):
            if not job.is_receiving:
                job.incoming = self._work.receive(job.chunks)
                job.is_receiving = True

    def _run(self, job: _Wave) -> tuple[Answer, ...]:
        work = self._work
        batch = build_batch(job.chunks, work.store.block_tokens, work.model.device)
        asked_at = time.monotonic()
        inputs = None if job.incoming is None else job.incoming.wait()
        began_at = time.monotonic()
        if self._forward_ended_at is not None:
            self.times.gap_s += began_at - self._forward_ended_at
            self.times.receive_wait_s += began_at - asked_at
        outputs = work.forward(batch, inputs)
        picked = work.pick(batch, job.chunks, outputs)
        self._forward_ended_at = time.monotonic()
        self.times.forward_s += self._forward_ended_at - began_at
        work.send(outputs)
        if self._marks is not None:
            self._marks.append(
                WaveMarks(
                    wave=job.wave,
                    asked_at=began_at if inputs is None else asked_at,
                    received_at=began_at,
                    began_at=began_at,
                    ended_at=self._forward_ended_at,
                    sent_at=time.monotonic(),
                    copying=self._copying,
                )
            )
        if picked is None:
            return ()
        tokens, logprobs = picked
        return pair_answers(batch, job.chunks, tokens.tolist(), logprobs.tolist())


@dataclass(slots=True)
class _Launched:
    wave: int
    batch: WaveBatch
    chunks: Sequence[WaveChunk]
    picked: Tensor | None  # f64 [2, L], pinned: tokens, logprobs
    began: Any
    ended: Any  # the fence
    asked: Any = None  # the stream came to the wait for activations; with marks only, as below
    received: Any = None
    launched_at: float = 0.0


@dataclass(slots=True)
class _CudaStreams:
    compute: Any
    receive: Any
    copy: Any

    @classmethod
    def open(cls, device: torch.device) -> _CudaStreams:
        return cls(*(_cuda.Stream(device) for _ in range(3)))


class CudaStageStream:
    """Asynchronous launches from the caller's thread; NCCL hops; fences are CUDA events.

    No Python runs beside the launching thread: the one other thread sleeps in
    `Event.synchronize`, which holds no interpreter lock, and then rings the bell.  At most
    `RECEIVES_MAX` waves are launched and unfenced, which bounds the activation buffers.

    Copies run at once on a stream of their own, because their sources are fenced and nobody uses
    their targets; an event follows each batch, and a wave waits for that of the last batch it
    needs.  [algorithms 16.2]

    CI has no CUDA device.  The conformance suite passed on two H200s (torch 2.11, NCCL, one and
    two stages), with copies and the events after them on one H200 and one stage; more stages,
    copies in several stages and a failing kernel have not been run, nor have marks.

    Args:
        marks: told what the device did and when; None: nobody wants to know.
    """

    def __init__(self, work: StageWork, marks: Marks | None = None) -> None:
        self._work = work
        self._marks = marks
        self._clock = DeviceClock()
        self._waiting: deque[_Wave] = deque()
        self._launched: deque[_Launched] = deque()
        self._copied: deque[Any] = deque()  # events of batches that nobody has waited for yet
        self._copies_passed = 0  # batches before those
        self._streams = _CudaStreams.open(work.model.device)
        self._bell = Doorbell()
        self._last_ended: Any = None
        self._is_failed = False
        self.times = StreamTimes()
        # Weights and the zeroed pool were written on the default stream.
        torch.cuda.synchronize(work.model.device)
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="fences", daemon=True)
        self._thread.start()

    def run(self, wave: int, chunks: Sequence[WaveChunk], copies_before: int) -> None:
        """Enqueue a wave."""
        self._waiting.append(_Wave(wave, chunks, copies_before))
        self._launch()

    def copy(self, copies: Sequence[Copy]) -> None:
        """Enqueue cache copies."""
        began_at = time.monotonic()
        with torch.cuda.stream(self._streams.copy):
            self._work.copy(copies, self.times)
            copied = _cuda.Event()
            copied.record()
        self._copied.append(copied)
        while self._copied and self._copied[0].query():  # without waves they would pile up
            self._pass_copies()
        if self._marks is not None:
            self._marks.append(copy_marks(copies, began_at, is_enqueued=True))

    def poll(self) -> list[WaveFenced]:
        """Return the waves whose fence passed since the last call; launch what now fits."""
        self._bell.drain()
        fenced: list[WaveFenced] = []
        while self._launched and not self._is_failed:
            head = self._launched[0]
            try:
                if not head.ended.query():
                    break
                self._launched.popleft()
                fenced.append(WaveFenced(head.wave, self._finish(head)))
            except (RuntimeError, ArithmeticError) as error:  # an earlier kernel failed
                self._is_failed = True
                fenced.append(WaveFenced(head.wave, error=describe(error)))
        self._launch()
        return fenced

    def fileno(self) -> int:
        """Return the eventfd for a poll set."""
        return self._bell.fileno()

    def close(self) -> None:
        """End the watching thread, if the device is done in a moment."""
        self._events.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._bell.close()

    def _launch(self) -> None:
        while self._waiting and len(self._launched) < RECEIVES_MAX and not self._is_failed:
            self._launched.append(self._enqueue(self._waiting.popleft()))
            self._events.put(self._launched[-1].ended)

    def _enqueue(self, job: _Wave) -> _Launched:
        work, streams = self._work, self._streams
        launched_at = time.monotonic()
        asked = None if self._marks is None else _cuda.Event(enable_timing=True)
        received = asked
        # On its own stream the receive starts now, not after the waves launched before it.
        with torch.cuda.stream(streams.receive):
            incoming = work.receive(job.chunks)
        began = _cuda.Event(enable_timing=True)
        ended = _cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.stream(streams.compute):
            batch = build_batch(job.chunks, work.store.block_tokens, work.model.device)
            if asked is not None:
                asked.record()
            inputs = None if incoming is None else incoming.wait()
            if asked is not None and incoming is not None:
                received = _cuda.Event(enable_timing=True)
                received.record()
            for tensor in (inputs or {}).values():
                tensor.record_stream(streams.compute)
            copied = None
            while self._copies_passed < job.copies_before:
                copied = self._pass_copies()
            if copied is not None:
                streams.compute.wait_event(copied)
            began.record()
            outputs = work.forward(batch, inputs)
            picked = work.pick(batch, job.chunks, outputs)
            on_host = None
            if picked is not None:
                on_device = torch.stack([part.double() for part in picked])
                on_host = torch.empty(on_device.shape, dtype=torch.float64, pin_memory=True)
                on_host.copy_(on_device, non_blocking=True)
            ended.record()
            work.send(outputs)
        return _Launched(
            job.wave, batch, job.chunks, on_host, began, ended, asked, received, launched_at
        )

    def _mark(self, launched: _Launched) -> None:
        """Tell when a fenced wave ran."""
        if self._marks is None:
            return
        receive_s = launched.asked.elapsed_time(launched.received) / 1e3
        wait_s = launched.asked.elapsed_time(launched.began) / 1e3
        forward_s = launched.began.elapsed_time(launched.ended) / 1e3
        since_last_s = 0.0
        if self._last_ended is not None:
            since_last_s = self._last_ended.elapsed_time(launched.asked) / 1e3
        asked_at, ended_at = self._clock.place(
            launched_at=launched.launched_at,
            seen_at=time.monotonic(),
            since_last_s=since_last_s,
            busy_s=wait_s + forward_s,
        )
        began_at = min(asked_at + wait_s, ended_at)
        received_at = min(asked_at + receive_s, began_at)
        self._marks.append(
            WaveMarks(
                wave=launched.wave,
                asked_at=asked_at,
                received_at=received_at,
                began_at=began_at,
                ended_at=ended_at,
                sent_at=ended_at,
                copying=((received_at, began_at),),
            )
        )

    def _pass_copies(self) -> Any:
        """Return the event of the oldest batch that nobody has waited for, and count it."""
        self._copies_passed += 1
        return self._copied.popleft()

    def _finish(self, launched: _Launched) -> tuple[Answer, ...]:
        self._mark(launched)
        self.times.forward_s += launched.began.elapsed_time(launched.ended) / 1e3
        if self._last_ended is not None:
            self.times.gap_s += self._last_ended.elapsed_time(launched.began) / 1e3
        self._last_ended = launched.ended
        if launched.picked is None:
            return ()
        tokens, logprobs = launched.picked.tolist()
        return pair_answers(
            launched.batch, launched.chunks, [int(token) for token in tokens], logprobs
        )

    def _watch(self) -> None:
        """Ring after every fence; a failed device is reported by `poll`, which asks it again."""
        while (event := self._events.get()) is not None:
            try:
                event.synchronize()
            finally:
                self._bell.ring()


def copy_marks(copies: Sequence[Copy], began_at: float, *, is_enqueued: bool = False) -> CopyMarks:
    """Return the marks of copies that have just been performed, or enqueued."""
    offloads = sum(copy.kind == "offload" for copy in copies)
    return CopyMarks(
        began_at=began_at,
        ended_at=time.monotonic(),
        offloads=offloads,
        onboards=len(copies) - offloads,
        is_enqueued=is_enqueued,
    )
