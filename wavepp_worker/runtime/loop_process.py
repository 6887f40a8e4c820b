"""The LOOP process of one rank: sockets and the device around the LoopMachine.

    WAVE_s ── PAIR ──┐                                        ┌── run, copy ──▶ StageStream
    LOOP0  ── PULL ──┼─▶ events ─▶ LoopMachine ─▶ commands ──┼── open, release ▶ HoldDesk
    fences ── fd ────┤                                        ├── PAIR ─▶ WAVE_s
    readers ─ ROUTER ┘                                        └── PUSH ─▶ LOOPs, serving

One thread and one poll set; everything that has arrived is handed in before the one Tick that
plans.  Nothing here blocks but the poll itself and, during start-up, loading and connecting.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

import zmq

from wavepp_worker.base.errors import ConfigError, PeerError, describe
from wavepp_worker.base.types import LEADER, Epoch, Instant, Rank
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
from wavepp_worker.obs.timeline import open_recorder
from wavepp_worker.planner.choose import make_planner, planner_settings
from wavepp_worker.runtime.boot import Boot, alive_interval_s, begin_child, loop_address
from wavepp_worker.runtime.loop_timeline import LoopTimeline
from wavepp_worker.transport.sockets import (
    Context,
    Socket,
    bind_tcp,
    open_socket,
    receive_all,
    send_now,
)
from wavepp_worker.wire.mailbox import (
    FROM_LOOP,
    REPORTS,
    TO_LOOP,
    Alive,
    Fatal,
    LoopInbound,
    LoopOutbound,
    LoopReady,
    LoopUp,
    Peers,
    Ready,
    ReportMessage,
    Shutdown,
    Stats,
)
from wavepp_worker.wire.waves import WAVES

if TYPE_CHECKING:
    from wavepp_worker.runtime.stage_setup import Stage

logger = logging.getLogger("wavepp_worker.runtime.loop_process")  # __name__ is __main__ here

LAST_REPORT_LINGER_MS = 1000


class DeviceSide(Protocol):
    """Everything of a rank that needs a device; production's is `stage_setup.TorchSide`."""

    def open_store(self) -> str:
        """Return where the stages meet for their activations; "" on all ranks but the first."""

    def build_stage(self, store_address: str, context: Context) -> Stage:
        """Return the stage, connected to its neighbours.  Takes as long as loading weights does."""


def open_torch(boot: Boot, rank: Rank) -> DeviceSide:
    """Import torch, which takes a second, and return production's device side."""
    from wavepp_worker.runtime.stage_setup import TorchSide

    return TorchSide(boot, rank)


class LoopSockets:
    """Every socket of a LOOP process except the hold desk's."""

    def __init__(self, boot: Boot, rank: Rank) -> None:
        self.context: Context = zmq.Context()
        self._rank = rank
        self.mailbox = open_socket(self.context, zmq.PAIR)
        self.mailbox.connect(loop_address(boot.run_dir, rank))
        self.waves = open_socket(self.context, zmq.PULL)
        self.wave_address = bind_tcp(self.waves, boot.config.cluster.host)
        self._reports = open_socket(self.context, zmq.PUSH, linger_ms=LAST_REPORT_LINGER_MS)
        self._reports.connect(boot.report_address)
        self._peers: dict[int, Socket] = {}

    def connect(self, wave_addresses: tuple[str, ...]) -> None:
        """Open this rank's own ways into the wave plane: rank 0 to all, the last to rank 0."""
        last = len(wave_addresses) - 1
        targets = range(1, last + 1) if self._rank == LEADER else [0] if self._rank == last else []
        for target in targets:
            self._peers[target] = open_socket(self.context, zmq.PUSH)
            self._peers[target].connect(wave_addresses[target])

    def send_to_peers(self, frame: bytes) -> None:
        """Send to every LOOP that this one sends to."""
        for target, peer in self._peers.items():
            send_now(peer, frame, f"loop {target}")

    def report(self, message: ReportMessage) -> None:
        """Send to serving."""
        send_now(self._reports, REPORTS.encode(message), "serving")

    def tell_wave(self, message: LoopOutbound) -> None:
        """Send to this rank's WAVE."""
        send_now(self.mailbox, FROM_LOOP.encode(message), f"wave {self._rank}")

    def close(self) -> None:
        """Close all; the last report gets a moment to leave.  Idempotent."""
        self.context.destroy()


