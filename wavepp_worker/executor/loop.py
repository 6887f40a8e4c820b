"""The LOOP process's logic: schedule in, device work out.  Pure: events in, commands out.

Every rank owns a `StageQueue`; rank 0 also owns a `WaveLeader`.  Rank 0 hands its own headers and
releases to its own queue in the order in which the followers get them, so it takes no short cut,
and with P = 1 it also answers itself.

    rank 0    Install, Drop, Admitting ─▶ WaveLeader ─ WaveHeader, Release ─▶ every StageQueue
    rank s    Install ─▶ StageQueue ─ RunWave ─▶ device ─ WaveFenced ─▶ WaveDone, OpenHold, Freed
    rank P-1  WaveFenced ─ WaveResult ─▶ WaveLeader of rank 0 ─▶ Finished

Nothing here waits: what has to wait stays in a queue until the event that it waits for.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct

from wavepp_worker.base.errors import InvariantError, PeerError, check
from wavepp_worker.base.types import LEADER, Epoch, Instant, Rank
from wavepp_worker.executor.asking import Asking
from wavepp_worker.executor.commands import (
    LoopCommand,
    SendResult,
    SendToFollowers,
    ToServing,
    ToWave,
)
from wavepp_worker.executor.events import HoldEnded, LoopEvent, Tick
from wavepp_worker.executor.leader import WaveLeader
from wavepp_worker.executor.ports import WaveFenced
from wavepp_worker.executor.ring import Ring
from wavepp_worker.executor.stage import StageQueue
from wavepp_worker.planner.ports import WavePlanner
from wavepp_worker.wire.mailbox import Admitting, Drop, Install, Refused, Waiting
from wavepp_worker.wire.waves import FirstToken, Release, WaveHeader, WaveResult


class LoopSettings(Struct, frozen=True, kw_only=True):
    """What a LoopMachine is told once."""

    rank: Rank
    stages: int  # P
    epoch: Epoch
    block_tokens: int  # B
    ring_waves: int  # R
    admit_timeout_s: float  # T_admit
    stall_timeout_s: float  # T_stall
    asks_spans_max: int = 0  # K where requests are asked for one by one; 0: they come by themselves


class LoopMachine:
    """One rank's executor.

    Args:
        planner: on rank 0, and only there.
    """

    def __init__(self, settings: LoopSettings, planner: WavePlanner | None = None) -> None:
        check((settings.rank == LEADER) == (planner is not None), "rank 0 alone has a planner")
        self._settings = settings
        self._is_last = settings.rank == settings.stages - 1
        self._stage = StageQueue(
            is_last=self._is_last,
            block_tokens=settings.block_tokens,
            admit_timeout_s=settings.admit_timeout_s,
        )
        self._leader: WaveLeader | None = None
        if planner is not None:
            ring = Ring(settings.ring_waves, settings.stall_timeout_s)
            spans_max = settings.asks_spans_max
            asking = Asking(spans_max, settings.block_tokens) if spans_max else None
            self._leader = WaveLeader(settings.epoch, planner, ring, asking)

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to run, nothing under way and nothing held."""
        return self._stage.is_idle and (self._leader is None or self._leader.is_idle)

    def handle(self, event: LoopEvent, now: Instant) -> list[LoopCommand]:
        """Take one event; return what to do, in order.

        Raises:
            InvariantError: the schedule does not fit this rank's state, e.g. span != position.
            DeviceError: a wave failed here or on the last stage.
            PeerError: T_admit or T_stall is over, or a message is of another epoch.
        """
        commands: list[LoopCommand] = []
        match event:
            case Install():
                if self._leader is not None:
                    self._leader.install(event, now)
                commands = self._stage.install(event, now)
            case Drop():
                commands = self._emit(self._must_lead().drop(event), now)
            case Admitting():
                self._must_lead().admitting_count = event.count
            case Waiting():
                self._must_ask().waiting(event.count)
            case Refused():
                self._must_ask().answer(now, is_refused=True)
            case WaveHeader() | Release():
                self._check_epoch(event.epoch)
                check(self._leader is None, "rank 0 makes the schedule")
                commands = self._stage.enqueue(event, now)
            case WaveResult():
                self._check_epoch(event.epoch)
                commands = self._retire(event, now)
            case WaveFenced():
                commands = self._fence(event, now)
            case HoldEnded():
                commands = self._stage.end_hold(event.rid)
            case Tick():
                commands = self._tick(now)
            case _:
                assert_never(event)
        return commands

    def next_deadline(self) -> Instant | None:
        """Return when a Tick is due at the latest."""
        deadlines = [self._stage.next_deadline()]
        if self._leader is not None:
            deadlines.append(self._leader.next_deadline())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check_invariants(self) -> None:
        """Raise InvariantError if the books are wrong."""
        self._stage.check_invariants()

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by their metric names."""
        counts = self._stage.counts
        values = {
            "wavepp_tokens_computed_total": float(counts.tokens_computed),
            "wavepp_waves_total": float(counts.waves),
            "wavepp_spans_total": float(counts.spans),
            "wavepp_installs_total": float(counts.installs),
            "wavepp_releases_total": float(counts.releases),
            "wavepp_install_wait_seconds_total": counts.install_wait_s,
            "wavepp_installed_requests": float(self._stage.request_count),
        }
        if self._leader is not None:
            values |= self._leader.stats()
        return values

    def _tick(self, now: Instant) -> list[LoopCommand]:
        commands: list[LoopCommand] = []
        if self._leader is not None:
            while (header := self._leader.plan(now)) is not None:
                commands += self._emit(header, now)
            if self._leader.asking is not None and (ask := self._leader.asking.take()):
                commands.append(ToWave(ask))
            self._leader.check_progress(now)
        self._stage.check_progress(now)
        return commands

    def _emit(self, message: WaveHeader | Release, now: Instant) -> list[LoopCommand]:
        """Give a message to every rank's FIFO, this one's included."""
        commands: list[LoopCommand] = []
        if self._settings.stages > 1:
            commands.append(SendToFollowers(message))
        return commands + self._stage.enqueue(message, now)

    def _fence(self, fenced: WaveFenced, now: Instant) -> list[LoopCommand]:
        commands = self._stage.fence(fenced)
        if self._is_last:
            result = WaveResult(
                epoch=self._settings.epoch,
                wave=fenced.wave,
                first_tokens=tuple(FirstToken(*answer) for answer in fenced.tokens),
            )
            commands += self._retire(result, now) if self._leader else [SendResult(result)]
        return commands

    def _retire(self, result: WaveResult, now: Instant) -> list[LoopCommand]:
        return [ToServing(finished) for finished in self._must_lead().retire(result, now)]

    def _must_lead(self) -> WaveLeader:
        if self._leader is None:
            raise InvariantError(f"only rank 0 is sent this rank={self._settings.rank}")
        return self._leader

    def _must_ask(self) -> Asking:
        asking = self._must_lead().asking
        if asking is None:
            raise InvariantError("this worker admits requests ahead: nobody asked")
        return asking

    def _check_epoch(self, epoch: int) -> None:
        """Sockets belong to one epoch, so a foreign message cannot be a late one: give up."""
        if epoch != self._settings.epoch:
            raise PeerError(f"message of epoch {epoch}, this worker is at {self._settings.epoch}")
