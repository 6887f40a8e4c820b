"""Seeded worlds of P ranks: real RankCache, delayed links, evictions, cancels, repeats.

One heap of steps on a virtual clock; `random.Random(seed)` is the only randomness.  Every rank
runs the production seam (`InlineRank`).  The LOOP side is a small model of algorithms 12-16: waves
and releases share one FIFO per rank and wait for the Install they name.  The checkers look from
outside at broadcasts, votes, Installs and the caches' counts.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator

import msgspec
import pytest

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
    Transition,
)
from wavepp_worker.admission.decide import Action, Verdict
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    ShutdownRequested,
    Tick,
    ViewRequested,
    VoteReceived,
)
from wavepp_worker.admission.machine import AdmissionMachine
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.admission.settings import AdmissionSettings, Spacing
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.outcomes import Committed, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.mailbox import Announce, Freed, Sampling, WaveDone
from wavepp_worker.wire.rounds import (
    ROUNDS,
    Record,
    RecordPhase,
    RoundBcast,
    RoundGathered,
    RoundVote,
)

BLOCK_TOKENS = 4
EPOCH = 7
SCOPE = scope_key("world")
SEEDS = 800
END_S = 60.0  # of virtual time; far beyond what any world needs


class FlakyCache(RankCache):
    """Refuses now and then without need: the only way to see a failing solo attempt here."""

    def __init__(
        self,
        *,
        chance: float,
        rng: random.Random,
        slots: int,
        fraction: float,
        seems_sparse: bool,
    ) -> None:
        super().__init__([WindowSpec(slots=slots)], BLOCK_TOKENS, fraction, 4)
        self.chance = chance
        self.rng = rng
        self.seems_sparse = seems_sparse

    @property
    def is_sparse(self) -> bool:
        return self.seems_sparse

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        if not no_floor and self.rng.random() < self.chance:
            self.release(rid)
            return Shortfall((1,), self.capacity_generation)
        return super().prepare(rid, no_floor=no_floor)

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        if not no_floor and self.rng.random() < self.chance / 2:
            return Shortfall((1,), self.capacity_generation)
        return super().commit(rid, endpoint, no_floor=no_floor)


class Loop:
    """LOOP of one rank: waves and releases in FIFO order, each after the Install it names."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.installed: set[int] = set()
        self.ended: set[int] = set()
        self.fifo: deque[tuple[str, int, int, bool]] = deque()  # kind, rid, end, is_last
        self.ino = 0

    def install(self, rid: int, ino: int) -> None:
        assert ino == self.ino + 1, "installs have gaps"  # I45
        self.ino = ino
        self.installed.add(rid)
        self.work()

    def work(self) -> None:
        world = self.world
        while self.fifo and self.fifo[0][1] in self.installed:
            kind, rid, end, is_last = self.fifo.popleft()
            if kind == "wave":
                assert rid not in self.ended, "a wave after Release"
                done = WaveDone(0, ((rid, end),))
                world.to_wave(self.rank, lambda done=done: world.ranks[self.rank].wave_done(done))
                if is_last:
                    hold = world.rng.choice([0.0, 0.002, 0.03])
                    world.after(hold, lambda rid=rid: self.end(rid))
            else:
                self.end(rid)

    def end(self, rid: int) -> None:
        if rid in self.ended:
            return  # the hold and a Release crossed
        self.ended.add(rid)
        world = self.world
        world.to_wave(self.rank, lambda: world.take(self.rank, freed=rid))


