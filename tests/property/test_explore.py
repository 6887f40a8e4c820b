"""All interleavings of small workers: two or three ranks, one or two requests, a few blocks.

Every state that any order of steps can reach is visited (`wavepp_worker.sim.explore`), with cancels
and evictions at any moment, evictions even between two sections of one event.  Each world names the
rare branches that it must reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import Struct

from wavepp_worker.admission.commands import Outward, SendVote
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.base.marks import hits
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.explore import Exploration, ExplorationError, explore
from wavepp_worker.sim.machines_slots import Prefix
from wavepp_worker.sim.machines_world import SmallWorld, WorldSpec

Windows = tuple[WindowSpec, ...]

# Prefixes that are cached at the start, and requests that reuse them.  With 8 slots the two
# requests do not fit together, which the leader cannot know before it has tried.
LEFT, RIGHT = (1, 1, 1), (2, 2, 2)
ON_LEFT, ON_RIGHT = (1, 1, 1, 5, 6), (2, 2, 2, 7, 8)
STEM, ON_STEM = (1, 1, 1, 1), (1, 1, 1, 1, 5)


def dense(slots: int, host_slots: int = 0) -> Windows:
    return (WindowSpec(slots=slots, host_slots=host_slots),)


def hybrid(slots: int, states: int) -> Windows:
    return (*dense(slots), WindowSpec(kind="recurrent", slots=states))


class Case(Struct, frozen=True, kw_only=True):
    """One world and what must be seen in it.

    Attributes:
        warm: prompts served before the start.
        unstored: (rank, point) of snapshots that were not stored then.
        present: requests that are there at the start.
        coming: requests that come at any moment.
    """

    spec: WorldSpec
    warm: tuple[Prefix, ...] = ()
    unstored: tuple[tuple[int, int], ...] = ()
    present: tuple[Prefix, ...] = ()
    coming: tuple[Prefix, ...] = ()
    marks: tuple[str, ...] = ()
    states_max: int = 10_000


def world_of(case: Case, kind: type[SmallWorld] = SmallWorld) -> SmallWorld:
    world = kind(case.spec)
    world.warm(*case.warm, unstored=case.unstored)
    for rid, prompt in enumerate(case.present, start=1):
        world.arrive(rid, prompt)
    world.coming = dict(enumerate(case.coming, start=len(case.present) + 1))
    return world


def explore_case(case: Case) -> Exploration:
    world = world_of(case)
    before = dict(hits)
    found = explore(world, states_max=case.states_max)
    assert [name for name in case.marks if hits[name] == before[name]] == []
    return found


def contested(spec: WorldSpec, *marks: str) -> Case:
    """Two requests, each on a cached prefix of its own."""
    return Case(spec=spec, warm=(LEFT, RIGHT), present=(ON_LEFT,), coming=(ON_RIGHT,), marks=marks)


def uneven(spec: WorldSpec, *marks: str, coming: tuple[Prefix, ...] = ()) -> Case:
    """A request whose prefix is cached everywhere, with other snapshots on each rank."""
    unstored = ((0, 2), (1, 3))
    return Case(
        spec=spec, warm=(STEM,), unstored=unstored, present=(ON_STEM,), coming=coming, marks=marks
    )


CASES: dict[str, Case] = {
    "one rank, two requests that do not fit together, one eviction": contested(
        WorldSpec(windows=(dense(8),), evictions=1),
        "escrow.prepare_failed",
        "pool.drop_detaches_held",
        "admission.solo",
        "admission.news_capacity",
        "admission.commit",
    ),
    "one rank, the same, one cancel": contested(
        WorldSpec(windows=(dense(8),), cancels=1),
        "admission.cancel_admitted",
        "admission.cancel_arrival",
        "admission.cancel_attempt",
        "admission.cancel_waiting",
    ),
    "one rank, one host slot, one eviction": contested(
        WorldSpec(windows=(dense(6, 1),), evictions=1),
        "escrow.destination_missing",
        "lease.claim_cut",
        "pool.host_block_dropped",
        "pool.host_full",
        "sequence.onboards",
    ),
    "one rank, two state slots": contested(
        WorldSpec(windows=(hybrid(8, 2),), snapshot_interval_tokens=2),
        "lease.snapshot_refused",
        "escrow.snapshots_short",
        "admission.solo",
    ),
    "two ranks, two requests that do not fit together, one eviction": contested(
        WorldSpec(windows=(dense(8),) * 2, evictions=1, has_instant_loop=True),
        "escrow.prepare_failed",
        "admission.retry",
        "admission.solo",
    ),
    "two ranks with different snapshots, one eviction": uneven(
        WorldSpec(windows=(hybrid(8, 4),) * 2, evictions=1, has_instant_loop=True),
        "admission.retry",
        "admission.implicit_release",
    ),
    "two ranks with different snapshots that trim, one eviction": uneven(
        WorldSpec(
            windows=(hybrid(8, 4),) * 2, evictions=1, has_instant_loop=True, auto_commit=False
        ),
        "admission.trim",
        "admission.commit",
        "lease.trim_falls_further",
        "lease.snapshot_swapped",
    ),
    "two ranks, one request, one cancel": Case(
        spec=WorldSpec(windows=(dense(4),) * 2, cancels=1),
        present=((1, 2, 3),),
        marks=("admission.cancel_crossed", "admission.cancel_attempt"),
    ),
    "two ranks, one host slot": contested(
        WorldSpec(windows=(dense(6, 1),) * 2, has_instant_loop=True),
        "lease.claim_cut",
        "sequence.onboards",
        "admission.solo",
    ),
    "three ranks, one cancel": Case(
        spec=WorldSpec(windows=(dense(4),) * 3, cancels=1, has_instant_loop=True),
        present=((1, 2, 3),),
        marks=("admission.cancel_crossed", "admission.cancel_admitted"),
    ),
}

LARGE_CASES: dict[str, Case] = {
    "one rank, two requests, two evictions and two cancels": contested(
        WorldSpec(windows=(dense(8),), evictions=2, cancels=2),
    ),
    "one rank, one host slot, two evictions and a cancel": contested(
        WorldSpec(windows=(dense(6, 1),), evictions=2, cancels=1),
    ),
    "two ranks, two requests that do not fit together": contested(
        WorldSpec(windows=(dense(8),) * 2),
    ),
    "two ranks, one host slot, one eviction": contested(
        WorldSpec(windows=(dense(6, 1),) * 2, evictions=1, has_instant_loop=True),
    ),
    "two ranks, one host slot, slow stages": contested(
        WorldSpec(windows=(dense(6, 1),) * 2),
    ),
    "two ranks, no host slot, one cancel and one eviction": contested(
        WorldSpec(windows=(dense(8),) * 2, cancels=1, evictions=1, has_instant_loop=True),
    ),
    "two ranks with different snapshots, one cancel": uneven(
        WorldSpec(windows=(hybrid(8, 4),) * 2, cancels=1, has_instant_loop=True),
    ),
    "two ranks with different snapshots, slow stages, one cancel": uneven(
        WorldSpec(windows=(hybrid(8, 4),) * 2, snapshot_interval_tokens=2, cancels=1),
    ),
    "an attention rank and a hybrid rank": uneven(
        WorldSpec(windows=(dense(8), hybrid(8, 4)), evictions=1, has_instant_loop=True),
        coming=((1, 1, 1, 9),),
    ),
    "three ranks, one request, slow stages, one cancel": Case(
        spec=WorldSpec(windows=(dense(4),) * 3, cancels=1), present=((1, 2, 3),)
    ),
    "three ranks, two requests, one cancel": Case(
        spec=WorldSpec(windows=(dense(4),) * 3, cancels=1, has_instant_loop=True),
        present=((1, 2, 3),),
        coming=((1, 2, 4),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_interleaving(name: str) -> None:
    """I13, I14, I26-I29, I42, I44-I48 in every reachable state."""
    found = explore_case(CASES[name])
    assert found.ends > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LARGE_CASES)
def test_every_interleaving_of_a_larger_world(name: str) -> None:
    case = LARGE_CASES[name]
    found = explore(world_of(case), states_max=200_000)
    print(f"{name}: {found}")
    assert found.ends > 0


def test_the_search_is_the_same_each_time() -> None:
    case = CASES["three ranks, one cancel"]
    assert explore_case(case) == explore_case(case)


def check_merges(name: str) -> None:
    """The search is complete only if what the pictures leave out decides nothing."""
    case = CASES[name]
    found = explore(world_of(case), states_max=case.states_max, check_merges=True)
    assert found.steps > found.states  # states were merged


@pytest.mark.parametrize("name", ["one rank, two state slots", "two ranks, one host slot"])
def test_worlds_that_are_taken_for_one_state_behave_alike(name: str) -> None:
    check_merges(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_worlds_that_are_taken_for_one_state_behave_alike(name: str) -> None:
    check_merges(name)


def test_a_world_that_is_too_large_is_not_taken_for_explored() -> None:
    case = CASES["three ranks, one cancel"]
    with pytest.raises(InvariantError, match="too large"):
        explore(world_of(case), states_max=50)


# ── faults ───────────────────────────────────────────────────────────────────────────────────


class SwapsSlots(RankCache):
    """Names two slots of a table in the wrong order."""

    def materialize(self, rid: int, ino: int) -> Materialized:
        made = super().materialize(rid, ino)
        tables = tuple(table[::-1] for table in made.tables)
        return Materialized(made.endpoint, tables, made.copies, made.states)


class NeverHasRoom(RankCache):
    """Refuses every request, the last resort included."""

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        self.release(rid)
        return Shortfall((1,), self.capacity_generation)


class CommitsLower(RankCache):
    """Takes a lease that is one block short of what it says it took."""

    def acquire(self, rid: int, attempt: int, cap: int) -> int:
        return min(cap, super().acquire(rid, attempt, cap) + 1)

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        held = self._leases[rid].endpoint  # type: ignore[index]
        super().commit(rid, held, no_floor=no_floor)
        return Committed(endpoint)


class LosesVotes(SmallWorld):
    """A link that drops what it should carry."""

    def _carry_out(self, rank: int, command: Outward) -> None:
        if not isinstance(command, SendVote):
            super()._carry_out(rank, command)


class SwappedWorld(SmallWorld):
    make_cache = SwapsSlots


class FullWorld(SmallWorld):
    make_cache = NeverHasRoom


class DividedWorld(SmallWorld):
    make_cache = CommitsLower


FAULTS: Sequence[tuple[type[SmallWorld], tuple[Prefix, ...], str]] = [
    (SwappedWorld, (), "reads a wrong block"),
    (FullWorld, (), "last resort"),
    (DividedWorld, (LEFT,), "installed at another endpoint"),
    (LosesVotes, (), "nothing can happen"),
]


@pytest.mark.parametrize(("kind", "warm", "message"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_fault_is_found_and_the_way_to_it_told(
    kind: type[SmallWorld], warm: tuple[Prefix, ...], message: str
) -> None:
    spec = WorldSpec(windows=(dense(8),) * 2, evictions=1, has_instant_loop=True)
    case = Case(spec=spec, warm=warm, present=(ON_LEFT,), coming=((1, 1, 1, 5, 9),))
    with pytest.raises(ExplorationError, match=message) as failure:
        explore(world_of(case, kind), states_max=10_000)
    assert "tick" in str(failure.value)
