"""One simulated rank: the production WAVE and LOOP machines, their cache, and a digest device.

Nothing here decides anything.  It turns commands into messages on the world's links, and keeps
the clock of this rank, which may be wrong.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

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
from wavepp_worker.admission.events import Asked, OutsideEvent
from wavepp_worker.admission.events import Tick as WaveTick
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import LEADER, Epoch, Instant, Rank
from wavepp_worker.cache.outcomes import Committed, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
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
from wavepp_worker.executor.events import LoopEvent
from wavepp_worker.executor.events import Tick as LoopTick
from wavepp_worker.executor.loop import LoopMachine, LoopSettings
from wavepp_worker.planner.choose import PlannerSettings, make_planner
from wavepp_worker.sim.device import SimDevice
from wavepp_worker.sim.digest import DigestStage
from wavepp_worker.sim.knobs import BLOCK_TOKENS, Knobs
from wavepp_worker.wire.mailbox import (
    Admitting,
    Ask,
    Drop,
    Freed,
    KvDelta,
    WaveDone,
)

if TYPE_CHECKING:
    from wavepp_worker.sim.world import World

FLOOR_HEADROOM_BLOCKS = 4


class FlakyCache(RankCache):
    """A rank that is short of room now and then without need: failing solo attempts and more."""

    def __init__(self, knobs: Knobs, rank: int, rng: random.Random) -> None:
        super().__init__(
            knobs.windows[rank], BLOCK_TOKENS, knobs.floor_fraction, FLOOR_HEADROOM_BLOCKS
        )
        self._chance = knobs.flaky_chance
        self._flaky_rng = rng

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        if self._chance and not no_floor and self._flaky_rng.random() < self._chance:
            self.release(rid)
            return Shortfall((1,), self.capacity_generation)
        return super().prepare(rid, no_floor=no_floor)

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        if self._chance and not no_floor and self._flaky_rng.random() < self._chance / 2:
            return Shortfall((1,), self.capacity_generation)
        return super().commit(rid, endpoint, no_floor=no_floor)


class SimRank:
    """Both processes of a rank, for one epoch."""

    def __init__(self, world: World, rank: int, epoch: int) -> None:
        knobs, ranks = world.knobs, len(world.knobs.windows)
        self._world, self.rank = world, rank
        self.is_dead = False
        self.cache = FlakyCache(knobs, rank, world.steps.rng(f"flaky{rank}"))
        settings = AdmissionSettings(
            rank=rank,
            stages=ranks,
            epoch=epoch,
            block_tokens=BLOCK_TOKENS,
            snapshot_interval_tokens=knobs.snapshot_interval_tokens,
            headroom_tokens=knobs.headroom_tokens,
            floor_fraction=knobs.floor_fraction,
            floor_headroom_blocks=FLOOR_HEADROOM_BLOCKS,
            batch_requests_max=knobs.batch,
            round_min_s=0.001,
            round_active_s=0.002,
            round_idle_s=0.01,
            round_quiet_s=0.1,
            auto_commit=knobs.auto_commit,
            hint_refine=knobs.hint_refine,
            mode=knobs.mode,
            queue_requests_max=knobs.queue_requests_max,
        )
        self.inline = InlineRank(settings, self.cache)
        planner = PlannerSettings(
            kind="greedy" if knobs.mode == "naive" else "mpu",
            stages=ranks,
            block_tokens=BLOCK_TOKENS,
            wave_tokens_max=knobs.wave_tokens_max,
            wave_tokens_min=knobs.wave_tokens_min,
            spans_max=knobs.batch,
        )
        self.loop = LoopMachine(
            LoopSettings(
                rank=Rank(rank),
                stages=ranks,
                epoch=Epoch(epoch),
                block_tokens=BLOCK_TOKENS,
                ring_waves=2 * ranks,
                admit_timeout_s=1e9,
                stall_timeout_s=1e9,
                asks_spans_max=knobs.batch if knobs.mode == "naive" else 0,
            ),
            make_planner(planner) if rank == LEADER else None,
        )
        self.device = SimDevice(
            DigestStage(rank, knobs.windows[rank], BLOCK_TOKENS),
            is_first=rank == 0,
            block_tokens=BLOCK_TOKENS,
            later=lambda step: world.steps.after(world.delay_s("device", rank), step),
            pick=world.steps.rng("copies").randrange,
            on_fence=lambda fenced: world.link(
                ("fence", rank), "device", rank, lambda: self.loop_event(fenced)
            ),
            on_output=lambda wave, outputs: world.send_activations(rank, wave, outputs),
            before_write=lambda window, slot, rid: world.checkers.writes(rank, window, slot, rid),
        )
        self._delta_sequence = 0
        self._wave_tick_at: float | None = None
        self._loop_tick_at: float | None = None
        drift = world.steps.rng(f"clock{rank}")
        self._clock_offset_s = drift.random() * knobs.skew_s
        self._clock_rate = 1 + (drift.random() - 0.5) * knobs.skew_rate
        self._started_at = world.steps.now

    # ── clock ────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> Instant:
        elapsed = self._world.steps.now - self._started_at
        return Instant(self._clock_offset_s + elapsed * self._clock_rate)

    def _world_time(self, instant: float) -> float:
        # A hair later, so that rounding never makes a deadline seem not to have come yet.
        elapsed = (instant - self._clock_offset_s) / self._clock_rate
        return self._started_at + elapsed + 1e-9

    # ── WAVE ─────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin rounds."""
        self._arm_wave()

    def wave_event(self, event: OutsideEvent) -> list[Outward]:
        """Hand the WAVE process an event; return what it sent."""
        if self.is_dead:
            return []
        outward = self.inline.handle(event, self._now())
        self._carry_out(outward)
        return outward

    def _carry_out(self, outward: list[Outward]) -> None:
        for command in outward:
            self._perform_wave(command)
        self._report_tree()
        self._world.checkers.after_wave(self.rank)
        self._arm_wave()

    def _perform_wave(self, command: Outward) -> None:  # noqa: PLR0912 (one case a command)
        world, rank = self._world, self.rank
        match command:
            case SendBroadcast(bcast=message):
                world.checkers.broadcast(message)
                for target in range(1, len(world.ranks)):
                    world.send_round(rank, target, message)
            case SendGathered(gathered=message):
                world.checkers.gathered(message)
                for target in range(1, len(world.ranks)):
                    world.send_round(rank, target, message)
            case SendVote(vote=vote):
                world.checkers.voted(vote)
                rng = world.steps.rng("strip")
                chance = world.knobs.strip_chance
                kept = tuple(v for v in vote.votes if rng.random() >= chance)
                # A lost `gone` is voted again only while its cancel is repeated.
                gone = tuple(
                    rid
                    for rid in vote.gone
                    if rid not in world.checkers.rounds.cancelling or rng.random() >= chance
                )
                vote = msgspec.structs.replace(vote, votes=kept, gone=gone)
                world.send_round(rank, 0, vote)
            case SendInstall(install=install):
                world.checkers.installed(rank, install)
                world.tell(install.rid, rank, f"installed at {install.endpoint}, {install.ino}")
                world.link(("install", rank), "install", rank, lambda: self.loop_event(install))
            case SendDrop(rid=rid, ino=ino):
                drop = Drop(rid, ino)
                world.link(("install", rank), "install", rank, lambda: self.loop_event(drop))
            case SendAdmitting(count=count):
                admitting = Admitting(count)
                world.checkers.admitting(count)
                world.link(("install", rank), "install", rank, lambda: self.loop_event(admitting))
            case TellAsker(message=answer):
                world.link(("install", rank), "install", rank, lambda: self.loop_event(answer))
            case ReportRejected(rid=rid, code=code):
                world.report(rank, lambda: world.clients.take_rejected(rid, code))
            case ReportGone(rid=rid):
                world.report(rank, lambda: world.clients.take_gone(rid))
            case Transition():
                world.tell(command.rid, rank, f"{command.new.name}: {command.cause}")
            case _:
                check(
                    isinstance(command, ReportReady | SendCacheView | ShutDown),
                    "a known command",
                    command=command,
                )

    def books(self) -> dict[str, float]:
        """Return everything that the WAVE process counts, but for the frames that it ignored."""
        return self.inline.stats() | {"wavepp_stale_messages_total": 0.0}

    def take_loop(self, message: WaveDone | Freed | Ask) -> None:
        """A report of this rank's own LOOP."""
        if self.is_dead:
            return
        if isinstance(message, WaveDone):
            self._world.checkers.wave_done(self.rank, message)
            self.inline.wave_done(message)
            self._carry_out([])
        elif isinstance(message, Ask):
            self.wave_event(Asked(message.may_refuse))
        else:
            self._world.checkers.freed(self.rank, message.rid)
            self._carry_out(self.inline.freed(message, self._now()))

    def evict(self, window: int, count: int, *, is_host: bool) -> None:
        """An eviction storm hits between two sections."""
        if not self.is_dead:
            self.cache.evict(window, count, is_host=is_host)
            self._report_tree()

    def _report_tree(self) -> None:
        changes = self.cache.drain_changes()
        if changes:
            self._world.checkers.tree_changed(self.rank, changes)
            self._delta_sequence += 1
            delta = KvDelta(self.rank, self._delta_sequence, changes)
            self._world.report(self.rank, lambda: self._world.clients.take_delta(delta))

    def _arm_wave(self) -> None:
        deadline = self.inline.next_deadline()
        if deadline is None:
            return
        when = max(self._world.steps.now, self._world_time(deadline))
        if self._wave_tick_at is not None and self._wave_tick_at <= when:
            return
        self._wave_tick_at = when

        def tick() -> None:
            if self._wave_tick_at == when:
                self._wave_tick_at = None
            self.wave_event(WaveTick())

        self._world.steps.at(when, tick)

    # ── LOOP ─────────────────────────────────────────────────────────────────────────────────

    def loop_event(self, event: LoopEvent) -> None:
        """Hand the LOOP process an event, and soon a Tick."""
        if self.is_dead:
            return
        for command in self.loop.handle(event, self._now()):
            self._perform_loop(command)
        self._world.checkers.after_loop(self.rank)
        self._arm_loop(self._world.steps.now)

    def _arm_loop(self, when: float) -> None:
        if self._loop_tick_at is not None and self._loop_tick_at <= when:
            return
        self._loop_tick_at = when

        def tick() -> None:
            if self._loop_tick_at != when or self.is_dead:
                return
            self._loop_tick_at = None
            for command in self.loop.handle(LoopTick(), self._now()):
                self._perform_loop(command)
            deadline = self.loop.next_deadline()
            if deadline is not None and deadline < 1e8:
                self._arm_loop(max(self._world.steps.now, self._world_time(deadline)))

        self._world.steps.at(when, tick)

    def _perform_loop(self, command: LoopCommand) -> None:
        world, rank = self._world, self.rank
        match command:
            case RunWave():
                self.device.enqueue_wave(command)
            case RunCopies(copies=copies):
                self.device.enqueue_copies(copies)
            case SendToFollowers(message=message):
                world.checkers.scheduled(message)
                for target in world.ranks[1:]:
                    deliver = partial(target.loop_event, message)
                    world.link(("header", target.rank), "header", target.rank, deliver)
            case SendResult(result=result):
                leader = world.ranks[0]
                world.link("result", "result", rank, lambda: leader.loop_event(result))
            case OpenHold():
                world.tell(command.rid, rank, "complete")
                world.holds[rank].open(command)
                world.report(rank, lambda: world.clients.take_ready(rank, command.rid))
            case DropHold(rid=rid):
                world.holds[rank].drop(rid)
            case ToServing(message=finished):
                world.report(rank, lambda: world.clients.take_finished(finished))
            case ToWave(message=message):
                world.link(("done", rank), "done", rank, lambda: self.take_loop(message))
