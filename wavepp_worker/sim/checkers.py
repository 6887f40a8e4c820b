"""Observers of a world: they see messages, views and digests, and trust no machine's own word.

Each check names the invariant that it holds up; the first one that fails ends the world.

    rounds_watch   agreement, order, progress: from broadcasts and votes     I7 I11-I13 I26-I28 I31
    pins_watch     prefixes stay put from lease to hold: votes and deltas    I8 I9
    router_watch   the router knows what all ranks can resume, not more      I-PUBLISH
    slots          nobody else's slot is written, no held slot changes       I9 I42 I46 I47
    conservation   free + evictable + reserved + referenced = total          I15 I16
    answers        equal to the prompt computed cold and alone               I41 I42
    end            everything ended once, nothing is left                    I28 I44 I48
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_router_hooks.window_rule import WindowRule
from wavepp_worker.base.errors import check
from wavepp_worker.executor.commands import OpenHold
from wavepp_worker.sim.digest import Content, answer_of, reference
from wavepp_worker.sim.knobs import BLOCK_TOKENS
from wavepp_worker.sim.pins_watch import PinsWatch
from wavepp_worker.sim.rounds_watch import RoundsWatch
from wavepp_worker.sim.router_watch import RouterWatch
from wavepp_worker.wire.mailbox import Install, KvDelta, WaveDone
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered, RoundVote
from wavepp_worker.wire.waves import Release, WaveHeader

if TYPE_CHECKING:
    from wavepp_worker.sim.clients import Client
    from wavepp_worker.sim.world import World

AUDIT_EVERY = 16  # WAVE events between two full audits of a cache; more for a large one
AUDIT_SLOTS = 256
LOOP_AUDIT_EVERY = 4  # the same of LOOP events
PINS_RANKS_MAX = 16  # ranks whose pins are watched


class Checkers:
    """All observers of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._expected: dict[bytes, tuple[int, list[Content]]] = {}
        self._events = self._loop_events = 0
        slots = max(
            sum(spec.slots + spec.host_slots for spec in specs) for specs in world.knobs.windows
        )
        scale = max(1, slots // AUDIT_SLOTS)
        self._audit_every, self._loop_audit_every = AUDIT_EVERY * scale**2, LOOP_AUDIT_EVERY * scale

    def new_epoch(self, rules: Sequence[Sequence[WindowRule]]) -> None:
        """The worker starts, or starts again, with empty caches.

        Args:
            rules: what the router knows of each rank's windows.
        """
        knobs, ranks = self._world.knobs, len(self._world.knobs.windows)
        self.rounds = RoundsWatch(
            ranks=ranks,
            batch=knobs.batch,
            block_tokens=BLOCK_TOKENS,
            has_refinement=knobs.hint_refine,
            loses_votes=bool(knobs.strip_chance),
            has_left=self._has_left,
        )
        spacing = max(1, ranks // PINS_RANKS_MAX)  # of many ranks, some
        self._pins = {
            rank: PinsWatch(rank, knobs.windows[rank], BLOCK_TOKENS, self._keys_of)
            for rank in range(0, ranks, spacing)
        }
        self._router = RouterWatch(rules)
        self._live: list[dict[int, Install]] = [{} for _ in range(ranks)]
        # Per rank: (window, slot) -> requests whose tables or states name it.
        self._named: list[dict[tuple[int, int], set[int]]] = [
            defaultdict(set) for _ in range(ranks)
        ]
        self._wave = 0
        self._released: set[int] = set()
        self._scheduled: dict[int, int] = {}  # rid -> next token to be scheduled

    def _keys_of(self, rid: int) -> bytes:
        return self._world.clients.all[rid].prompt.keys

    def _has_left(self, rid: int) -> bool:
        client = self._world.clients.all.get(rid)
        return client is None or client.cancelled

    def _expect(self, tokens: bytes) -> tuple[int, list[Content]]:
        """Return (first answer token, content per stage) of a prompt computed cold and alone."""
        if tokens not in self._expected:
            output, contents = reference(self._world.knobs.windows, BLOCK_TOKENS, tokens)
            self._expected[tokens] = (answer_of(output), contents)
        return self._expected[tokens]

    # ── rounds ───────────────────────────────────────────────────────────────────────────────

    def broadcast(self, bcast: RoundBcast) -> None:
        """The leader begins a round."""
        self.rounds.broadcast(bcast)
        self._pins[0].ordered(bcast.records, bcast.cancels)

    def voted(self, vote: RoundVote) -> None:
        """A rank votes, before any link touches it."""
        self.rounds.voted(vote)
        if vote.rank in self._pins:
            self._pins[vote.rank].voted(vote, self.rounds.records)

    def gathered(self, gathered: RoundGathered) -> None:
        """The leader has all votes, its own among them."""
        self.voted(gathered.votes[0])
        self.rounds.gathered(gathered)

    def tree_changed(self, rank: int, changes: Sequence[tuple[bool, int, bytes]]) -> None:
        """A rank reports changes of its tree, right after them."""
        if rank in self._pins:
            self._pins[rank].changed(changes)

    def admitting(self, count: int) -> None:
        """WAVE0 told LOOP0 how many attempts are open.  [I26]"""
        knobs = self._world.knobs
        most = knobs.batch if knobs.mode == "leases" else 1
        check(0 <= count <= most, "at most K attempts are open [I26]", count=count)

    # ── installs ─────────────────────────────────────────────────────────────────────────────

    def installed(self, rank: int, install: Install) -> None:
        """A rank has materialised a request.  [I13, I23, I45]"""
        rid, world = install.rid, self._world
        self.rounds.installed(rank, rid, install.ino, install.endpoint)
        if rank in self._pins:
            self._pins[rank].installed(rid, install.endpoint)
        if rank == 0:
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
        if rank in self._pins:
            self._pins[rank].freed(rid)
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
        if self._loop_events % self._loop_audit_every == 0:
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

    def announced(self, keys: Sequence[bytes]) -> None:
        """Serving tells the router's view of a prompt."""
        self._router.learn(keys)

    def delta_taken(self, delta: KvDelta) -> None:
        """Serving has applied a delta.  [I-PUBLISH]"""
        if self._router.apply(delta.rank, delta.changes):
            self._look_at_router()

    def _look_at_router(self) -> None:
        self._router.compare(self._world.router.published_keys())

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
        if not any(rank.is_dead for rank in world.ranks):
            self._look_at_router()
            if len(world.ranks) > 1:
                self.rounds.quiet()
            for pins in self._pins.values():
                pins.quiet()