class LoopDriver:
    """Feeds a LoopMachine from the poll set and performs its commands.

    Args:
        timeline: looks at everything that passes through; None: nobody wants one.
    """

    def __init__(
        self,
        rank: Rank,
        machine: LoopMachine,
        stage: Stage,
        sockets: LoopSockets,
        *,
        stats_interval_s: float,
        alive_interval_s: float,
        silence_s: float,
        timeline: LoopTimeline | None = None,
    ) -> None:
        self._rank = rank
        self._machine = machine
        self._stage = stage
        self._sockets = sockets
        self._stats_interval_s = stats_interval_s
        self._alive_interval_s = alive_interval_s
        self._timeline = timeline
        self._alive_due_at = Instant(0.0)
        self._silence_s = silence_s
        self._wave_heard_at: Instant | None = None  # WAVE serves when all ranks have started
        self._stats_due_at = Instant(0.0)
        self._has_news = False  # counters may have changed since the last look at them
        self._reported: dict[str, float] = {}
        self._is_ending = False
        self._poller = zmq.Poller()
        for source in (sockets.mailbox, sockets.waves, stage.desk.socket, stage.stream.fileno()):
            self._poller.register(source, zmq.POLLIN)

    def serve(self) -> None:
        """Run until Shutdown.  Any exception is fatal for the worker.

        Raises:
            PeerError: another process is lost, silent, or stopped reading.
        """
        while not self._is_ending:
            self._poller.poll(self._timeout_ms())
            now = Instant(time.monotonic())
            for frame in receive_all(self._sockets.mailbox):
                self._take_mail(TO_LOOP.decode(frame), now)
            for frame in receive_all(self._sockets.waves):
                self._handle(WAVES.decode(frame), now)
            for fenced in self._stage.stream.poll():
                self._handle(fenced, now)
            for rid in self._stage.desk.poll(now):
                self._handle(HoldEnded(rid), now)
            self._handle(Tick(), now)
            self._report_stats(now)
            self._watch_wave(now)
            if self._timeline is not None:
                self._timeline.look(now)

    def _timeout_ms(self) -> int:
        """Return how long to sleep if nothing happens; rounded up, so that deadlines have come."""
        deadlines = [self._machine.next_deadline(), self._stage.desk.next_deadline()]
        if self._has_news:
            deadlines.append(self._stats_due_at)
        due = min(deadline for deadline in (*deadlines, self._alive_due_at) if deadline is not None)
        return max(0, math.ceil((due - time.monotonic()) * 1e3))

    def _take_mail(self, message: LoopInbound, now: Instant) -> None:
        self._wave_heard_at = now
        if isinstance(message, Alive):
            return
        if isinstance(message, Shutdown):
            logger.info("shutdown rank=%d reason=%s", self._rank, message.reason)
            self._is_ending = True
        elif isinstance(message, Peers):
            raise PeerError("WAVE sent the peers twice")
        else:
            self._handle(message, now)

    def _handle(self, event: LoopEvent, now: Instant) -> None:
        if self._timeline is not None:
            self._timeline.take(event, now)
        for command in self._machine.handle(event, now):
            if self._timeline is not None:
                self._timeline.perform(command, now)
            self._perform(command, now)

    def _perform(self, command: LoopCommand, now: Instant) -> None:
        match command:
            case RunWave():
                self._stage.stream.run(command.wave, command.chunks, command.copies_before)
            case RunCopies():
                self._stage.stream.copy(command.copies)
            case SendToFollowers():
                self._sockets.send_to_peers(WAVES.encode(command.message))
            case SendResult():
                self._sockets.send_to_peers(WAVES.encode(command.result))
            case ToWave():
                self._sockets.tell_wave(command.message)
            case ToServing():
                self._sockets.report(command.message)
            case OpenHold():
                handoff = self._stage.desk.open_hold(
                    command.rid, command.tables, command.tokens, command.states, now
                )
                self._sockets.report(Ready(command.rid, self._rank, handoff))
            case DropHold():
                self._stage.desk.release(command.rid)
            case _:
                assert_never(command)

    def _watch_wave(self, now: Instant) -> None:
        """Tell WAVE that this process is not stuck, and give the worker up if WAVE is."""
        if now < self._alive_due_at:
            return
        self._alive_due_at = Instant(now + self._alive_interval_s)
        self._sockets.tell_wave(Alive())
        heard_at = self._wave_heard_at
        if heard_at is not None and now >= heard_at + self._silence_s and not self._is_ending:
            raise PeerError(f"wave{self._rank} said nothing for {self._silence_s:g} s")

    def _report_stats(self, now: Instant) -> None:
        self._has_news = now < self._stats_due_at
        if self._has_news:
            return
        self._stats_due_at = Instant(now + self._stats_interval_s)
        stage = self._stage
        values = self._machine.stats() | stage.stream.times.stats() | stage.desk.stats(now)
        if values != self._reported:
            self._reported = values
            self._sockets.report(Stats(rank=self._rank, role="loop", values=values))


