"""P ranks with all their machines in one process, under a clock that jumps.

    clients ─▶ serving ─▶ WAVE0 ⇄ WAVE_s          every arrow is a FIFO link with drawn delays;
                            │        │            nothing is ordered between links
                          LOOP0 ──▶ LOOP_s ─▶ devices of digests ─▶ holds ─▶ decode workers

The machines are those of production, unchanged.  `checkers` look on from outside; the first thing
that they do not accept ends the world with a `Violation`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence

import msgspec
from msgspec import Struct

from kv_router_hooks.router_view import RouterView
from kv_router_hooks.window_rule import DENSE, WindowRule
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    VoteReceived,
)
from wavepp_worker.base.errors import check
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.executor.events import HoldEnded
from wavepp_worker.sim.checkers import Checkers
from wavepp_worker.sim.clients import Clients
from wavepp_worker.sim.device import Activations
from wavepp_worker.sim.holds import SimHolds
from wavepp_worker.sim.knobs import BLOCK_TOKENS, Knobs, SimOptions, draw_knobs
from wavepp_worker.sim.rank import SimRank
from wavepp_worker.sim.steps import Step, Steps
from wavepp_worker.sim.workload import SimPrompt, family_prompts
from wavepp_worker.wire.mailbox import Announce
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered, RoundVote

END_S = 3_000.0  # of virtual time; far beyond what any world needs
STEPS_PER_REQUEST_MAX = 60_000
PEER_TIMEOUT_S = 0.3  # until a dead rank is noticed
FRAMES_KEPT = 32  # per link, to be repeated
STORY_LINES = 60  # per request; older ones are forgotten
STORY_REQUESTS = 4096
SLOW_FACTOR = 20.0

RoundMessage = RoundBcast | RoundVote | RoundGathered


class Violation(Exception):  # noqa: N818 (a finding, not an error of the program that finds it)
    """Something happened that must not; the text says what, the world has the story."""


class WorldReport(Struct, frozen=True, kw_only=True):
    """What one world did, without anything that differs between two runs of its seed."""

    seed: int
    requests: int
    rounds: int
    steps: int
    virtual_ms: int
    epochs: int
    ends: dict[str, int]
    verdicts: dict[str, int]
    reused_tokens: int
    computed_tokens: int
    read_handoffs: int
    lost_handoffs: int


class World:
    """One seed."""

    def __init__(
        self,
        seed: int,
        options: SimOptions,
        *,
        knobs: Knobs | None = None,
        prompts: list[SimPrompt] | None = None,
        storyteller: bool = True,
    ) -> None:
        self.seed, self.options = seed, options
        self.knobs = knobs or draw_knobs(seed, options)
        self.steps = Steps(seed)
        self._stories: dict[int, deque[str]] | None = {} if storyteller else None
        self._frames: dict[Hashable, deque[RoundMessage]] = defaultdict(
            lambda: deque(maxlen=FRAMES_KEPT)
        )
        self._counted: dict[str, int] = defaultdict(int)
        self.epoch = 0
        self.ranks: list[SimRank] = []
        self.holds: list[SimHolds] = []
        self.router: RouterView
        self.checkers = Checkers(self)
        self._start_epoch()
        if prompts is None:
            prompts = self._draw_prompts()
        self.clients = Clients(self, prompts)
        self._plan_faults()

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> WorldReport:
        """Run until every request has ended and nothing is left.

        Raises:
            Violation: something happened that must not.
        """
        limit = STEPS_PER_REQUEST_MAX * max(1, self.options.requests) + 10_000
        try:
            while not self.clients.is_done:
                check(self.steps.next(), "nothing happens any more, and requests are open")
                check(self.steps.now < END_S, "requests are open after all this time")
                check(self.steps.done_count < limit, "requests are open after so many steps")
            self.checkers.progress()
            self._come_to_rest()
            self.checkers.quiet()
        except Exception as error:  # the worlds' top: a crash of a machine is a finding as well
            raise Violation(f"{type(error).__name__}: {error}") from error
        return self._report()

    def _come_to_rest(self) -> None:
        """Let messages arrive and holds end; heartbeats go on for ever, so look, do not wait."""
        until = self.steps.now + 10 * self.knobs.hold_s + 5.0
        while self.steps.now < until and self.steps.next():
            continue

    def _start_epoch(self) -> None:
        knobs = self.knobs
        self.epoch += 1
        self.steps.forget_worker()
        ranks = range(len(knobs.windows))
        rules = [_rules(specs) for specs in knobs.windows]
        self.router = RouterView(rules, BLOCK_TOKENS)
        self.holds = [SimHolds(self, rank) for rank in ranks]
        self.checkers.new_epoch(rules)
        self.ranks = [SimRank(self, rank, self.epoch) for rank in ranks]
        self.ranks[0].start()

    def restart(self) -> None:
        """End all ranks and begin a new epoch with empty caches."""
        for rank in self.ranks:
            self._count(rank)
        self._start_epoch()
        self.clients.worker_failed()
        self._plan_storms()

    def _plan_faults(self) -> None:
        knobs = self.knobs
        if knobs.restart_at is not None:
            self.steps.at(knobs.restart_at, self.restart, outlives=True)
        if knobs.lost_rank_at is not None:
            rank, when = knobs.lost_rank_at
            self.steps.at(when, lambda: self._lose(rank), outlives=True)
        self._plan_storms()

    def _lose(self, rank: int) -> None:
        """A rank stops for good; the supervisor notices after a while and fails the worker."""
        self.ranks[rank].is_dead = True
        self.steps.after(PEER_TIMEOUT_S, self.restart, outlives=True)

    def _plan_storms(self) -> None:
        if self.knobs.storm_chance:
            self.steps.after(0.01, self._storm)

    def _storm(self) -> None:
        if self.clients.is_done:
            return  # the tail without faults
        rng = self.steps.rng("storm")
        for rank in self.ranks:
            if rng.random() < self.knobs.storm_chance:
                window = rng.randrange(len(self.knobs.windows[rank.rank]))
                rank.evict(window, rng.choice([1, 2, 8]), is_host=rng.random() < 0.3)
        self.steps.after(rng.choice([0.001, 0.01]), self._storm)

    def _draw_prompts(self) -> list[SimPrompt]:
        knobs = self.knobs
        dense = [spec.slots for specs in knobs.windows for spec in specs if spec.is_dense]
        blocks = min(dense, default=30) // knobs.room
        return family_prompts(
            self.steps.rng("prompts"),
            self.options.requests,
            families=knobs.families,
            spread_s=knobs.spread_s,
            block_tokens=BLOCK_TOKENS,
            longest_tokens=(blocks + 2) * BLOCK_TOKENS,
        )

    # ── links ────────────────────────────────────────────────────────────────────────────────

    def delay_s(self, plane: str, rank: int) -> float:
        """Return how long the next thing on this plane takes."""
        knobs = self.knobs
        delay = self.steps.rng(plane).choice(knobs.delays_s)
        is_slow = plane == knobs.slow_plane or rank == knobs.slow_rank
        return delay * SLOW_FACTOR if is_slow else delay

    def link(self, name: Hashable, plane: str, rank: int, step: Step) -> None:
        """Deliver on one FIFO link."""
        self.steps.in_order(name, self.delay_s(plane, rank), step)

    def report(self, rank: int, step: Step) -> None:
        """Deliver to serving; one FIFO per rank."""
        self.link(("report", rank), "report", rank, step)

    def send_front(self, announce: Announce) -> None:
        """Serving to WAVE0."""
        self.link("front", "front", 0, lambda: self.ranks[0].wave_event(Announced(announce)))

    def send_cancel(self, rid: int) -> None:
        """Serving to WAVE0, on the same FIFO."""
        self.link("front", "front", 0, lambda: self.ranks[0].wave_event(CancelRequested(rid)))

    def send_round(self, source: int, target: int, message: RoundMessage) -> None:
        """WAVE to WAVE; the link may repeat an older frame, or bring one of an old epoch."""
        slower = target if source == 0 else source
        name, rng = ("rounds", source, target), self.steps.rng("repeat")
        sent = self._frames[name]
        sent.append(message)
        event = _round_event(message)
        self.link(name, "rounds", slower, lambda: self.ranks[target].wave_event(event))
        if rng.random() < self.knobs.repeat_chance:
            old = _round_event(rng.choice(sent))
            self.link(name, "rounds", slower, lambda: self._deliver_stale(target, old))
        if rng.random() < self.knobs.repeat_chance / 4:
            foreign = _round_event(msgspec.structs.replace(message, epoch=self.epoch - 1))
            self.link(name, "rounds", slower, lambda: self._deliver_stale(target, foreign))

    def _deliver_stale(self, target: int, event: OutsideEvent) -> None:
        """I30, I32: a frame of the past changes nothing, and is answered by nothing."""
        before = self.ranks[target].books()
        outward = self.ranks[target].wave_event(event)
        is_same = outward == [] and self.ranks[target].books() == before
        check(is_same, "a frame of the past has no effect [I30, I32]", outward=outward)

    def send_activations(self, rank: int, wave: int, outputs: Activations) -> None:
        """A device to the next one."""
        if rank + 1 < len(self.ranks):
            target = self.ranks[rank + 1].device
            self.link(
                ("activations", rank), "device", rank,
                lambda: target.take_activations(wave, outputs),
            )  # fmt: skip

    def end_hold(self, rank: int, rid: int) -> None:
        """The hold desk of a rank to its LOOP."""
        self.ranks[rank].loop_event(HoldEnded(rid))

    # ── stories and counts ───────────────────────────────────────────────────────────────────

    def tell(self, rid: int, rank: int, text: str) -> None:
        """Add a line to a request's story; rank -1: outside."""
        if self._stories is None:
            return
        if rid not in self._stories and len(self._stories) >= STORY_REQUESTS:
            del self._stories[next(iter(self._stories))]
        lines = self._stories.setdefault(rid, deque(maxlen=STORY_LINES))
        where = "serving" if rank < 0 else f"rank {rank}"
        lines.append(f"{1e3 * self.steps.now:10.3f} ms  {where:8}  {text}")

    def story(self, rids: Iterable[int]) -> str:
        """Return the stories of some requests."""
        stories = self._stories or {}
        known = [rid for rid in rids if rid in stories]
        return "\n".join("\n".join([f"request {rid}", *stories[rid]]) for rid in known)

    def story_rids(self) -> list[int]:
        """Return the requests with a story."""
        return list(self._stories or {})

    def _count(self, rank: SimRank) -> None:
        stats = rank.inline.stats()
        if rank.rank == 0:
            self._counted["rounds"] += int(stats["wavepp_rounds_total"])
            for name, value in stats.items():
                if name.startswith("wavepp_admission_"):
                    short = name.removeprefix("wavepp_admission_").removesuffix("_total")
                    self._counted[f"verdict {short}"] += int(value)
            self._counted["reused"] += int(stats["wavepp_reused_tokens_total"])
            self._counted["computed"] += int(rank.loop.stats()["wavepp_tokens_computed_total"])

    def _report(self) -> WorldReport:
        for rank in self.ranks:
            self._count(rank)
        ends: dict[str, int] = defaultdict(int)
        for client in self.clients.all.values():
            ends[client.end] += 1
        counted = self._counted
        return WorldReport(
            seed=self.seed,
            requests=len(self.clients.all),
            rounds=counted["rounds"],
            steps=self.steps.done_count,
            virtual_ms=int(1e3 * self.steps.now),
            epochs=self.epoch,
            ends=dict(sorted(ends.items())),
            verdicts={
                name.removeprefix("verdict "): counted[name]
                for name in sorted(counted)
                if name.startswith("verdict ")
            },
            reused_tokens=counted["reused"],
            computed_tokens=counted["computed"],
            read_handoffs=self.clients.read_handoffs,
            lost_handoffs=self.clients.lost_handoffs,
        )


def _rules(specs: Sequence[WindowSpec]) -> list[WindowRule]:
    """Return the router's rule for each window of a rank."""
    return [
        DENSE if s.is_dense else WindowRule(s.needed_blocks(BLOCK_TOKENS) if s.is_sliding else 1)
        for s in specs
    ]


def _round_event(message: RoundMessage) -> OutsideEvent:
    match message:
        case RoundBcast():
            return BroadcastReceived(message)
        case RoundVote():
            return VoteReceived(message)
        case _:
            return GatheredReceived(message)
