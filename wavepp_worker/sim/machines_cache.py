"""One rank's cache, section by section, each compared with the model.

A driver takes every choice from `choose`: Hypothesis draws them in `machines.CacheMachine`, a
seeded generator in `walk_cache`.  LOOP is played too: it copies late, runs chunks ahead of what
WAVE has published, and reads what it was told to read (`machines_slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec.structs import replace

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.cache.hashing import scope_key, sequence_keys, split_keys
from wavepp_worker.cache.outcomes import Committed, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.machines_checks import (
    check_destinations,
    check_published,
    check_states,
    check_table,
    compare_books,
    destinations,
)
from wavepp_worker.sim.machines_choice import Choose
from wavepp_worker.sim.machines_model import CacheModel, ModelRequest
from wavepp_worker.sim.machines_picture import books
from wavepp_worker.sim.machines_slots import DEVICE, HOST, Prefix, SlotModel

CacheFactory = Callable[..., RankCache]

SCOPE = scope_key("machine")
REQUESTS_MAX = 12
UNCAPPED = 1_000
FLOOR_FRACTIONS = (0.0, 0.1, 0.3)
# Two of three families share a stem of nine tokens.
FAMILIES: tuple[Prefix, ...] = ((0,) * 64, (0,) * 9 + (1,) * 55, (2,) * 64)
NEXT = {
    "known": "acquire",
    "leased": "prepare",
    "prepared": "commit",
    "committed": "materialize",
    "sequence": "publish",
    "published": "free",
}
SECTIONS = {
    "known": ("acquire", "acquire", "forget"),
    "leased": ("prepare", "prepare", "trim", "acquire", "release"),
    "prepared": ("commit", "commit", "trim", "acquire", "release"),
    "committed": ("materialize", "materialize", "commit", "acquire", "release"),
    "sequence": ("run", "publish", "publish", "copy", "free"),
    "published": ("publish", "free", "free"),
}


class CacheDriver:
    """A cache under test beside its model.

    Args:
        make_cache: called like `RankCache`.
        interval_blocks: snapshot interval.
        chunk_tokens: longest chunk that LOOP computes at once.
    """

    def __init__(
        self,
        make_cache: CacheFactory,
        specs: Sequence[WindowSpec],
        block_tokens: int,
        floor_fraction: float,
        *,
        interval_blocks: int = 1,
        chunk_tokens: int = 64,
    ) -> None:
        headroom_blocks = 6
        self.block = block_tokens
        self.cache = make_cache(specs, block_tokens, floor_fraction, headroom_blocks)
        self.model = CacheModel(specs, block_tokens, floor_fraction, headroom_blocks)
        self.slots = SlotModel(specs, block_tokens)
        self.interval = interval_blocks * block_tokens
        self.chunk_tokens = chunk_tokens
        sizes = [spec.slots for spec in specs if spec.is_dense] or [64]
        self.longest = block_tokens * min(*(size // 2 for size in sizes), 16)
        self.prefix_of: dict[bytes, Prefix] = {}
        self.next_rid, self.ino = 1, 0

    @property
    def requests(self) -> dict[int, ModelRequest]:
        """Return every request that the cache knows."""
        return self.model.requests

    # ── whole turns ──────────────────────────────────────────────────────────────────────────

    def arrive(self, choose: Choose, steps_max: int = len(NEXT)) -> None:
        """Let a request come, new or like an earlier one, and get some phases far."""
        family = choose(FAMILIES)
        stem, tail = choose(range(self.longest + 1)), choose(range(3 * self.block + 1))
        prompt = (family[:stem] + (choose((7, 8, 9)),) * tail)[: self.longest]
        rid = self.announce(prompt or (0,))
        self.advance(rid, choose(range(steps_max + 1)))

    def act(self, choose: Choose, sections: Mapping[str, Sequence[str]] = SECTIONS) -> None:
        """Run any section that is allowed for some request."""
        rid = choose(sorted(self.requests))
        self.do(choose(sections[self.requests[rid].phase]), rid, choose)

    def advance(self, rid: int, steps_count: int) -> None:
        """Go the straight way: no cap, floors, everything published."""
        for _ in range(steps_count):
            if rid in self.requests:
                self.do(NEXT[self.requests[rid].phase], rid, None)

    def do(self, section: str, rid: int, choose: Choose | None) -> None:
        """Run one section of one request and compare."""
        run: Callable[[int, ModelRequest, Choose | None], None] = getattr(self, f"do_{section}")
        run(rid, self.requests[rid], choose)
        self.compare()

    def announce(self, prompt: Prefix) -> int:
        """Let the cache learn a prompt; return its request."""
        raw = b"".join(token.to_bytes(4, "little") for token in prompt)
        keys = sequence_keys(raw, self.block, SCOPE)
        for index, key in enumerate(split_keys(keys)):
            prefix = prompt[: (index + 1) * self.block]
            check(self.prefix_of.setdefault(key, prefix) == prefix, "one key, one prefix")
        rid, self.next_rid = self.next_rid, self.next_rid + 1
        points: tuple[int, ...] = ()
        if any(window.spec.is_recurrent for window in self.model.windows):
            points = snapshot_points(len(prompt), self.block, self.interval)
        self.cache.learn(rid, len(prompt), keys, points)
        self.requests[rid] = ModelRequest(prompt, points)
        return rid

    # ── sections ─────────────────────────────────────────────────────────────────────────────

    def do_hint(self, choose: Choose) -> None:
        """The hint is what a walk would find, and asking leaves no trace.  [I5, I6]"""
        rid, cap = choose(sorted(self.requests)), choose((None, *range(60)))
        before = books(self.cache)
        found = self.cache.hint(rid, cap)
        expected = self.model.walk(self.requests[rid].prompt, UNCAPPED if cap is None else cap)
        check(found == expected, "hint [I5]", rid=rid, cap=cap, found=found, expected=expected)
        check(books(self.cache) == before, "a probe changes nothing [I6]")

    def do_acquire(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        content, room = self._content(), self.model.available()
        generation, is_news = self.cache.capacity_generation, not request.has_failed_here
        request.forget_attempt()
        has_risen = _has_risen(room, self.model.available())
        cap = choose((UNCAPPED, *range(0, 60, self.block))) if choose else UNCAPPED
        deepest = self.model.walk(request.prompt, cap)
        request.attempt += 1
        endpoint = self.cache.acquire(rid, request.attempt, cap)
        check(endpoint <= cap and endpoint % self.block == 0, "endpoint [I8]", endpoint=endpoint)
        usable = self.model.is_usable(request.prompt, endpoint)
        check(usable, "leases what is there [I8]", rid=rid, endpoint=endpoint)
        # With room for every promise on the whole path, nothing is cut.  [7.6, A48]
        request.lease = deepest
        is_free = min(self.model.available()) >= 0
        is_right = endpoint == deepest if is_free else endpoint < deepest
        check(is_right, "endpoint [I8]", rid=rid, endpoint=endpoint, deepest=deepest)
        request.lease = endpoint
        rose = self.cache.capacity_generation - generation
        check(rose == int(has_risen and is_news), "news [8.4]", rose=rose)
        check(self._content() == content, "a lease changes no content [I3]")

    def do_trim(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        before, content, room = request.lease or 0, self._content(), self.model.available()
        generation = self.cache.capacity_generation
        cap = choose(range(before + 1)) if choose else 0
        expected = next(
            end
            for end in range(align_down(cap, self.block), -1, -self.block)
            if self._can_trim(request, end)
        )
        before_demand = self._dense_demand(request)
        endpoint = self.cache.trim(rid, cap)
        check(endpoint <= min(before, cap), "trim falls [I10]", endpoint=endpoint, cap=cap)
        is_exact = not any(window.spec.is_sliding for window in self.model.windows)
        check(
            endpoint == expected if is_exact else endpoint <= expected,
            "trim keeps the deepest endpoint [I10]",
            endpoint=endpoint,
            expected=expected,
        )
        check(self.model.is_usable(request.prompt, endpoint), "trims to what is there [I10]")
        request.lease = endpoint
        lost = self._dense_demand(request) - before_demand
        check(lost * self.block == before - endpoint, "demand follows the endpoint [I25]")
        self._check_news(room, generation)
        check(self._content() == content, "a trim changes no content [I19]")

    def _can_trim(self, request: ModelRequest, endpoint: int) -> bool:
        before, request.lease = request.lease, endpoint
        can = self.model.is_usable(request.prompt, endpoint) and min(self.model.available()) >= 0
        request.lease = before
        return can

    def _dense_demand(self, request: ModelRequest) -> int:
        return ceil_div(len(request.prompt), self.block) - (request.lease or 0) // self.block

    def do_prepare(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        content, generation = self._content(), self.cache.capacity_generation
        no_floor = choose((False, True)) if choose else False
        has_room = self.model.has_room(request, no_floor=no_floor)
        before = destinations(self.cache, self.model)
        outcome = self.cache.prepare(rid, no_floor=no_floor)
        if has_room:
            check(outcome == Prepared(request.lease or 0), "prepare has room", outcome=outcome)
            self._note_promise(rid, request, no_floor)
            check_destinations(self.model, before, destinations(self.cache, self.model))
        else:
            self._check_shortfall(outcome, generation)
            request.forget_attempt()  # compared with the books right after  [I14]
        check(self.cache.capacity_generation == generation, "a promise is no news")
        check(self._content() == content, "prepare changes no content [I19]")

    def do_commit(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        content, generation = self._content(), self.cache.capacity_generation
        no_floor = choose((False, True)) if choose else False
        is_repeated, room = request.is_committed, self.model.available()
        has_room = is_repeated or self.model.has_room(request, no_floor=no_floor)
        before = books(self.cache)
        outcome = self.cache.commit(rid, request.lease or 0, no_floor=no_floor)
        if has_room:
            check(outcome == Committed(request.lease or 0), "commit has room", outcome=outcome)
            request.is_committed = True
            if is_repeated:
                check(books(self.cache) == before, "a repeated commit changes nothing")
            else:
                self._note_promise(rid, request, no_floor)
            self._check_news(room, generation)
        else:
            self._check_shortfall(outcome, generation)
            check(books(self.cache) == before, "a failed commit changes nothing [I18]")
            request.has_failed_here = True
        check(self._content() == content, "commit changes no content [I19]")

    def _note_promise(self, rid: int, request: ModelRequest, no_floor: bool) -> None:
        """Read what was promised: the hard demand, and as many snapshots as leave the floor."""
        request.promised = [0] * len(self.model.windows)
        view = self.cache.view()
        for number, window in enumerate(self.model.windows):
            need, wishes = self.model.demand(window, request), self.model.wishes(window, request)
            got = view.reserved[number] - self.model.promised(window)
            request.promised[number] = got
            left = self.model.available()[number]
            floor = 0 if no_floor else window.floor
            check(left >= floor, "floors hold [I24]", rid=rid, window=number, left=left)
            check(need <= got <= need + len(wishes), "promise covers demand [I17]", got=got)
            is_full = got == need + len(wishes) or left <= window.floor
            check(is_full, "a snapshot is refused without need [A47]", window=number, got=got)

    def do_release(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        content, room = self._content(), self.model.available()
        generation, is_news = self.cache.capacity_generation, not request.has_failed_here
        self.cache.release(rid)
        request.forget_attempt()
        self._check_news(room, generation, is_news=is_news)
        check(self._content() == content, "release changes no content [I19]")

    def do_materialize(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        endpoint, promised = request.lease or 0, request.promised or []
        room, generation = self.model.available(), self.cache.capacity_generation
        in_use = [self.model.held(window) for window in self.model.windows]
        demand = [self.model.demand(window, request) for window in self.model.windows]
        leased = [self.model.leased(window, request) for window in self.model.windows]
        host = [window.slots(leased[window.number], HOST) for window in self.model.windows]
        wishes = [self.model.wishes(window, request) for window in self.model.windows]
        self.ino += 1
        made = self.cache.materialize(rid, self.ino)  # never fails  [I22]
        check(made.endpoint == endpoint, "installs at the agreed endpoint [I22]")
        source = {w.number: w.at.get(request.prompt[:endpoint]) for w in self.model.windows}
        self.model.move(made)
        self._follow(None)
        request.made, request.written, request.published = made, endpoint, endpoint
        request.forget_attempt()
        self.slots.install(rid, self.ino, request.prompt, made)
        surplus, freed = [0] * len(self.model.windows), [0] * len(self.model.windows)
        for window in self.model.windows:
            number = window.number
            if window.spec.is_recurrent:
                stored = check_states(window, request, wishes[number], source[number])
                surplus[number] = promised[number] - 1 - stored
                # The snapshot at e* needs no reference any more.  [algorithms 10 f]
                freed[number] = len(in_use[number] - self.model.held(window))
            else:
                check_table(window, request, leased[number], len(host[number]), self.block)
                surplus[number] = promised[number] - demand[number]
            own = self.model.owned(window, request) - window.slots(leased[number], DEVICE)
            check(own.isdisjoint(in_use[number]), "takes slots of nobody [I46]", window=number)
        expected = [sum(parts) for parts in zip(room, surplus, freed, strict=True)]
        check(min(surplus) >= 0, "the promise covers the demand [I17]", surplus=surplus)
        check(self.model.available() == expected, "what was promised is used up [I23]")
        self._check_news(room, generation)

    def do_copy(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        if self.slots.copies:
            self.slots.copy_one()

    def do_run(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        """LOOP computes a chunk; a chunk ends at a block or at the end, never past a point."""
        start, whole = request.written, len(request.prompt)
        if start == whole:
            return
        most = start + self.chunk_tokens
        ends = [end for end in range(self.block, whole, self.block) if start < end <= most]
        ends += [whole] if whole <= most else []
        barrier = next((point for point in request.points if point > start), whole)
        ends = [end for end in ends if end <= barrier]
        stop = choose(ends) if choose else ends[-1]
        request.stored += self.slots.run(rid, stop)
        request.written = stop

    def do_publish(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        """WaveDone: LOOP is as far, or further by now."""
        while choose is None and request.written < len(request.prompt):
            self.do_run(rid, request, None)
        end = choose(range(request.published, request.written + 1)) if choose else request.written
        points = [point for point in request.stored if point <= end]
        room, generation = self.model.available(), self.cache.capacity_generation
        self.slots.published(rid, points)
        self.cache.publish(rid, end, points)
        request.published = end
        request.stored = [point for point in request.stored if point > end]
        self._follow(request)
        for kept in request.kept.values():
            kept.difference_update(points)
        for window in self.model.windows:
            check_published(window, request, points, self.block)
        self._check_news(room, generation)

    def do_free(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        room, generation = self.model.available(), self.cache.capacity_generation
        self.slots.end(rid)
        self.cache.free(rid)
        del self.requests[rid]
        self._check_news(room, generation)
        self.cache.forget(rid)

    def do_forget(self, rid: int, request: ModelRequest, choose: Choose | None) -> None:
        self.cache.forget(rid)
        del self.requests[rid]

    def do_evict(self, choose: Choose) -> None:
        """Drop something unused: room stays the same."""
        window, count = choose(self.model.windows), choose((1, 1, 2, 8))
        is_host = window.spec.host_slots > 0 and choose((False, True))
        generation, room = self.cache.capacity_generation, self.model.available()
        self.cache.evict(window.number, count, is_host=is_host)
        self._follow(None)
        check(self.model.available() == room, "evicting makes no room [I16]")
        check(self.cache.capacity_generation == generation, "evicting is no news")
        self.compare()

    # ── parts of comparisons ─────────────────────────────────────────────────────────────────

    def _content(self) -> object:
        return self.cache.view().keys, self.cache.index_version

    def compare(self) -> None:
        """Compare everything that can be seen from outside, and let the cache audit itself."""
        compare_books(self.cache, self.model, self.prefix_of)

    def _follow(self, publisher: ModelRequest | None) -> None:
        self.model.follow(self.cache.drain_changes(), self.prefix_of, publisher)

    def _check_shortfall(self, outcome: object, generation: int) -> None:
        if not isinstance(outcome, Shortfall):
            check(False, "promises without room [I24]", outcome=outcome)
            return
        check(outcome.generation == generation, "generation of the failure [S8]")
        check(any(outcome.missing), "a shortfall says what is missing", outcome=outcome)
        check(self.cache.capacity_generation == generation, "a failure is no news [8.4]")

    def _check_news(self, room: Sequence[int], generation: int, *, is_news: bool = True) -> None:
        """The generation grew by one exactly if some window's room rose.  [8.4]"""
        has_risen = _has_risen(room, self.model.available())
        rose = self.cache.capacity_generation - generation
        check(rose == int(has_risen and is_news), "news [8.4]", rose=rose, has_risen=has_risen)

    def end(self) -> None:
        """After the last request nothing is held; all content can go.  [I14, I44]"""
        for rid, request in list(self.requests.items()):
            if request.made is not None:
                self.cache.free(rid)
            self.cache.release(rid)
            self.cache.forget(rid)
        for number in range(len(self.model.windows)):
            self.cache.evict(number, UNCAPPED)
            self.cache.evict(number, UNCAPPED, is_host=True)
        view = self.cache.view()
        check(view.free == view.total and view.host_free == view.host_total, "leaks [I44]")
        check(not any(view.keys), "keys are left [I44]", view=view)
        self.cache.check_invariants()