def run_loop(
    boot: Boot,
    rank: Rank,
    sockets: LoopSockets,
    open_side: Callable[[Boot, Rank], DeviceSide],
) -> None:
    """Start up, then serve until Shutdown.

    Raises:
        Exception: of any kind; fatal for the worker.
    """
    config, plan = boot.config, boot.plan
    side = open_side(boot, rank)
    sockets.tell_wave(LoopUp(sockets.wave_address, side.open_store()))
    peers = _await_peers(sockets, config.cluster.start_timeout_s)
    if peers is None:
        return
    sockets.connect(peers.wave_addresses)
    stage = side.build_stage(peers.store_address, sockets.context)
    settings = LoopSettings(
        rank=rank,
        stages=config.cluster.stages,
        epoch=Epoch(boot.epoch),
        block_tokens=plan.block_tokens,
        ring_waves=plan.ring_waves,
        admit_timeout_s=config.executor.admit_timeout_s,
        stall_timeout_s=config.executor.stall_timeout_s,
        asks_spans_max=(
            config.admission.batch_requests_max if config.admission.mode == "naive" else 0
        ),
    )
    planner = make_planner(planner_settings(config, plan)) if rank == LEADER else None
    machine = LoopMachine(settings, planner)
    recorder = open_recorder(
        config.obs.trace_folder, worker=boot.parent_pid, role="loop", rank=rank
    )
    timeline = None if recorder is None else LoopTimeline(recorder, stage.marks)
    driver = LoopDriver(
        rank,
        machine,
        stage,
        sockets,
        stats_interval_s=config.obs.stats_interval_s,
        alive_interval_s=alive_interval_s(config),
        silence_s=config.transport.collective_timeout_s,
        timeline=timeline,
    )
    sockets.tell_wave(LoopReady(stage.windows))
    logger.info("ready rank=%d slots=%s", rank, [window.slots for window in stage.windows])
    try:
        driver.serve()
    finally:
        if timeline is not None:
            timeline.close(time.monotonic())
    stage.close()


def _await_peers(sockets: LoopSockets, timeout_s: float) -> Peers | None:
    """Return where the other LOOPs are, or None if the worker shuts down instead."""
    if not sockets.mailbox.poll(int(timeout_s * 1e3)):
        raise PeerError(f"not all ranks came up within {timeout_s:g} s (cluster.start_timeout_s)")
    message = TO_LOOP.decode(sockets.mailbox.recv())
    if isinstance(message, Peers | Shutdown):
        return message if isinstance(message, Peers) else None
    raise PeerError(f"WAVE sent {type(message).__name__} before the peers")


def main(
    arguments: Sequence[str], open_side: Callable[[Boot, Rank], DeviceSide] = open_torch
) -> int:
    """Run one LOOP process; return its exit status."""
    boot, rank = begin_child(arguments)
    sockets = LoopSockets(boot, rank)
    status = 0
    try:
        run_loop(boot, rank, sockets, open_side)
    except Exception as error:  # the process's top: record, tell serving, end
        text = f"stage {rank}: {describe(error)}"
        if isinstance(error, ConfigError):
            logger.error("fatal rank=%d: %s", rank, text)
        else:
            logger.exception("fatal rank=%d", rank)
        sockets.report(Fatal(rank=rank, role="loop", text=text))
        status = 1
    sockets.close()
    return status


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: a native thread may still wait for a neighbour that has gone (gloo, NCCL, NIXL),
    # and the interpreter's own teardown would wait for it or trip over it.
    os._exit(exit_status)