class World:
    """P ranks, one workload."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.now = 0.0
        self.steps: list[tuple[float, int, Callable[[], object]]] = []
        self.step_count = 0
        self.fifo_at: dict[object, float] = {}
        self.stages = rng.choice([1, 2, 2, 3, 4])
        self.batch = rng.choice([1, 2, 4, 6])
        self.slots = [rng.randint(14, 40) for _ in range(self.stages)]
        self.headroom = rng.choice([0, 2, 6, 12]) * BLOCK_TOKENS
        fraction = rng.choice([0.0, 0.1, 0.25])
        flaky = rng.choice([0.0, 0.0, 0.0, 0.15, 0.5])
        auto_commit = rng.random() < 0.7
        self.strip_chance = rng.choice([0.0, 0.0, 0.1])
        self.repeat_chance = rng.choice([0.0, 0.1])
        self.storm_chance = rng.choice([0.0, 0.2, 0.6])  # evictions between hint and lease
        seems_sparse = rng.random() < 0.3  # trims do not commit in the same step
        self.ranks: list[InlineRank] = []
        for rank in range(self.stages):
            settings = AdmissionSettings(
                rank=rank,
                stages=self.stages,
                epoch=EPOCH,
                block_tokens=BLOCK_TOKENS,
                snapshot_interval_tokens=4 * BLOCK_TOKENS,
                headroom_tokens=self.headroom,
                floor_fraction=fraction,
                floor_headroom_blocks=4,
                batch_requests_max=self.batch,
                round_min_s=0.001,
                round_active_s=0.002,
                round_idle_s=0.01,
                round_quiet_s=0.1,
                auto_commit=auto_commit,
            )
            cache = FlakyCache(
                chance=flaky,
                rng=random.Random(f"{seed} {rank}"),
                slots=self.slots[rank],
                fraction=fraction,
                seems_sparse=seems_sparse and rank == self.stages - 1,
            )
            inline = InlineRank(settings, cache)
            self.ranks.append(inline)
            self.observe(rank, inline)
        self.loops = [Loop(self, rank) for rank in range(self.stages)]
        self.total_tokens = min(self.slots) * BLOCK_TOKENS
        self.frames: dict[tuple[int, int], list[bytes]] = defaultdict(list)
        # what the checkers saw
        self.applied: list[list[RoundBcast]] = [[] for _ in range(self.stages)]
        self.candidates: dict[tuple[int, int], int | None] = {}
        self.hints: dict[int, dict[int, int]] = defaultdict(dict)
        self.hints_at: dict[int, int] = {}  # rank 0's merges
        self.installs: dict[int, tuple[int, int]] = {}  # rid -> ino, endpoint
        self.admitted: set[int] = set()  # by the leader
        self.bypasses: Counter[int] = Counter()
        self.chains: dict[int, Record] = {}
        self.failed: set[int] = set()  # released at least once
        self.announced_in: dict[int, int] = {}  # rid -> round, in seq order
        self.cancelled: set[int] = set()
        self.ended: dict[int, str] = {}  # rid -> gone or the code of the rejection
        self.prompts: dict[int, bytes] = {}
        self.dropped: set[int] = set()
        self.views = 0
        self.ready: list[int] = []
        self.admitting = 0
        self.stopped: set[int] = set()
        self.ticks = 0
        self.loop_lanes: dict[int, int] = {}  # LOOP0: rid -> position

    # ── steps and links ──────────────────────────────────────────────────────────────────────

    def at(self, when: float, step: Callable[[], object]) -> None:
        self.step_count += 1
        heapq.heappush(self.steps, (when, self.step_count, step))

    def after(self, delay: float, step: Callable[[], object]) -> None:
        self.at(self.now + delay, step)

    def in_order(self, link: object, step: Callable[[], object]) -> None:
        """Deliver on one FIFO with a random delay."""
        delay = self.rng.choice([0.0001, 0.0005, 0.001, 0.004])
        when = max(self.fifo_at.get(link, 0.0), self.now + delay)
        self.fifo_at[link] = when
        self.at(when, step)

    def to_wave(self, rank: int, step: Callable[[], object]) -> None:
        self.in_order(("loop", rank), step)

    def send(
        self, source: int, target: int, message: RoundBcast | RoundVote | RoundGathered
    ) -> None:
        """Carry a rounds message; the link may repeat an older frame, or one of an old epoch."""
        frame = ROUNDS.encode(message)
        link = ("rounds", source, target)
        sent = self.frames[source, target]
        sent.append(frame)
        self.in_order(link, lambda: self.receive(target, frame))
        if self.rng.random() < self.repeat_chance:
            old = self.rng.choice(sent)
            self.in_order(link, lambda: self.receive_stale(target, old))
        if self.rng.random() < self.repeat_chance / 4:
            foreign = ROUNDS.encode(msgspec.structs.replace(message, epoch=EPOCH - 1))
            self.in_order(link, lambda: self.receive_stale(target, foreign))

    def receive(self, target: int, frame: bytes) -> None:
        self.take(target, as_event(frame))

    def receive_stale(self, target: int, frame: bytes) -> None:
        """I30, I32: a frame of the past changes nothing and is answered by nothing."""
        before = self.picture(target)
        outward = self.ranks[target].handle(as_event(frame), Instant(self.now))
        assert outward == []
        assert self.picture(target) == before

    def picture(self, rank: int) -> object:
        machine, cache = self.ranks[rank].machine, self.ranks[rank].cache
        requests = [
            (r.rid, r.phase, r.attempt, r.endpoint, r.hint, dict(r.hints), len(r.answers))
            for r in machine._replica.requests.values()
        ]
        return (
            requests,
            machine._replica.round,
            machine._replica.ino,
            set(machine._votes),
            cache.view(),
        )

    # ── one rank ─────────────────────────────────────────────────────────────────────────────

    def take(self, rank: int, event: OutsideEvent | None = None, freed: int | None = None) -> None:
        inline, now = self.ranks[rank], Instant(self.now)
        outward = inline.freed(Freed(freed), now) if freed is not None else []
        if event is not None:
            outward = inline.handle(event, now)
        for command in outward:
            self.carry_out(rank, command)
        self.check_rank(rank)

    def carry_out(self, rank: int, command: Outward) -> None:
        match command:
            case SendBroadcast(bcast=message) | SendGathered(gathered=message):
                assert rank == 0
                for target in range(1, self.stages):
                    self.send(0, target, message)
            case SendVote(vote=vote):
                assert rank != 0
                kept = tuple(v for v in vote.votes if self.rng.random() >= self.strip_chance)
                self.send(rank, 0, msgspec.structs.replace(vote, votes=kept))
            case SendInstall(install=install):
                rid = install.rid
                assert install.tokens == (self.prompts[rid] if rank == 0 else b"")
                expected = Sampling(seed=rid) if rank == self.stages - 1 else None
                assert install.sampling == expected
                seen = self.installs.setdefault(rid, (install.ino, install.endpoint))
                assert seen == (install.ino, install.endpoint)  # I13, I45
                blocks = -(-install.prompt_tokens // BLOCK_TOKENS)
                assert [len(set(table)) for table in install.tables] == [blocks]
                self.loops[rank].install(rid, install.ino)
                if rank == 0:
                    self.admitted.add(rid)
                    self.loop_lanes[rid] = install.endpoint
                    self.after(
                        self.rng.random() * 0.01, lambda: self.emit(rid, install.prompt_tokens)
                    )
            case SendDrop(rid=rid, ino=ino):
                assert rank == 0 and self.installs[rid][0] == ino and rid not in self.dropped
                self.dropped.add(rid)
                self.loop_lanes.pop(rid, None)
                for target in range(self.stages):
                    self.to_loop(target, ("release", rid, 0, False))
            case SendAdmitting(count=count):
                assert rank == 0 and 0 <= count <= self.batch and count != self.admitting
                self.admitting = count
            case ReportReady(total_tokens=total_tokens):
                self.ready.append(total_tokens)
            case ReportRejected(rid=rid, code=code):
                assert rid not in self.ended
                self.ended[rid] = code
            case ReportGone(rid=rid):
                assert rid not in self.ended
                self.ended[rid] = "gone"
            case SendCacheView():
                self.views += 1
            case ShutDown():
                self.stopped.add(rank)
            case Transition():
                pass

    def emit(self, rid: int, prompt_tokens: int) -> None:
        """LOOP0 schedules one chunk of one request."""
        if rid not in self.loop_lanes:
            return
        start = self.loop_lanes[rid]
        end = min(prompt_tokens, start + self.rng.choice([2, 5, 100]) * BLOCK_TOKENS)
        self.loop_lanes[rid] = end
        for target in range(self.stages):
            self.to_loop(target, ("wave", rid, end, end == prompt_tokens))
        if end < prompt_tokens:
            self.after(self.rng.random() * 0.005, lambda: self.emit(rid, prompt_tokens))

    def to_loop(self, rank: int, message: tuple[str, int, int, bool]) -> None:
        def arrive() -> None:
            self.loops[rank].fifo.append(message)
            self.loops[rank].work()

        self.in_order(("header", rank), arrive)

    # ── checkers ─────────────────────────────────────────────────────────────────────────────

    def observe(self, rank: int, inline: InlineRank) -> None:
        replica = inline.machine._replica
        apply, merge = replica.apply, replica.merge

        def seen_apply(bcast, now):  # type: ignore[no-untyped-def]
            self.applied[rank].append(bcast)
            if bcast.records and self.rng.random() < self.storm_chance:
                inline.cache.evict(0, self.rng.choice([1, 2, 5]))
            if rank == 0:
                self.check_bcast(bcast)
            return (yield from apply(bcast, now))

        def seen_merge(gathered, now):  # type: ignore[no-untyped-def]
            verdicts = yield from merge(gathered, now)
            self.check_merge(rank, gathered, verdicts)
            return verdicts

        replica.apply, replica.merge = seen_apply, seen_merge  # type: ignore[method-assign]

    def check_rank(self, rank: int) -> None:
        """I14, I29: leases, escrows and sequences are those of open attempts and admissions."""
        inline = self.ranks[rank]
        inline.machine.check_invariants()
        if rank == 0:
            assert 0 <= inline.machine.oldest_wait_s(Instant(self.now)) <= self.now
        requests = inline.machine._replica.requests.values()
        holding = sum(r.is_holding for r in requests)
        stats = inline.cache.stats()
        assert stats["wavepp_lease_count"] == stats["wavepp_escrow_count"] == holding
        admitted = sum(r.phase is Phase.ADMITTED for r in requests)
        assert stats["wavepp_sequence_count"] == admitted

    def check_counters(self, machine: AdmissionMachine) -> None:
        """Each round has one spacing; nothing is admitted without an attempt."""
        stats = machine.stats()
        spaced = [n for name, n in stats.items() if name.startswith("wavepp_spaced_rounds_total")]
        assert len(spaced) == len(Spacing)
        assert sum(spaced) - stats["wavepp_rounds_total"] in (0, 1)  # of a shutdown
        assert stats["wavepp_admitted_attempts_total"] >= stats["wavepp_admitted_total"]

    def check_bcast(self, bcast: RoundBcast) -> None:
        for entry in bcast.announces:
            self.announced_in[entry.rid] = bcast.round
        records = {record.rid: record for record in bcast.records}
        assert len(records) == len(bcast.records) <= self.batch  # I26
        assert not set(records) & set(bcast.cancels)
        for record in bcast.records:
            last = self.chains.get(record.rid)
            if record == last:
                continue
            if last is None or last.phase == RecordPhase.RELEASE:
                assert record.phase == RecordPhase.LEASE
                self.check_order(record.rid, records, bcast.round)
            elif record.phase == RecordPhase.COMMIT:
                assert record.endpoint <= last.endpoint
            elif record.phase != RecordPhase.RELEASE:
                assert record.endpoint < last.endpoint, (last, record)  # I11
            assert record.attempt >= (last.attempt if last else 1)
            self.chains[record.rid] = record
            if record.phase == RecordPhase.RELEASE:
                self.failed.add(record.rid)

    def check_order(self, rid: int, records: dict[int, Record], number: int) -> None:
        """I27: whoever is older and known is being tried too; bypasses are few; solo is alone."""
        failed = self.failed & records.keys()
        assert not failed or records.keys() == failed == {rid}, f"{failed} not alone with {rid}"
        for older, announced in self.announced_in.items():
            if older == rid:
                break
            if older in self.admitted or older in self.cancelled or older in self.ended:
                continue
            assert older in records, f"{rid} passes {older}"
            assert announced < number
            if self.chains.get(older) is not None:
                self.bypasses[older] += 1
                assert self.bypasses[older] <= self.batch - 1
            assert records[older].phase != RecordPhase.RELEASE, f"{rid} passes failed {older}"

    def check_merge(
        self, rank: int, gathered: RoundGathered, verdicts: dict[Record, Verdict]
    ) -> None:
        for request in self.ranks[rank].machine._replica.requests.values():
            key = (gathered.round, request.rid)
            assert self.candidates.setdefault(key, request.candidate) == request.candidate  # I7
        if rank == 0:
            for vote in gathered.votes:
                for hint in vote.hints:
                    self.hints[hint.rid][vote.rank] = hint.endpoint
        for request in self.ranks[rank].machine._replica.requests.values():
            if rank == 0 and len(self.hints[request.rid]) == self.stages:
                assert request.candidate == min(self.hints[request.rid].values())  # I7
        for record, verdict in verdicts.items():
            if verdict.action is Action.ADMIT:  # I13
                votes = [next(a for a in v.votes if a.rid == record.rid) for v in gathered.votes]
                assert {(v.attempt, v.endpoint, v.is_committed) for v in votes} == {
                    (votes[0].attempt, votes[0].endpoint, True)
                }

    # ── workload ─────────────────────────────────────────────────────────────────────────────

    def plan(self) -> None:
        rng = self.rng
        families = [rng.randbytes(4 * 40 * BLOCK_TOKENS) for _ in range(rng.choice([1, 2, 3]))]
        when = 0.0
        for rid in range(100, 100 + rng.randint(4, 16)):
            when += rng.choice([0.0, 0.0005, 0.003, 0.02, 0.15])
            longest = min(self.slots) + (1 if rng.random() < 0.05 else 0)
            blocks = rng.randint(1, longest) if rng.random() < 0.5 else rng.randint(1, 8)
            size = max(1, blocks * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS))
            shared = rng.choice([0, rng.randint(0, size), size, size]) * 4
            tokens = (rng.choice(families)[:shared] + rng.randbytes(4 * size))[: 4 * size]
            self.prompts[rid] = tokens
            keys = sequence_keys(tokens, BLOCK_TOKENS, SCOPE)
            announce = Announce(rid, size, keys, tokens, Sampling(seed=rid))
            self.at(when, lambda announce=announce: self.take(0, Announced(announce)))
            if rng.random() < 0.1:
                self.at(when, lambda announce=announce: self.announce_again(announce))
            if rng.random() < 0.3:
                delay = rng.choice([0.0, 0.0005, 0.002, 0.006, 0.02, 0.1])
                self.at(when + delay, lambda rid=rid: self.cancel(rid))
        for _ in range(rng.choice([0, 3, 12])):
            rank = rng.randrange(self.stages)
            count = rng.choice([1, 4, 50])
            self.at(
                rng.random() * (when + 0.05),
                lambda rank=rank, count=count: self.ranks[rank].cache.evict(0, count),
            )
        self.at(when / 2, lambda: self.take(0, ViewRequested(3)))

    def announce_again(self, announce: Announce) -> None:
        """A live request's announce changes nothing; an ended one's id is never reused."""
        if announce.rid not in self.ended:
            self.take(0, Announced(announce))

    def cancel(self, rid: int) -> None:
        self.cancelled.add(rid)
        self.take(0, CancelRequested(rid))
        self.take(0, CancelRequested(rid))

    def run(self) -> None:
        self.plan()
        while not self.is_over():
            deadline = self.ranks[0].next_deadline()
            step_at = self.steps[0][0] if self.steps else END_S
            if deadline is not None and deadline <= step_at:
                self.now = max(self.now, deadline)
                self.ticks += 1
                self.take(0, Tick())
            else:
                self.now = step_at
                heapq.heappop(self.steps)[2]()
            assert self.now < END_S, f"no progress: {self.stuck()}"  # I28

    def is_over(self) -> bool:
        return not self.steps and len(self.ended) == len(self.prompts) and bool(self.prompts)

    def stuck(self) -> object:
        leader = self.ranks[0].machine._leader
        return leader and (leader.requests, leader.queue.pending.keys(), leader._votes)

    def check_end(self) -> None:
        """Everything is gone, nothing leaked, and the plane is back to its heartbeat."""
        self.check_counters(self.ranks[0].machine)
        for rid, code in self.ended.items():
            fits = -(-len(self.prompts[rid]) // (4 * BLOCK_TOKENS)) <= min(self.slots)
            assert fits or code != "gone" or rid in self.cancelled
            assert code in ("gone", "prompt_too_long_for_cache")
            assert fits or rid not in self.admitted
            if fits and rid not in self.cancelled:
                assert rid in self.admitted  # I28
        first = [(b.round, b.records, b.cancels) for b in self.applied[0]]
        for rank, inline in enumerate(self.ranks):
            log = [(b.round, b.records, b.cancels) for b in self.applied[rank]]
            assert log == first[: len(log)] and len(first) - len(log) <= 1  # I31
            inline.cache.check_invariants()
            view = inline.cache.view()
            assert view.lease_count == view.escrow_count == view.sequence_count == 0
            assert view.referenced == view.reserved == (0,)
            assert inline.machine._replica.requests == {}
            assert inline.machine._replica.prompts == {}
        assert self.ready == [self.total_tokens]
        assert self.views == self.stages
        assert self.admitting == 0
        leader = self.ranks[0].machine._leader
        assert leader is not None
        assert leader.requests == leader.queue.pending == leader.queue.running == {}
        ticks, now = self.ticks, self.now
        while self.now < now + 1.0:
            self.advance()
        assert self.ticks - ticks <= 11  # T_quiet = 0.1 s
        self.take(0, ShutdownRequested("end"))
        while len(self.stopped) < self.stages:
            self.advance()

    def advance(self) -> None:
        deadline = self.ranks[0].next_deadline()
        if self.steps and (deadline is None or self.steps[0][0] < deadline):
            self.now, _, step = heapq.heappop(self.steps)
            step()
        else:
            assert deadline is not None
            self.now = max(self.now, deadline)
            self.ticks += 1
            self.take(0, Tick())


def as_event(frame: bytes) -> OutsideEvent:
    message = ROUNDS.decode(frame)
    if isinstance(message, RoundBcast):
        return BroadcastReceived(message)
    if isinstance(message, RoundVote):
        return VoteReceived(message)
    return GatheredReceived(message)


def worlds(seeds: range) -> Iterator[World]:
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
            world.check_end()
        except AssertionError as error:
            raise AssertionError(f"World({seed}) at {world.now:.4f}: {error}") from error
        yield world


@pytest.mark.parametrize("part", range(4))
def test_worlds_agree_progress_and_end_empty(part: int) -> None:
    reached: Counter[str] = Counter()
    for world in worlds(range(part * SEEDS // 4, (part + 1) * SEEDS // 4)):
        for name, value in world.ranks[0].machine.stats().items():
            reached[name.removeprefix("wavepp_admission_").removesuffix("_total")] += int(value)
        reached["stale"] += sum(
            int(r.machine.stats()["wavepp_stale_messages_total"]) for r in world.ranks
        )
        reached["cancelled_pending"] += len(world.cancelled - world.admitted)
        reached["reused"] += sum(endpoint > 0 for _, endpoint in world.installs.values())
        for name in ["substitutions", "cut_claims", "commit_shortfalls", "prepare_shortfalls"]:
            reached[name] += sum(int(r.cache.stats()[f"wavepp_{name}_total"]) for r in world.ranks)
    for name in [*Action, "solo", "last_resort", "oversized", "cancel", "drop", "reject"]:
        assert reached[name] > 0, f"{name} was never reached: {reached}"
    for name in ["stale", "cancelled_pending", "reused"]:
        assert reached[name] > 0, f"{name} was never reached: {reached}"
