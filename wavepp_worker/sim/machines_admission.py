"""P ranks under any order of messages, arrivals, cancels and evictions, drawn instead of tried.

The world checks every step by itself (`machines_world`, `machines_observer`); the model here only
knows which requests there are, and that each must end in one of three ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.machines_choice import Choose
from wavepp_worker.sim.machines_picture import digest
from wavepp_worker.sim.machines_slots import Prefix
from wavepp_worker.sim.machines_world import SmallWorld, WorldSpec

ALWAYS = 1 << 30
CALM_STEPS_MAX = 20_000
FAMILIES: tuple[Prefix, ...] = ((1,) * 24, (1,) * 5 + (2,) * 19, (3,) * 24)
KINDS = (("dense",), ("host",), ("recurrent",), ("dense", "recurrent"), ("sliding", "host"))


@dataclass
class AdmissionDriver:
    """A worker under test; every choice comes from `choose`."""

    world: SmallWorld
    longest: int  # tokens
    asked: dict[int, Prefix] = field(default_factory=dict)

    def arrive(self, choose: Choose) -> None:
        """A request comes, with a prefix of a family and a tail of its own."""
        rid = len(self.asked) + 1
        stem, tail = choose(range(1, 25)), choose(range(4))
        prompt = (choose(FAMILIES)[:stem] + (100 + rid,) * tail)[: self.longest]
        self.asked[rid] = prompt
        self.world.arrive(rid, prompt)

    def step(self, choose: Choose) -> None:
        """Anything that is under way happens."""
        self.world.do(choose(list(self.world.steps())))

    def disturb(self, choose: Choose) -> None:
        """A request is cancelled, or something unused is evicted."""
        possible = list(self.world.disturbances())
        if possible:
            kind = choose(sorted({step.kind for step in possible}))
            self.world.do(choose([step for step in possible if step.kind == kind]))

    def repeat(self, choose: Choose) -> None:
        """A message comes twice, and changes nothing.  [I30, I32]"""
        if self.world.delivered:
            before = digest(self.world)
            self.world.repeat(choose(sorted(self.world.delivered)))
            check(digest(self.world) == before, "a repeated message changes nothing [I30]")

    def compare(self) -> None:
        """Every request is somewhere, and what ended was asked for."""
        world = self.world
        check(world.prompts == self.asked, "requests", asked=self.asked)
        check(world.ended.keys() <= self.asked.keys(), "ended unasked", ended=world.ended)
        leader = world.ranks[0].machine._leader
        alive = leader.requests.keys() if leader is not None else set()
        check(alive == self.asked.keys() - world.ended.keys(), "none is lost [I28]", alive=alive)
        for rid, code in world.ended.items():
            room = min(inline.cache.total_tokens() for inline in world.ranks)
            size = ceil_div(len(self.asked[rid]), world.spec.block_tokens)
            fits = size * world.spec.block_tokens <= room
            check(code == "gone" or not fits or rid in world.cancelled, "end", rid=rid, code=code)

    def end(self) -> None:
        """Left alone, every request ends, and nothing is held.  [I28, I44]"""
        for _ in range(CALM_STEPS_MAX):
            if self.world.is_over:
                break
            self.world.do(next(self.world.steps()))
        check(self.world.is_over, "left alone, it ends [I28]", ended=self.world.ended)
        self.world.check_end()
        self.compare()


def make_world(kind: type[SmallWorld], choose: Choose) -> AdmissionDriver:
    """Return a worker of one to four ranks with windows of any kind, sizes drawn."""
    block = choose((1, 2, 4))
    stages = choose((1, 2, 2, 3, 4))
    kinds = choose(KINDS)
    windows = tuple(
        tuple(_draw_spec(name, block, choose) for name in (choose(KINDS) if mixed else kinds))
        for mixed in (choose((False, False, True)) for _ in range(stages))
    )
    spec = WorldSpec(
        windows=windows,
        block_tokens=block,
        batch_requests_max=choose((1, 2, 4)),
        headroom_tokens=block * choose((0, 2, 6)),
        floor_fraction=choose((0.0, 0.1, 0.25)),
        floor_headroom_blocks=4,
        snapshot_interval_tokens=block * choose((1, 2)),
        auto_commit=choose((True, True, False)),
        evictions=ALWAYS,
        cancels=ALWAYS,
    )
    dense = [window.slots for rank in windows for window in rank if window.is_dense]
    too_long = choose((0, 0, 0, 1))
    return AdmissionDriver(kind(spec), block * (min(dense) if dense else 12) + too_long)


def walk_worker(driver: AdmissionDriver, seed: int, steps_count: int) -> None:
    """Take a long seeded walk, then leave the worker alone until all requests have ended."""
    random = Random(seed)
    crowd = random.choice((3, 8, 14))
    for _ in range(steps_count):
        turn = random.random()
        if turn < 0.06 and len(driver.asked) < crowd:
            driver.arrive(random.choice)
        elif turn < 0.12:
            driver.disturb(random.choice)
        elif turn < 0.15:
            driver.repeat(random.choice)
        else:
            driver.step(random.choice)
        driver.compare()
    driver.end()


def _draw_spec(kind: str, block: int, choose: Choose) -> WindowSpec:
    match kind:
        case "recurrent":
            return WindowSpec(
                kind="recurrent", slots=choose((2, 3, 6)), host_slots=choose((0, 1, 3))
            )
        case "sliding":
            span, chunk = choose((2, block + 1)), 32
            return WindowSpec(slots=choose((40, 48)), span_tokens=span, chunk_tokens=chunk)
        case _:
            host_slots = choose((1, 4)) if kind == "host" else 0
            return WindowSpec(slots=choose((8, 10, 16)), host_slots=host_slots)
