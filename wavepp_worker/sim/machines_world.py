"""A worker of P ranks in one process, moved one atomic step at a time by whoever drives it.

    serving ──▶ WAVE0 ◀─ rounds: one FIFO per direction and rank ─▶ WAVE_s
                  │ Install, Drop                                     │ Install
                LOOP0 ── waves, releases: one FIFO per rank ──▶ LOOP_s
                           WaveDone, Freed of a rank ──▶ its WAVE

Every rank runs the production seam (`InlineRank` on a `RankCache`).  A step is one message
delivered, one wave done, one request freed, one round begun; `steps()` names those that are
possible now, in an order that makes the first of them a fair schedule.  Links may be as slow as
the driver likes.  What is checked after each step is visible from outside: Installs, broadcasts,
records and the caches' counts.  `explore` tries all orders, `machines_admission` draws some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from msgspec import Struct

from wavepp_worker.admission.commands import (
    Outward,
    ReportGone,
    ReportRejected,
    Section,
    SendBroadcast,
    SendDrop,
    SendGathered,
    SendInstall,
    SendVote,
)
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    SectionResult,
    SequenceFreed,
    Tick,
    VoteReceived,
)
from wavepp_worker.admission.sections import InlineRank, run_section
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.machines_observer import Observer
from wavepp_worker.sim.machines_slots import Prefix, SlotModel
from wavepp_worker.wire.mailbox import Announce, Install, WaveDone

SCOPE = scope_key("small world")
EPOCH = 1
ROUND_S = 1.0  # all spacings alike: what matters is the order of steps, not their distance


class Step(NamedTuple):
    """One thing that happens.

    kind      rank               other
    deliver   of the sender      receiving rank
    wave      that runs it
    freed     that frees         request
    arrive    0                  request
    emit      0                  request
    cancel    0                  request
    evict, evict_host            window, of rank
    tick      0
    """

    kind: str
    rank: int
    other: int = 0
    evict_before: int = -1
    """Evict a block of `window` right before this section of the event."""
    window: int = 0


class WorldSpec(Struct, frozen=True, kw_only=True):
    """One worker and how it may be disturbed.

    Attributes:
        windows: per rank, its cache windows.
        headroom_tokens: what the leader's check keeps free.
        snapshot_interval_tokens: I_snap.
        evictions: how many times one block may be evicted at any moment, even between the
            sections of one event.
        cancels: how many requests may be cancelled.
        has_instant_loop: LOOP runs and frees whatever it can after each step, so that only the
            rounds plane and the disturbances are left to be ordered.
    """

    windows: tuple[tuple[WindowSpec, ...], ...]
    block_tokens: int = 1
    batch_requests_max: int = 4
    headroom_tokens: int = 0
    floor_fraction: float = 0.0
    floor_headroom_blocks: int = 0
    snapshot_interval_tokens: int = 1
    auto_commit: bool = True
    evictions: int = 0
    cancels: int = 0
    has_instant_loop: bool = False

    @property
    def stages(self) -> int:
        """P."""
        return len(self.windows)


@dataclass
class Loop:
    """LOOP of one rank."""

    slots: SlotModel
    headers: deque[tuple[str, int, int, int]] = field(default_factory=deque)
    """(kind, request, its install number, end of its chunk)."""
    ending: set[int] = field(default_factory=set)  # Freed may be sent any time


class SmallWorld:
    """P ranks and their LOOPs; the driver chooses every step.

    Attributes:
        make_cache: builds the cache under test from (windows, block tokens, floors); replace it
            to try another cache.
    """

    make_cache: ClassVar[Callable[..., RankCache]] = RankCache

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self.now = 0.0
        self.ranks = [self._make_rank(rank) for rank in range(spec.stages)]
        self.loops = [Loop(SlotModel(windows, spec.block_tokens)) for windows in spec.windows]
        self.links: dict[tuple[int, int], deque[OutsideEvent]] = {
            link: deque() for rank in range(1, spec.stages) for link in ((0, rank), (rank, 0))
        }
        self.coming: dict[int, Prefix] = {}  # arrive in this order, at any time
        self.prompts: dict[int, Prefix] = {}
        self.lanes: list[int] = []  # LOOP0: installed, nothing emitted yet
        self.ended: dict[int, str] = {}  # rid -> "gone" or the code of its rejection
        self.cancelled: set[int] = set()
        self.evictions_left, self.cancels_left = spec.evictions, spec.cancels
        self.delivered: dict[tuple[int, int], OutsideEvent] = {}  # the last one of each link
        self._unstored: frozenset[tuple[int, int]] = frozenset()
        self.observer = Observer(spec.stages, spec.batch_requests_max)

    def _make_rank(self, rank: int) -> InlineRank:
        spec = self.spec
        settings = AdmissionSettings(
            rank=rank,
            stages=spec.stages,
            epoch=EPOCH,
            block_tokens=spec.block_tokens,
            headroom_tokens=spec.headroom_tokens,
            floor_fraction=spec.floor_fraction,
            floor_headroom_blocks=spec.floor_headroom_blocks,
            snapshot_interval_tokens=spec.snapshot_interval_tokens,
            batch_requests_max=spec.batch_requests_max,
            round_min_s=ROUND_S,
            round_active_s=ROUND_S,
            round_idle_s=ROUND_S,
            round_quiet_s=ROUND_S,
            auto_commit=spec.auto_commit,
        )
        make_cache = type(self).make_cache
        cache = make_cache(
            spec.windows[rank],
            spec.block_tokens,
            spec.floor_fraction,
            spec.floor_headroom_blocks,
            check_always=True,  # every section, not only every step
        )
        return InlineRank(settings, cache)

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def steps(self) -> Iterator[Step]:
        """Yield what may happen next; following the first one always ends every request."""
        if self.coming:
            yield Step("arrive", 0, next(iter(self.coming)))
        for (source, target), messages in self.links.items():
            if messages:
                yield Step("deliver", source, target)
        yield from self._loop_steps()
        if self.ranks[0].next_deadline() is not None:
            yield Step("tick", 0)

    def _loop_steps(self) -> Iterator[Step]:
        for rank, loop in enumerate(self.loops):
            if loop.headers and self._is_runnable(rank):
                yield Step("wave", rank)
        for rid in self.lanes:
            yield Step("emit", 0, rid)
        for rank, loop in enumerate(self.loops):
            for rid in sorted(loop.ending):
                yield Step("freed", rank, rid)

    def lone_step(self) -> Step | None:
        """Return a step that commutes with everything that can happen: a vote that is not the last.

        The leader only puts it aside, so it need not be tried at every later moment.
        """
        if self.ranks[0].machine.round_started_at is None:
            return None
        under_way = [rank for rank in range(1, self.spec.stages) if self.links[rank, 0]]
        awaited = self.spec.stages - len(self.ranks[0].machine._votes)
        return Step("deliver", under_way[0], 0) if under_way and awaited > 1 else None

    def disturbances(self) -> Iterator[Step]:
        """Yield what may, but need not, happen next."""
        if self.cancels_left:
            for rid in self.prompts:
                if rid not in self.ended and rid not in self.cancelled:
                    yield Step("cancel", 0, rid)
        if self.evictions_left:
            for rank, inline in enumerate(self.ranks):
                for window, spec in enumerate(self.spec.windows[rank]):
                    if inline.cache.view().keys[window]:
                        yield Step("evict", rank, window)
                        if spec.host_slots:
                            yield Step("evict_host", rank, window)

    def do(self, step: Step) -> int:
        """Carry out one step and check what it shows; return how many sections it ran."""
        sections = self._do(step)
        if self.spec.has_instant_loop:
            while (due := next(self._loop_steps(), None)) is not None:
                self._do(due)
        for inline in self.ranks:
            inline.cache.drain_changes()
        return sections

    def repeat(self, link: tuple[int, int]) -> None:
        """A link delivers its last message again; nobody answers.  [I30]"""
        event = self.delivered[link]
        commands = self.ranks[link[1]].machine.handle(event, Instant(self.now))
        check(not commands, "a repeated message is answered [I30]", commands=commands)

    def warm(self, *prompts: Prefix, unstored: Collection[tuple[int, int]] = ()) -> None:
        """Serve requests, one after the other and undisturbed, so that their prefixes are cached.

        Args:
            unstored: (rank, snapshot point) that this rank fails to store.
        """
        left = self.evictions_left, self.cancels_left
        self.evictions_left = self.cancels_left = 0
        self._unstored = frozenset(unstored)
        for rid, prompt in enumerate(prompts, start=1):
            self.coming = {-rid: prompt}
            while not self.is_over:
                self.do(next(self.steps()))
        self.check_end()
        self.evictions_left, self.cancels_left = left
        self._unstored = frozenset()
        self.prompts.clear()
        self.ended.clear()

    def _do(self, step: Step) -> int:
        rank, other = step.rank, step.other
        match step.kind:
            case "deliver":
                event = self.delivered[rank, other] = self.links[rank, other].popleft()
                return self._tell(other, event, step)
            case "tick":
                self.now = max(self.now, self.ranks[0].next_deadline() or 0.0)
                return self._tell(0, Tick(), step)
            case "wave":
                self._run_header(rank)
            case "emit":
                self._emit(other)
            case "freed":
                self.loops[rank].ending.remove(other)
                self.loops[rank].slots.end(other)
                self.observer.free(rank, other)
                self.ranks[rank].cache.free(other)
                return self._tell(rank, SequenceFreed(other), step)
            case "cancel":
                self.cancels_left -= 1
                self.cancelled.add(other)
                return self._tell(0, CancelRequested(other), step)
            case "evict":
                self._evict(rank, other)
            case "evict_host":
                self._evict(rank, other, is_host=True)
            case "arrive":
                self.arrive(other, self.coming.pop(other))
        return 0

    def arrive(self, rid: int, prompt: Prefix) -> None:
        """Serving announces a request."""
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
        keys = sequence_keys(tokens, self.spec.block_tokens, SCOPE)
        self.prompts[rid] = prompt
        self._tell(0, Announced(Announce(rid, len(prompt), keys, tokens)), Step("arrive", 0))

    @property
    def is_over(self) -> bool:
        """Whether every request has ended and no message is under way."""
        is_silent = not any(self.links.values()) and not any(loop.headers for loop in self.loops)
        is_between_rounds = self.ranks[0].next_deadline() is not None
        is_silent &= not self.coming
        return is_silent and is_between_rounds and self.ended.keys() == self.prompts.keys()

    def check_end(self) -> None:
        """Everything is given back, on every rank.  [I14, I28, I44]"""
        for rank, (inline, loop) in enumerate(zip(self.ranks, self.loops, strict=True)):
            view = inline.cache.view()
            held = (view.lease_count, view.escrow_count, view.sequence_count)
            check(held == (0, 0, 0), "held at the end [I44]", rank=rank, view=view)
            check(not any(view.referenced), "referenced at the end [I44]", view=view)
            check(not any(view.reserved), "reserved at the end [I44]", view=view)
            check(not any(view.host_referenced), "referenced at the end [I44]", view=view)
            check(not any(view.host_reserved), "reserved at the end [I44]", view=view)
            check(not inline.machine._replica.requests, "requests at the end", rank=rank)
            check(not loop.slots.live, "running at the end [I48]", rank=rank)
            inline.cache.check_invariants()

    # ── WAVE ─────────────────────────────────────────────────────────────────────────────────

    def _tell(self, rank: int, event: OutsideEvent, step: Step) -> int:
        """Let a rank handle one event, section by section."""
        inline, count = self.ranks[rank], 0
        due: OutsideEvent | SectionResult | None = event
        while due is not None:
            commands = inline.machine.handle(due, Instant(self.now))
            due = None
            for command in commands:
                if isinstance(command, Section):
                    if count == step.evict_before:
                        self._evict(rank, step.window)
                    due = run_section(inline.cache, command)
                    count += 1
                else:
                    self._carry_out(rank, command)
        inline.machine.check_invariants()
        self.observer.books(inline)
        return count

    def _evict(self, rank: int, window: int, *, is_host: bool = False) -> None:
        if self.ranks[rank].cache.evict(window, 1, is_host=is_host):
            self.evictions_left -= 1

    def _carry_out(self, rank: int, command: Outward) -> None:
        match command:
            case SendBroadcast(bcast=bcast):
                self.observer.broadcast(bcast, self.ended.keys() | self.cancelled)
                self._send_all(BroadcastReceived(bcast))
            case SendGathered(gathered=gathered):
                self._send_all(GatheredReceived(gathered))
            case SendVote(vote=vote):
                self.links[rank, 0].append(VoteReceived(vote))
            case SendInstall(install=install):
                self._install(rank, install)
            case SendDrop(rid=rid, ino=ino):
                if rid in self.lanes:
                    self.lanes.remove(rid)
                for loop in self.loops:
                    loop.headers.append(("release", rid, ino, 0))
            case ReportGone(rid=rid):
                self._end(rid, "gone")
            case ReportRejected(rid=rid, code=code):
                self._end(rid, code)

    def _send_all(self, event: OutsideEvent) -> None:
        for rank in range(1, self.spec.stages):
            self.links[0, rank].append(event)

    def _end(self, rid: int, code: str) -> None:
        check(rid not in self.ended, "a request ends once", rid=rid)
        was_run = rid in self.observer.admitted
        check(was_run or code != "gone" or rid in self.cancelled, "gone, never run", rid=rid)
        self.ended[rid] = code
        self.observer.forget(rid)

    # ── LOOP ─────────────────────────────────────────────────────────────────────────────────

    def _install(self, rank: int, install: Install) -> None:
        rid = install.rid
        self.observer.install(rank, install)
        self.loops[rank].slots.install(rid, install.ino, self.prompts[rid], install)
        if rank == 0:
            self.lanes.append(rid)
            if not self.cancels_left and not self.cancelled:
                self._emit(rid)  # a Drop is the only thing that could come in between

    def _emit(self, rid: int) -> None:
        """LOOP0 sends all waves of one request; chunks end at its snapshot points."""
        self.lanes.remove(rid)
        running, size = self.loops[0].slots.live[rid], len(self.prompts[rid])
        points = self.observer.snapshot_points[rid]
        stops = [point for point in points if running.endpoint < point < size] + [size]
        for loop in self.loops:
            loop.headers.extend(("wave", rid, running.ino, stop) for stop in stops)

    def _is_runnable(self, rank: int) -> bool:
        """A wave waits for its Install; so does a Release, unless all of it is over."""
        kind, rid, ino, _ = self.loops[rank].headers[0]
        slots = self.loops[rank].slots
        return rid in slots.live or (kind == "release" and ino <= slots.ino)

    def _run_header(self, rank: int) -> None:
        loop = self.loops[rank]
        kind, rid, _, stop = loop.headers.popleft()
        if kind == "release":
            if rid in loop.slots.live:
                loop.ending.add(rid)
            return
        stored = loop.slots.run(rid, stop)
        points = tuple(point for point in stored if (rank, point) not in self._unstored)
        loop.slots.published(rid, points)
        done = WaveDone(0, ((rid, stop),), tuple((rid, point) for point in points))
        self.ranks[rank].wave_done(done)
        if stop == len(self.prompts[rid]):
            loop.ending.add(rid)
