"""The WAVE process of one rank: books and agreement, no tensors.

    rounds link, LOOP's mailbox, front door (rank 0), the next round's time
        ─▶ events ─▶ InlineRank (admission machine and cache) ─▶ outward commands ─▶ sockets

One loop with one wait; the only other thread is Dynamo's (`membership`).  It imports neither torch
nor numpy, so it starts in a fraction of a second.  A peer that is silent or a link that is lost
ends the process: the worker fails as a unit.  [algorithms 9, 15, 16]

Measured, two busy cores, two ranks: 0.4 ms from broadcast to gathered over ZeroMQ, 1.3 ms over
Dynamo's endpoints; 1 % of a core when idle.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import assert_never

import msgspec

from wavepp_worker.admission.commands import (
    Outward,
    ReportGone,
    ReportReady,
    ReportRejected,
    SendAdmitting,
    SendBroadcast,
    SendCacheView,
    SendDrop,
    SendGathered,
    SendInstall,
    SendVote,
    ShutDown,
    TellAsker,
    Transition,
)
from wavepp_worker.admission.events import (
    Announced,
    Asked,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    ShutdownRequested,
    Tick,
    ViewRequested,
    VoteReceived,
)
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.admission.settings import admission_settings
from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.types import LEADER, Instant, Rank
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.obs.timeline import open_recorder
from wavepp_worker.runtime.boot import Boot, alive_interval_s, begin_child
from wavepp_worker.runtime.membership import Membership
from wavepp_worker.runtime.wave_sockets import WaveSockets
from wavepp_worker.runtime.wave_start import WaveStart
from wavepp_worker.runtime.wave_timeline import WaveTimeline
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.wire.mailbox import (
    Admitting,
    Alive,
    Announce,
    Ask,
    CacheView,
    Cancel,
    Drop,
    Fatal,
    Freed,
    FrontMessage,
    Gone,
    KvDelta,
    LoopOutbound,
    LoopReady,
    LoopUp,
    Rejected,
    Shutdown,
    Stats,
    ViewRequest,
    WaveDone,
    WorkerReady,
)
from wavepp_worker.wire.rounds import (
    ROUNDS,
    RoundBcast,
    RoundGathered,
    RoundMessage,
    RoundVote,
)

logger = logging.getLogger("wavepp_worker.runtime.wave_process")  # __name__ is __main__ here


class WaveProcess:
    """One rank, ready to serve.

    Args:
        start: has run; its result is `link`.
        timeline: looks at everything that passes through; None: nobody wants one.
    """

    def __init__(
        self,
        boot: Boot,
        rank: Rank,
        sockets: WaveSockets,
        link: RoundsLink,
        start: WaveStart,
        *,
        timeline: WaveTimeline | None = None,
    ) -> None:
        self._rank = rank
        self._stages = boot.config.cluster.stages
        self._silence_s = boot.config.transport.collective_timeout_s
        self._stats_interval_s = boot.config.obs.stats_interval_s
        self._invariants = boot.config.debug.invariants
        self._sockets = sockets
        self._timeline = timeline
        self._link = link
        self._early_frames = start.early_frames
        # Whoever this rank must hear of -> when it last did, on the monotonic clock.
        self._heard = {f"rank {other}": at for other, at in start.heard.items()}
        self._heard[f"loop{rank}"] = time.monotonic()
        plan = boot.plan
        self._cache = RankCache(
            [
                msgspec.convert(msgspec.structs.asdict(window), WindowSpec)
                for window in start.windows
            ],
            plan.block_tokens,
            plan.floor_fraction,
            plan.floor_headroom_blocks,
            check_always=self._invariants == "always",
        )
        settings = admission_settings(boot.config, plan, rank, boot.epoch)
        self._inline = InlineRank(settings, self._cache, time.monotonic)
        self._delta_sequence = 0
        self._alive_interval_s = alive_interval_s(boot.config)
        self._alive_due_at = 0.0
        self._stats_at = 0.0
        self._stats_sent: dict[str, float] = {}
        self._round_began_at = 0.0
        self._round_seconds = 0.0
        self._busy_seconds = 0.0
        self._is_over = False

    def serve(self) -> None:
        """Handle events until the ordered shutdown.

        Raises:
            PeerError: another process is lost, silent, or stopped reading.
        """
        descriptors = [self._link.fileno(), *self._sockets.descriptors()]
        while not self._is_over:
            # Sockets signal changes only, and sending may swallow a signal: look at everything
            # until nothing comes, and wait only then.
            began_at = time.monotonic()
            if self._take_all():
                self._report_tree()
                self._report_stats()
                self._busy_seconds += time.monotonic() - began_at
                if self._timeline is not None:
                    self._timeline.flush_if_due(time.monotonic())
            else:
                # select() keeps microseconds; rounds are 0.2 ms apart at least.
                select.select(descriptors, [], [], self._sleep_s())

    def _take_all(self) -> bool:
        """Handle everything that is there now; return whether there was anything."""
        is_busy = False
        frames, self._early_frames = [*self._early_frames, *self._link.receive()], []
        for rank, frame in frames:
            is_busy = True
            self._heard[f"rank {rank}"] = time.monotonic()
            self._feed(_round_event(ROUNDS.decode(frame)))
        for report in self._sockets.receive_loop():
            is_busy = True
            self._heard[f"loop{self._rank}"] = time.monotonic()
            self._take_loop(report)
        for request in self._sockets.receive_front():
            is_busy = True
            self._feed(_front_event(request))
        if not self._is_over and time.monotonic() >= self._alive_due_at:
            self._alive_due_at = time.monotonic() + self._alive_interval_s
            self._sockets.send_loop(Alive())  # LOOP gives the worker up if this process is stuck
        deadline = self._inline.next_deadline()
        if deadline is not None and deadline <= time.monotonic():
            is_busy = True
            self._feed(Tick())
        return is_busy

    def _feed(self, event: OutsideEvent) -> None:
        if not self._is_over:
            began_at = Instant(time.monotonic())
            for command in self._inline.steps(event, began_at):
                self._perform(command)
            if self._timeline is not None:
                self._timeline.took(event, began_at, time.monotonic())

    def _take_loop(self, message: LoopOutbound) -> None:
        match message:
            case WaveDone():
                self._inline.wave_done(message)
            case Freed():
                for command in self._inline.freed(message, Instant(time.monotonic())):
                    self._perform(command)
                if self._invariants == "idle" and not self._cache.view().sequence_count:
                    self._cache.check_invariants()
            case Ask(may_refuse=may_refuse):
                self._feed(Asked(may_refuse))
            case Alive():
                pass
            case LoopUp() | LoopReady():
                raise PeerError(f"loop{self._rank} started twice")
            case _:
                assert_never(message)

    def _sleep_s(self) -> float:
        """Return how long nothing needs to be done if nothing arrives."""
        now = time.monotonic()
        name, heard_at = min(self._heard.items(), key=lambda item: item[1])
        if now >= heard_at + self._silence_s:
            raise PeerError(f"{name} said nothing for {self._silence_s:g} s")
        due = min(heard_at + self._silence_s, self._alive_due_at)
        if (deadline := self._inline.next_deadline()) is not None:
            due = min(due, deadline)
        return max(0.0, due - now)

    # ── outward ──────────────────────────────────────────────────────────────────────────────

    def _perform(self, command: Outward) -> None:
        if self._timeline is not None:
            self._timeline.perform(command, time.monotonic())
        match command:
            case SendBroadcast() | SendGathered() | SendVote():
                self._send_ranks(command)
            case SendInstall(install=install):
                self._sockets.send_loop(install)
            case SendDrop(rid=rid, ino=ino):
                self._sockets.send_loop(Drop(rid, ino))
            case SendAdmitting(count=count):
                self._sockets.send_loop(Admitting(count))
            case TellAsker(message=answer):
                self._sockets.send_loop(answer)
            case SendCacheView(number=number):
                self._report_tree()  # so that the view is what the deltas before it add up to
                view = msgspec.structs.asdict(self._cache.view())
                self._sockets.report(CacheView(rank=self._rank, number=number, **view))
            case ReportReady(total_tokens=total_tokens):
                self._sockets.report(WorkerReady(total_tokens))
            case ReportRejected(rid=rid, code=code, text=text):
                self._sockets.report(Rejected(rid, code, text))
            case ReportGone(rid=rid):
                self._sockets.report(Gone(rid))
            case ShutDown(reason=reason):
                logger.info("shutting down: reason=%s", reason)
                self._sockets.send_loop(Shutdown(reason))
                self._is_over = True
            case _:
                check(isinstance(command, Transition), "unknown command", command=command)
                logger.debug("%s", command)

    def _send_ranks(self, command: SendBroadcast | SendGathered | SendVote) -> None:
        link = self._link
        if isinstance(command, SendVote):
            link.send(LEADER, ROUNDS.encode(command.vote))
            return
        now = time.monotonic()
        if isinstance(command, SendBroadcast):
            self._round_began_at = now
            frame = ROUNDS.encode(command.bcast)
        else:
            self._round_seconds += now - self._round_began_at
            frame = ROUNDS.encode(command.gathered)
        for rank in range(1, self._stages):
            link.send(rank, frame)

    def _report_tree(self) -> None:
        """Tell serving what changed in the tree."""
        if changes := self._cache.drain_changes():
            self._delta_sequence += 1
            self._sockets.report(KvDelta(self._rank, self._delta_sequence, changes))

    def _report_stats(self) -> None:
        """Tell serving the counters, now and then."""
        now = time.monotonic()
        if now < self._stats_at:
            return
        self._stats_at = now + self._stats_interval_s
        values = self._inline.stats()
        values["wavepp_process_busy_seconds_total"] = self._busy_seconds
        if self._rank == LEADER:
            values["wavepp_round_seconds_total"] = self._round_seconds
            oldest_s = self._inline.machine.oldest_wait_s(Instant(now))
            values["wavepp_waiting_oldest_seconds"] = oldest_s
        if values != self._stats_sent:
            self._stats_sent = values
            self._sockets.report(Stats(self._rank, "wave", values))


def _round_event(message: RoundMessage) -> OutsideEvent:
    match message:
        case RoundBcast():
            return BroadcastReceived(message)
        case RoundVote():
            return VoteReceived(message)
        case RoundGathered():
            return GatheredReceived(message)
        case _:
            assert_never(message)


def _front_event(message: FrontMessage) -> OutsideEvent:
    match message:
        case Announce():
            return Announced(message)
        case Cancel(rid=rid):
            return CancelRequested(rid)
        case ViewRequest(number=number):
            return ViewRequested(number)
        case Shutdown(reason=reason):
            return ShutdownRequested(reason)
        case _:
            assert_never(message)


def main(arguments: Sequence[str]) -> int:
    """Run the WAVE process of one rank; return its exit status."""
    boot, rank = begin_child(arguments)
    sockets = WaveSockets(boot, rank)
    with ExitStack() as stack:
        stack.callback(sockets.close)
        try:
            # Dynamo starts while LOOP imports torch.
            membership = Membership(boot.namespace, boot.group, boot.config.cluster.host)
            stack.callback(membership.close)
            start = WaveStart(boot, rank, sockets, membership)
            stack.callback(start.close)
            recorder = open_recorder(
                boot.config.obs.trace_folder, worker=boot.parent_pid, role="wave", rank=rank
            )
            timeline = None
            if recorder is not None:
                stack.callback(recorder.close)
                timeline = WaveTimeline(recorder)
            WaveProcess(boot, rank, sockets, start.run(), start, timeline=timeline).serve()
        except Exception as error:  # the process's top: record it, and let the worker fail
            logger.exception("wave%d failed", rank)
            sockets.report(Fatal(rank, "wave", f"{type(error).__name__}: {error}"))
            return 1
    return 0


if __name__ == "__main__":
    EXIT_STATUS = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_STATUS)  # Dynamo's native threads would delay an ordinary exit