def make_driver(make_cache: CacheFactory, kinds: Sequence[str], choose: Choose) -> CacheDriver:
    """Return a driver of a cache with one window per kind, sizes drawn.

    Args:
        kinds: "dense", "host" (dense with a host tier), "recurrent", "sliding".
    """
    block = choose((1, 2, 3, 4))
    chunk_tokens = block * choose((1, 2, 5)) if "sliding" in kinds else 64
    specs = [_draw_spec(kind, block, chunk_tokens, choose) for kind in kinds]
    return CacheDriver(
        make_cache,
        specs,
        block,
        choose(FLOOR_FRACTIONS),
        interval_blocks=choose((1, 2, 5)),
        chunk_tokens=chunk_tokens,
    )


def _draw_spec(kind: str, block: int, chunk_tokens: int, choose: Choose) -> WindowSpec:
    match kind:
        case "recurrent":
            host_slots = choose((0, 1, 4))
            slots = choose((1, 2, 3, 5, 10, 20))
            return WindowSpec(kind="recurrent", slots=slots, host_slots=host_slots)
        case "sliding":
            spec = WindowSpec(
                slots=1, span_tokens=choose((1, 2, block + 1, 3 * block)), chunk_tokens=chunk_tokens
            )
            slots = max(8, spec.ring_blocks(block) + choose((0, 2, 8, 24)))
            return replace(spec, slots=slots, host_slots=choose((0, 0, 1, 8)))
        case _:
            if kind == "host":  # small, so that content is offloaded and comes back
                return WindowSpec(slots=choose((8, 9, 12, 16)), host_slots=choose((1, 3, 8, 16)))
            return WindowSpec(slots=choose((8, 9, 12, 16, 24, 64)))


def walk_cache(driver: CacheDriver, seed: int, steps_count: int) -> None:
    """Take a long seeded walk: it meets claims and failed commits more often than short ones."""
    random = Random(seed)
    crowd = random.choice((2, 4, REQUESTS_MAX))  # few requests make progress, many collide
    for family in FAMILIES:
        driver.advance(driver.announce(family[: driver.longest]), len(NEXT))
    for _ in range(steps_count):
        turn = random.random()
        if turn < 0.2 and len(driver.requests) < crowd:
            driver.arrive(random.choice)
        elif turn < 0.5 and driver.requests:
            driver.advance(random.choice(sorted(driver.requests)), 1)
        elif turn < 0.92 and driver.requests:
            driver.act(random.choice)
        elif turn < 0.98 and driver.requests:
            driver.do_hint(random.choice)
        else:
            driver.do_evict(random.choice)
    driver.end()


def _has_risen(before: Sequence[int], after: Sequence[int]) -> bool:
    return any(now > then for then, now in zip(before, after, strict=True))
