"""A rank's cache under any order of sections, against a model of prefixes and counts.

The model knows which prefixes are published and in which slot, what every lease pins, what every
escrow promises, and which prefix's state every slot holds.  A wave "writes" the slots of its
sequence; reading one that holds something else is a wrong answer served to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from wavepp_worker.base.types import KEY_BYTES
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.cache.hashing import scope_key, sequence_keys, split_keys
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache, Shortfall
from wavepp_worker.cache.window import WindowSpec

SCOPE = scope_key("machine")
Prefix = tuple[int, ...]

NEXT = {
    "known": "acquire",
    "leased": "prepare",
    "prepared": "commit",
    "committed": "materialize",
    "sequence": "publish",
    "published": "free",
}
FRACTIONS = (0.0, 0.1, 0.3)
FAMILIES = ((0,) * 64, (0,) * 9 + (1,) * 55, (2,) * 64)  # two share a stem of nine tokens
SECTIONS = {
    "known": ("acquire", "forget"),
    "leased": ("prepare", "prepare", "trim", "acquire", "release"),
    "prepared": ("commit", "commit", "trim", "acquire", "release"),
    "committed": ("materialize", "materialize", "commit", "acquire", "release"),
    "sequence": ("publish", "publish", "free"),
    "published": ("publish", "free"),
}


T = TypeVar("T")


class Choose(Protocol):
    """Picks one of several equally good values: Hypothesis, or a seeded generator."""

    def __call__(self, choices: Sequence[T], /) -> T: ...


def drawn_from(data: st.DataObject) -> Choose:
    return lambda choices: data.draw(st.sampled_from(choices))


@dataclass
class Request:
    prompt: Prefix
    attempt: int = 0
    lease: int | None = None  # endpoint in tokens
    promised: int | None = None  # blocks per window
    is_committed: bool = False
    has_failed_here: bool = False
    tables: tuple[tuple[int, ...], ...] = ()
    adopted: int = 0
    done: int = 0


@dataclass
class Window:
    slots: int
    floor: int
    slot_of: dict[Prefix, int] = field(default_factory=dict)  # published prefixes
    content: dict[int, Prefix] = field(default_factory=dict)  # what a wave wrote last


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.lists(st.integers(8, 20) | st.integers(8, 64), min_size=1, max_size=2),
        block=st.integers(1, 4),
        fraction=st.sampled_from(FRACTIONS),
        warm=st.lists(st.integers(0, 2), max_size=4),
    )
    def start(
        self,
        slots: list[int],
        block: int,
        fraction: float,
        warm: list[int],
    ) -> None:
        """An empty cache, or one that has served a prompt of each family in `warm`."""
        self.block = block
        self.longest = block * min(*(count // 2 for count in slots), 16)
        self.cache = RankCache(
            [WindowSpec(slots=count) for count in slots], block, fraction, 6, check_always=True
        )
        self.windows = [Window(count, floor_blocks(count, fraction, 6)) for count in slots]
        self.requests: dict[int, Request] = {}
        self.prefix_of: dict[bytes, Prefix] = {}
        self.next_rid, self.ino = 1, 0
        for family in warm:
            self.advance(self.announce(FAMILIES[family][: self.longest]), len(NEXT))

    # ── the model ────────────────────────────────────────────────────────────────────────────

    def depth(self, window: Window, prompt: Prefix, blocks_max: int) -> int:
        """Published leading blocks of `prompt`."""
        blocks = 0
        while blocks < blocks_max and prompt[: (blocks + 1) * self.block] in window.slot_of:
            blocks += 1
        return blocks

    def walk(self, prompt: Prefix, cap: int) -> int:
        blocks_max = min((len(prompt) - 1) // self.block, cap // self.block)
        return self.block * min(self.depth(w, prompt, blocks_max) for w in self.windows)

    def held(self, number: int) -> set[int]:
        """Slots that leases and sequences reference."""
        window = self.windows[number]
        found: set[int] = set()
        for request in self.requests.values():
            if request.tables:
                found |= set(request.tables[number])
            elif request.lease:
                ends = range(self.block, request.lease + 1, self.block)
                found |= {window.slot_of[request.prompt[:end]] for end in ends}
        return found

    def available(self) -> list[int]:
        promised = sum(request.promised or 0 for request in self.requests.values())
        return [
            window.slots - len(self.held(number)) - promised
            for number, window in enumerate(self.windows)
        ]

    def demand(self, request: Request, endpoint: int) -> int:
        return -(-len(request.prompt) // self.block) - endpoint // self.block

    def room(self, extra: int, no_floor: bool) -> bool:
        return all(
            have - extra >= (0 if no_floor else window.floor)
            for have, window in zip(self.available(), self.windows, strict=True)
        )

    def follow_changes(self, publisher: Request | None = None) -> None:
        """Replay the change log: prefix-closed at every instant.  [I2]"""
        for is_stored, number, key in self.cache.drain_changes():
            prefix = self.prefix_of[key]
            slot_of = self.windows[number].slot_of
            parent = prefix[: -self.block]
            if is_stored:
                assert publisher is not None
                assert prefix not in slot_of
                assert not parent or parent in slot_of
                assert publisher.prompt[: len(prefix)] == prefix
                slot_of[prefix] = publisher.tables[number][len(prefix) // self.block - 1]
            else:
                assert not any(
                    other[: len(prefix)] == prefix and other != prefix for other in slot_of
                )
                del slot_of[prefix]

    def phase(self, request: Request) -> str:
        if request.tables:
            return "published" if request.done == len(request.prompt) else "sequence"
        if request.lease is None:
            return "known"
        if request.promised is None:
            return "leased"
        return "committed" if request.is_committed else "prepared"

    def content_free(self) -> object:
        view = self.cache.view()
        return view.keys, self.cache.index_version

    @rule(data=st.data())
    @precondition(lambda self: len(self.requests) < 12)
    def arrive(self, data: st.DataObject) -> None:
        self.do_arrive(drawn_from(data))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.requests))
    def act(self, data: st.DataObject) -> None:
        self.do_act(drawn_from(data))

    @rule(data=st.data())
    @precondition(lambda self: bool(self.requests))
    def hint(self, data: st.DataObject) -> None:
        self.do_hint(drawn_from(data))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.do_evict(drawn_from(data))

    # ── sections, each compared with the model ───────────────────────────────────────────────

    def do_arrive(self, choose: Choose) -> None:
        """A request, new or like an earlier one, gets up to six phases far."""
        family = choose(FAMILIES)
        stem, tail = choose(range(self.longest + 1)), choose(range(3 * self.block + 1))
        prompt = (family[:stem] + (choose((7, 8, 9)),) * tail)[: self.longest]
        self.advance(self.announce(prompt or (0,)), choose(range(len(NEXT) + 1)))

    def do_act(self, choose: Choose) -> None:
        """Any section that is allowed for some request."""
        rid = choose(sorted(self.requests))
        request = self.requests[rid]
        self.do(choose(SECTIONS[self.phase(request)]), rid, request, choose)

    def advance(self, rid: int, steps_count: int) -> None:
        """The straight way: no cap, floors, everything published."""
        for _ in range(steps_count):
            if rid in self.requests:
                request = self.requests[rid]
                self.do(NEXT[self.phase(request)], rid, request, None)

    def do(self, section: str, rid: int, request: Request, choose: Choose | None) -> None:
        run: Callable[[int, Request, Choose | None], None] = getattr(self, f"do_{section}")
        run(rid, request, choose)
        self.counts_agree()

    def announce(self, prompt: Prefix) -> int:
        raw = b"".join(token.to_bytes(4, "little") for token in prompt)
        keys = sequence_keys(raw, self.block, SCOPE)
        for index, key in enumerate(split_keys(keys)):
            prefix = prompt[: (index + 1) * self.block]
            assert self.prefix_of.setdefault(key, prefix) == prefix
        assert len(keys) == KEY_BYTES * (len(prompt) // self.block)
        self.cache.learn(self.next_rid, len(prompt), keys)
        self.requests[self.next_rid] = Request(prompt)
        self.next_rid += 1
        return self.next_rid - 1

    def do_hint(self, choose: Choose) -> None:
        rid, cap = choose(sorted(self.requests)), choose((None, *range(60)))
        before = self.cache.view()
        endpoint = self.cache.hint(rid, cap)
        assert endpoint == self.walk(self.requests[rid].prompt, 1000 if cap is None else cap)
        assert self.cache.view() == before  # [I6]

    def do_acquire(self, rid: int, request: Request, choose: Choose | None) -> None:
        content, room = self.content_free(), self.available()
        generation, is_news = self.cache.capacity_generation, not request.has_failed_here
        self.forget_attempt(request)
        has_risen = any(now > then for now, then in zip(self.available(), room, strict=True))
        cap = choose((1000, *range(0, 60, self.block))) if choose else 1000
        deepest = self.walk(request.prompt, cap)
        request.attempt += 1
        endpoint = self.cache.acquire(rid, request.attempt, cap)
        assert endpoint % self.block == 0
        request.lease = deepest
        has_room = min(self.available()) >= 0  # for every victim that the whole path would claim
        assert endpoint == deepest if has_room else endpoint < deepest  # [I8, X4]
        request.lease = endpoint
        assert min(self.available()) >= 0
        assert self.cache.capacity_generation - generation == int(has_risen and is_news)
        assert self.content_free() == content  # [I19]

    def forget_attempt(self, request: Request) -> None:
        request.lease = request.promised = None
        request.is_committed = request.has_failed_here = False

    def do_trim(self, rid: int, request: Request, choose: Choose | None) -> None:
        assert request.lease is not None
        content, before = self.content_free(), request.lease
        room, generation = self.available(), self.cache.capacity_generation
        cap = choose(range(before + 1)) if choose else 0
        endpoint = self.cache.trim(rid, cap)
        assert endpoint == min(before, cap - cap % self.block)  # [I10]
        lost = self.demand(request, endpoint) - self.demand(request, before)
        assert lost * self.block == before - endpoint  # [I25]
        request.lease = endpoint
        self.check_news(room, generation)
        assert self.content_free() == content

    def do_prepare(self, rid: int, request: Request, choose: Choose | None) -> None:
        assert request.lease is not None
        content, generation = self.content_free(), self.cache.capacity_generation
        need = self.demand(request, request.lease)
        no_floor = choose((False, True)) if choose else False
        is_possible = self.room(need, no_floor)
        outcome = self.cache.prepare(rid, no_floor=no_floor)
        if is_possible:
            assert outcome == Prepared(request.lease)
            request.promised = need
            assert self.room(0, no_floor)  # [I24]
        else:
            assert isinstance(outcome, Shortfall)
            assert outcome.generation == generation
            self.forget_attempt(request)  # [I14], compared in `counts_agree`
        assert self.cache.capacity_generation == generation
        assert self.content_free() == content

    def do_commit(self, rid: int, request: Request, choose: Choose | None) -> None:
        assert request.lease is not None
        assert request.promised is not None
        content, generation = self.content_free(), self.cache.capacity_generation
        need = self.demand(request, request.lease)
        no_floor = choose((False, True)) if choose else False
        is_possible = request.is_committed or self.room(need - request.promised, no_floor)
        before = self.reservations()
        outcome = self.cache.commit(rid, request.lease, no_floor=no_floor)
        if is_possible:
            assert outcome == Committed(request.lease)
            is_repeated, request.promised, request.is_committed = request.is_committed, need, True
            assert is_repeated or self.room(0, no_floor)  # [I24]
        else:
            assert isinstance(outcome, Shortfall)
            assert outcome.generation == generation
            assert self.reservations() == before  # [I18]
            request.has_failed_here = True
        assert self.cache.capacity_generation == generation
        assert self.content_free() == content

    def reservations(self) -> object:
        """Every slot's references, owner and age, and every escrow's list, in order."""
        cache = self.cache
        slots = [
            (block.refs, block.owner, block.key, block.age)
            for pool in cache._pools
            for block in pool._blocks
        ]
        escrows = [
            (rid, escrow.endpoint, escrow.is_committed, [list(held) for held in escrow.reserved])
            for rid, escrow in cache._escrows.items()
        ]
        return slots, escrows, cache.view()

    def do_release(self, rid: int, request: Request, choose: Choose | None) -> None:
        content, room = self.content_free(), self.available()
        generation = self.cache.capacity_generation
        has_failed_here = request.has_failed_here
        self.cache.release(rid)
        self.forget_attempt(request)
        self.check_news(room, generation, is_news=not has_failed_here)
        assert self.content_free() == content

    def do_materialize(self, rid: int, request: Request, choose: Choose | None) -> None:
        assert request.lease is not None
        room, generation = self.available(), self.cache.capacity_generation
        in_use = [self.held(number) for number in range(len(self.windows))]
        adopted = request.lease // self.block
        expected = [
            [window.slot_of[request.prompt[: (i + 1) * self.block]] for i in range(adopted)]
            for window in self.windows
        ]
        self.ino += 1
        installed = self.cache.materialize(rid, self.ino)  # never fails  [I22]
        assert installed.endpoint == request.lease
        for number, table in enumerate(installed.tables):
            assert list(table[:adopted]) == expected[number]
            own = set(table[adopted:])
            assert len(own) == self.demand(request, request.lease)  # [I23]
            assert own.isdisjoint(in_use[number])  # [I46]
            content = self.windows[number].content
            for index, slot in enumerate(table[:adopted]):
                assert content[slot] == request.prompt[: (index + 1) * self.block]
        request.adopted, request.done = adopted, request.lease
        self.forget_attempt(request)
        request.tables = installed.tables
        self.follow_changes()
        assert self.available() == room  # the promise is used up, not exceeded  [I23]
        assert self.cache.capacity_generation == generation

    def do_publish(self, rid: int, request: Request, choose: Choose | None) -> None:
        whole = len(request.prompt)
        end = choose((whole, *range(request.done, whole))) if choose else whole
        request.done = end
        for window, table in zip(self.windows, request.tables, strict=True):
            for index in range(request.adopted, -(-end // self.block)):
                window.content[table[index]] = request.prompt[: (index + 1) * self.block]
        self.cache.publish(rid, end)
        self.follow_changes(publisher=request)
        for window in self.windows:
            full = end // self.block
            assert self.depth(window, request.prompt, full) == full

    def do_free(self, rid: int, request: Request, choose: Choose | None) -> None:
        for window, table in zip(self.windows, request.tables, strict=True):
            for index in range(-(-request.done // self.block)):
                prefix = request.prompt[: (index + 1) * self.block]
                is_whole = len(prefix) <= request.done
                assert not is_whole or window.content[table[index]] == prefix  # what is read
        room, generation = self.available(), self.cache.capacity_generation
        self.cache.free(rid)
        del self.requests[rid]
        self.check_news(room, generation)
        self.cache.forget(rid)

    def do_forget(self, rid: int, request: Request, choose: Choose | None) -> None:
        self.cache.forget(rid)
        del self.requests[rid]

    def do_evict(self, choose: Choose) -> None:
        number, count = choose(range(len(self.windows))), choose(range(1, 9))
        generation, room = self.cache.capacity_generation, self.available()
        self.cache.evict(number, count)
        self.follow_changes()
        assert self.available() == room
        assert self.cache.capacity_generation == generation

    def check_news(self, room: list[int], generation: int, *, is_news: bool = True) -> None:
        """capacity_generation grew exactly if some window's room rose.  [algorithms 8.4]"""
        has_risen = any(now > then for now, then in zip(self.available(), room, strict=True))
        assert self.cache.capacity_generation - generation == int(has_risen and is_news)

    # ── after every rule ─────────────────────────────────────────────────────────────────────

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        view, available = self.cache.view(), self.available()
        promised = sum(request.promised or 0 for request in self.requests.values())
        phases = [self.phase(request) for request in self.requests.values()]
        for number, window in enumerate(self.windows):
            assert {self.prefix_of[key] for key in view.keys[number]} == set(window.slot_of)
            assert view.referenced[number] == len(self.held(number))
            assert view.reserved[number] == promised
            assert view.free[number] + view.cached[number] == available[number]
        assert self.cache.available_tokens() == self.block * min(available)
        assert view.sequence_count == phases.count("sequence") + phases.count("published")
        assert view.escrow_count == phases.count("prepared") + phases.count("committed")
        assert view.lease_count == view.escrow_count + phases.count("leased")

    def teardown(self) -> None:
        """After the last request nothing is held.  [I14, I44]"""
        if not hasattr(self, "cache"):
            return
        for rid, request in list(self.requests.items()):
            if request.tables:
                self.cache.free(rid)
            self.cache.release(rid)
            self.cache.forget(rid)
        for number in range(len(self.windows)):
            self.cache.evict(number, 1000)
        view = self.cache.view()
        assert view.free == view.total
        assert not any(view.keys)
        self.cache.check_invariants()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # Shrinking outlasts the suite's timeout, which would hide the failure itself; add
    # Phase.shrink by hand for a minimal example.
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("seed", range(40))
def test_random_walk(seed: int) -> None:
    """Long runs of the same sections: they meet claims and failed commits far more often."""
    random = Random(seed)
    machine = CacheMachine()
    machine.start(
        slots=[random.randrange(8, 24) for _ in range(random.choice((1, 1, 2)))],
        block=random.randrange(1, 5),
        fraction=random.choice(FRACTIONS),
        warm=[0, 1, 2],
    )
    for _ in range(150):
        turn = random.random()
        if turn < 0.2 and len(machine.requests) < 12:
            machine.do_arrive(random.choice)
        elif turn < 0.5 and machine.requests:
            machine.advance(random.choice(sorted(machine.requests)), 1)
        elif turn < 0.9 and machine.requests:
            machine.do_act(random.choice)
        elif turn < 0.95 and machine.requests:
            machine.do_hint(random.choice)
        else:
            machine.do_evict(random.choice)
        machine.counts_agree()
    machine.teardown()
