"""Observers of a world: they see messages, views and digests, and trust no machine's own word.

Each check names the invariant that it holds up; the first one that fails ends the world.

    agreement      one broadcast, one set of installs, one endpoint, gapless ino   I7 I13 I31 I45
    conservation   free + evictable + reserved + referenced = total, both tiers    I15 I16
    slots          nobody else's slot is written, no held slot changes             I9 I42 I46 I47
    order          first come, first served                                        I26 I27
    answers        equal to the prompt computed cold and alone                     I41 I42
    router         never told more than the reported trees can resume              I-PUBLISH
    end            everything ended once, nothing is left                          I28 I44 I48
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.executor.commands import OpenHold
from wavepp_worker.sim.digest import Content, answer_of, reference
from wavepp_worker.sim.knobs import BLOCK_TOKENS
from wavepp_worker.wire.mailbox import Install, WaveDone
from wavepp_worker.wire.rounds import RecordPhase, RoundBcast, RoundGathered
from wavepp_worker.wire.waves import Release, WaveHeader

if TYPE_CHECKING:
    from wavepp_worker.sim.clients import Client
    from wavepp_worker.sim.world import World

AUDIT_EVERY = 16  # WAVE events between two full audits of a cache; more for a large one
AUDIT_SLOTS = 256
LOOP_AUDIT_EVERY = 4


class _Queued(Struct):
    """A request as the broadcasts and votes show it."""

    rid: int
    seq: int
    attempt: int = 0  # highest opened
    is_open: bool = False
    has_failed: bool = False
    bypasses: int = 0


class Checkers:
    """All observers of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._expected: dict[bytes, tuple[int, list[Content]]] = {}
        self._events = self._loop_events = 0
        slots = max(
            sum(spec.slots + spec.host_slots for spec in specs) for specs in world.knobs.windows
        )
        self._audit_every = AUDIT_EVERY * max(1, slots // AUDIT_SLOTS) ** 2
        self.new_epoch()

    def new_epoch(self) -> None:
        """The worker starts again with empty caches."""
        ranks = len(self._world.knobs.windows)
        self._round = 0
        self._queue: dict[int, _Queued] = {}
        self._hints: dict[int, dict[int, int]] = defaultdict(dict)
        self._cancelled: set[int] = set()
        self.cancelling: set[int] = set()
        """Requests whose cancel record is in the open round."""
        self._installs: dict[int, tuple[int, int]] = {}  # rid -> ino, endpoint
        self._inos = [0] * ranks
        self._admitting = 0
        self._live: list[dict[int, Install]] = [{} for _ in range(ranks)]
        # Per rank: (window, slot) -> requests whose tables or states name it.
        self._named: list[dict[tuple[int, int], set[int]]] = [
            defaultdict(set) for _ in range(ranks)
        ]
        self._wave = 0
        self._released: set[int] = set()
        self._scheduled: dict[int, int] = {}  # rid -> next token to be scheduled

    def _expect(self, tokens: bytes) -> tuple[int, list[Content]]:
        """Return (first answer token, content per stage) of a prompt computed cold and alone."""
        if tokens not in self._expected:
            output, contents = reference(self._world.knobs.windows, BLOCK_TOKENS, tokens)
            self._expected[tokens] = (answer_of(output), contents)
        return self._expected[tokens]

    # ── rounds ───────────────────────────────────────────────────────────────────────────────

    def broadcast(self, bcast: RoundBcast) -> None:
        """The leader begins a round.  [I26, I27]"""
        check(bcast.round == self._round + 1, "rounds are numbered [I31]", round=bcast.round)
        self._round = bcast.round
        self._cancelled.update(bcast.cancels)
        self.cancelling = set(bcast.cancels)
        for entry in bcast.announces:
            self._queue[entry.rid] = _Queued(entry.rid, entry.seq)
        opened = []
        asked = set()
        for record in bcast.records:
            asked.add(record.rid)
            queued = self._queue.get(record.rid)
            if queued is None:
                continue  # admitted, and the leader has not said so yet: an old record
            is_new = record.phase == RecordPhase.LEASE and record.attempt > queued.attempt
            if is_new and not queued.is_open:
                opened.append(queued)
            queued.attempt = max(queued.attempt, record.attempt)
            queued.has_failed |= record.phase == RecordPhase.RELEASE
        for queued in self._queue.values():
            queued.is_open = queued.rid in asked
        if not self._world.knobs.hint_refine:
            for queued in opened:
                self._check_order(queued)

    def _check_order(self, opened: _Queued) -> None:
        """Nothing is selected past an older request that could be, or that was refused.  [I27]"""
        ranks = len(self._world.ranks)
        for other in self._queue.values():
            is_waiting = (
                other.seq < opened.seq
                and not other.is_open
                and other.rid not in self._cancelled
                and len(self._hints[other.rid]) == ranks
                and not self._has_left(other.rid)
            )
            check(
                not is_waiting,
                "a younger request was selected past a waiting one [I27]",
                older=other.rid,
                younger=opened.rid,
            )

    def _has_left(self, rid: int) -> bool:
        client = self._world.clients.all.get(rid)
        return client is None or client.cancelled

    def gathered(self, gathered: RoundGathered) -> None:
        """The leader has all votes.  [I7]"""
        ranks = len(self._world.ranks)
        check(len(gathered.votes) == ranks, "every rank votes in every round [I31]")
        for vote in gathered.votes:
            for hint in vote.hints:
                check(hint.endpoint % BLOCK_TOKENS == 0, "hints end on blocks [I5]", rid=hint.rid)
                self._hints[hint.rid][vote.rank] = hint.endpoint

    def admitting(self, count: int) -> None:
        """WAVE0 told LOOP0 how many attempts are open.  [I26]"""
        batch = self._world.knobs.batch
        check(0 <= count <= batch, "at most K attempts are open [I26]", count=count)

    # ── installs ─────────────────────────────────────────────────────────────────────────────

    def installed(self, rank: int, install: Install) -> None:
        """A rank has materialised a request.  [I13, I23, I45]"""
        rid, world = install.rid, self._world
        check(install.ino == self._inos[rank] + 1, "ino has no gaps [I45]", rank=rank, rid=rid)
        self._inos[rank] = install.ino
        seen = self._installs.setdefault(rid, (install.ino, install.endpoint))
        check(
            seen == (install.ino, install.endpoint),
            "admitted at one endpoint under one ino [I13, I45]",
            rank=rank,
            rid=rid,
            seen=seen,
            now=(install.ino, install.endpoint),
        )
        if rank == 0:
            if len(world.ranks) > 1:  # a single rank sends no rounds that could be seen
                self._note_bypasses(rid)
                del self._queue[rid], self._hints[rid]
            self._scheduled[rid] = install.endpoint
        specs = world.knobs.windows[rank]
        blocks = -(-install.prompt_tokens // BLOCK_TOKENS)
        check(len(install.tables) == len(specs), "one table per window", rid=rid)
        for window, (spec, table) in enumerate(zip(specs, install.tables, strict=True)):
            check(len(table) == (0 if spec.is_recurrent else blocks), "table length", rid=rid)
            if spec.is_dense:
                check(len(set(table)) == blocks, "a slot per block [I23]", rid=rid)
            for slot in table:
                if slot >= 0:
                    self._named[rank][window, slot].add(rid)
        for states in install.states:
            for slot in (states.working, *(slot for _, slot in states.snapshots)):
                holders = self._named[rank][states.window, slot]
                check(not holders, "a state slot has one holder [I46]", rid=rid, others=holders)
                holders.add(rid)
        self._live[rank][rid] = install

    def _note_bypasses(self, rid: int) -> None:
        """At most K-1 younger requests pass a request that has failed once.  [A51]"""
        admitted = self._queue[rid]
        for other in self._queue.values():
            if self._has_left(other.rid):
                continue
            if other.has_failed and other.seq < admitted.seq:
                other.bypasses += 1
                check(
                    other.bypasses < self._world.knobs.batch,
                    "too many younger requests passed one that had failed [I27]",
                    rid=other.rid,
                )

    def wave_done(self, rank: int, done: WaveDone) -> None:
        """A rank's WAVE takes snapshots that were written: their slots leave the sequence. [I46]"""
        for rid, point in done.snapshots:
            for states in self._live[rank][rid].states:
                slot = dict(states.snapshots).get(point)
                if slot is not None:
                    self._named[rank][states.window, slot].discard(rid)

    def freed(self, rank: int, rid: int) -> None:
        """A rank's LOOP gave a request's slots back.  [I48]"""
        install = self._live[rank].pop(rid, None)
        check(install is not None, "Freed once per Install [I48]", rank=rank, rid=rid)
        if install is None:
            return
        named = self._named[rank]
        for window, table in enumerate(install.tables):
            for slot in table:
                if slot >= 0:
                    named[window, slot].discard(rid)
        for states in install.states:
            for slot in (states.working, *(slot for _, slot in states.snapshots)):
                named[states.window, slot].discard(rid)

    # ── execution ────────────────────────────────────────────────────────────────────────────

    def scheduled(self, message: WaveHeader | Release) -> None:
        """LOOP0 emitted something for all ranks.  [I33, I34]"""
        if isinstance(message, Release):
            self._released.add(message.rid)
            return
        check(message.wave == self._wave + 1, "waves are numbered [I38]", wave=message.wave)
        self._wave = message.wave
        check(message.tokens <= message.budget, "a wave fits its budget [I33]", wave=message.wave)
        for span in message.spans:
            check(span.rid not in self._released, "no span after Release [I34]", rid=span.rid)
            expected = self._scheduled[span.rid]
            check(span.start == expected, "spans are contiguous [I34]", rid=span.rid)
            self._scheduled[span.rid] = span.start + span.length

    def writes(self, rank: int, window: int, slot: int, rid: int) -> None:
        """A wave of `rid` is about to write a slot.  [I9, I46]"""
        holders = self._named[rank].get((window, slot), set())
        check(
            holders <= {rid},
            "a wave writes a slot that another request uses [I46]",
            rank=rank,
            window=window,
            slot=slot,
            rid=rid,
            others=holders,
        )

    def held(self, rank: int, command: OpenHold) -> None:
        """A finished cache is offered, read or given up: it must be what it was.  [I42, I46]"""
        world = self._world
        prompt = world.clients.all[command.rid].prompt
        _, contents = self._expect(prompt.tokens)
        working = [states.working for states in command.states]
        found = world.ranks[rank].device.stage.content(command.tables, working, command.tokens)
        check(
            found == contents[rank],
            "a held cache differs from the prompt computed alone [I42, I46]",
            rank=rank,
            rid=command.rid,
        )

    def answered(self, client: Client) -> None:
        """Serving sends the terminal chunk.  [I42, I49]"""
        check(not client.cancelled, "no answer after Cancel [I49]", rid=client.rid)
        expected, _ = self._expect(client.prompt.tokens)
        finished = client.finished
        check(
            finished is not None and finished.token == expected,
            "a wrong first token [I42]",
            rid=client.rid,
            endpoint=finished.endpoint if finished else None,
        )

    # ── caches and router ────────────────────────────────────────────────────────────────────

    def after_wave(self, rank: int) -> None:
        """A WAVE process handled an event: audit its books now and then.  [I1-I25]"""
        self._events += 1
        if self._events % self._audit_every == 0:
            self._audit(rank)

    def after_loop(self, rank: int) -> None:
        """A LOOP process handled an event: audit its books now and then.  [I38, I41]"""
        self._loop_events += 1
        if self._loop_events % LOOP_AUDIT_EVERY == 0:
            self._world.ranks[rank].loop.check_invariants()

    def _audit(self, rank: int) -> None:
        owner = self._world.ranks[rank] if rank < len(self._world.ranks) else None
        if owner is None:
            return  # the worker is just being built
        owner.cache.check_invariants()
        owner.inline.machine.check_invariants()
        view = owner.cache.view()
        for window in range(len(view.total)):
            for parts, total in (
                ((view.free, view.cached, view.referenced), view.total),
                ((view.host_free, view.host_cached, view.host_referenced), view.host_total),
            ):
                reserved = (view.reserved if total is view.total else view.host_reserved)[window]
                check(
                    sum(part[window] for part in parts) + reserved == total[window],
                    "slots are conserved [I16]",
                    rank=rank,
                    window=window,
                )

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def progress(self) -> None:
        """Every request has ended exactly once.  [I28]"""
        for client in self._world.clients.all.values():
            check(bool(client.end), "a request never ended [I28]", rid=client.rid)

    def quiet(self) -> None:
        """Nothing is left anywhere.  [I44, I48]"""
        world = self._world
        for rank in world.ranks:
            if rank.is_dead:
                continue
            number = rank.rank
            self._audit(number)
            view = rank.cache.view()
            left = (view.lease_count, view.escrow_count, view.sequence_count)
            check(left == (0, 0, 0), "leases, escrows or sequences are left [I44]", rank=number)
            check(not any(view.referenced), "references are left [I44]", rank=number)
            check(not any(view.reserved), "reservations are left [I44]", rank=number)
            check(not any(view.host_referenced), "host references are left [I44]", rank=number)
            check(not any(view.host_reserved), "host destinations are left [I20]", rank=number)
            check(rank.loop.is_idle, "the executor holds something [I44]", rank=number)
            check(rank.device.is_idle, "the device has work left [I47]", rank=number)
            check(not world.holds[number].open_count, "a hold is left [I44]", rank=number)
            check(
                rank.device.copies_done == rank.device.copies_enqueued,
                "every copy ran once [I47]",
                rank=number,
            )
            check(not self._live[number], "every Install was freed [I48]", rank=number)
            known = rank.inline.machine.stats()["wavepp_requests"]
            check(known == 0, "a rank remembers requests [I44]", rank=number, known=known)
        self._router_is_right()

    def _router_is_right(self) -> None:
        """What the router knows is exactly what all ranks can resume, to its end.  [I-PUBLISH]"""
        world = self._world
        told = set(world.router.published_keys())
        held = [rank.cache.view().keys for rank in world.ranks if not rank.is_dead]
        for number, keys in enumerate(held):
            for window, spec in enumerate(world.knobs.windows[number]):
                if spec.is_dense:
                    missing = told - set(keys[window])
                    check(not missing, "the router knows a block that is not held", rank=number)
