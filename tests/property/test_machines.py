"""Runs the machines that `wavepp_worker.sim.machines` exports, on the code that we ship.

Hypothesis looks for short sequences; seeded walks are long, and meet claims, failed commits and
onboarding far more often.  That they see what they should is shown on caches with one fault each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.base.marks import CACHE_MARKS, hits
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared, Shortfall
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.sim import machines
from wavepp_worker.sim.machines_admission import make_world, walk_worker
from wavepp_worker.sim.machines_cache import make_driver, walk_cache
from wavepp_worker.sim.machines_world import SmallWorld
from wavepp_worker.wire.mailbox import Copy

MACHINES: dict[type[RuleBasedStateMachine], int] = {  # -> examples
    machines.IndexMachine: 10,
    machines.TreeMachine: 10,
    machines.PoolMachine: 25,
    machines.CacheMachine: 20,
    machines.TwoWindowMachine: 10,
    machines.HostTierMachine: 20,
    machines.RecurrentMachine: 15,
    machines.SlidingMachine: 12,
    machines.HybridMachine: 12,
    machines.MixedMachine: 12,
    machines.LeaseMachine: 8,
    machines.EscrowMachine: 10,
    machines.AdmissionMachine: 20,
}
RUN = settings(
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    # Shrinking outlasts the suite's timeout, which would hide the failure itself; add
    # Phase.shrink by hand for a minimal example.
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_machine(machine: type[RuleBasedStateMachine]) -> None:
    run(machine, MACHINES[machine])


def run(machine: type[RuleBasedStateMachine], examples: int) -> None:
    case = machine.TestCase
    case.settings = settings(RUN, max_examples=examples)
    case("runTest").runTest()


# ── long walks ───────────────────────────────────────────────────────────────────────────────

KINDS: dict[tuple[str, ...], Sequence[str]] = {
    # windows -> marks that the walks reach; a walk that misses one tests less than it says
    ("dense",): (
        "escrow.prepare_failed",
        "escrow.commit_failed",
        "lease.victim_claimed",
        "lease.claim_cut",
        "publish.duplicate",
        "sequence.victim_survived",
        "pool.drop_detaches_held",
    ),
    ("dense", "dense"): ("lease.victim_claimed", "lease.claim_cut"),
    ("host",): (
        "escrow.destination_missing",
        "lease.victim_claimed",
        "pool.host_block_dropped",
        "pool.host_full",
        "publish.below_host_block",
        "sequence.onboards",
    ),
    ("recurrent",): (
        "escrow.snapshots_short",
        "lease.snapshot_refused",
        "publish.snapshot_duplicate",
        "sequence.onboards_state",
    ),
    ("sliding",): ("publish.block_written_over", "lease.trim_falls_further"),
    ("dense", "recurrent"): ("lease.snapshot_refused", "lease.trim_falls_further"),
    ("host", "sliding", "recurrent"): ("sequence.onboards", "lease.trim_falls_further"),
}
SEEDS, SEEDS_MANY = 8, 120
STEPS = 400


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_long_walks(kinds: tuple[str, ...]) -> None:
    before = dict(hits)
    walk(RankCache, kinds, SEEDS)
    assert [name for name in KINDS[kinds] if hits[name] == before[name]] == []


WORKER_MARKS = (
    "admission.retry",
    "admission.solo",
    "admission.news_companion",
    "admission.cancel_attempt",
    "admission.cancel_admitted",
    "admission.cancel_crossed",
    "admission.gone_with_installed",
    "admission.stale_vote",
    "admission.stale_broadcast",
    "admission.stale_gathered",
)


def test_long_walks_of_a_worker() -> None:
    """I7, I11, I13, I26-I32 on one to four ranks, messages as late as the walk likes."""
    before = dict(hits)
    for seed in range(40):
        walk_worker(make_world(SmallWorld, Random(seed).choice), seed, STEPS)
    assert [name for name in WORKER_MARKS if hits[name] == before[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_long_walks_reach_every_rare_branch() -> None:
    before = dict(hits)
    for kinds in KINDS:
        walk(RankCache, kinds, SEEDS_MANY)
    assert [name for name in CACHE_MARKS if hits[name] == before[name]] == []


def walk(make_cache: Callable[..., RankCache], kinds: Sequence[str], seeds: int) -> None:
    for seed in range(seeds):
        try:
            walk_cache(make_driver(make_cache, kinds, Random(seed).choice), seed, STEPS)
        except InvariantError as error:
            raise InvariantError(f"{error} (kinds={kinds} seed={seed})") from error


@pytest.mark.parametrize("kinds", [("host",), ("dense", "recurrent")], ids="-".join)
def test_escrows_end_before_their_leases(
    kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I21, on every path: releases, failed sections, new attempts, materialisation."""
    alive: set[int] = set()
    order: list[str] = []
    fill, end_escrow, end_lease = Escrow.fill, Escrow.release, Lease.release

    def filled(escrow: Escrow, lease: Lease) -> None:
        alive.add(escrow.rid)
        fill(escrow, lease)

    def escrow_ended(escrow: Escrow) -> None:
        end_escrow(escrow)
        order.append("escrow")
        alive.discard(escrow.rid)

    def lease_ended(lease: Lease) -> None:
        assert lease.request.rid not in alive
        order.append("lease")
        end_lease(lease)

    monkeypatch.setattr(Escrow, "fill", filled)
    monkeypatch.setattr(Escrow, "release", escrow_ended)
    monkeypatch.setattr(Lease, "release", lease_ended)
    for seed in range(2):  # a new driver numbers its requests from 1 again
        alive.clear()
        walk_cache(make_driver(RankCache, kinds, Random(seed).choice), seed, STEPS)
    assert order.count("escrow") > 20
    assert order.count("lease") > order.count("escrow")


# ── caches with one fault each ───────────────────────────────────────────────────────────────


class ForgetsFloors(RankCache):
    """Prepares as if every request were the last resort."""

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        return super().prepare(rid, no_floor=True)


class CommitsWithoutLooking(RankCache):
    """Says yes to a commit that it refused."""

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        super().commit(rid, endpoint, no_floor=no_floor)
        return Committed(endpoint)


class OverstatesHints(RankCache):
    """Hints one block more than there is."""

    def hint(self, rid: int, cap: int | None = None) -> int:
        found = super().hint(rid, cap)
        return found + self._block_tokens if found else 0


class WakesNobody(RankCache):
    """Keeps it to itself when slots come back."""

    def free(self, rid: int) -> None:
        before = self.capacity_generation
        super().free(rid)
        self.capacity_generation = before


class PublishesEarly(RankCache):
    """Publishes a block that its wave has not written yet."""

    def publish(self, rid: int, end: int, snapshots: Sequence[int] = ()) -> None:
        size = self._sequences[rid].request.prompt_tokens  # type: ignore[index]
        super().publish(rid, min(size, end + self._block_tokens), snapshots)


class ReversesCopies(RankCache):
    """Lists the copies of an Install in the wrong order."""

    def materialize(self, rid: int, ino: int) -> Materialized:
        made = super().materialize(rid, ino)
        return Materialized(made.endpoint, made.tables, made.copies[::-1], made.states)


class ForgetsOnboarding(RankCache):
    """Leaves out the copies that bring blocks back."""

    def materialize(self, rid: int, ino: int) -> Materialized:
        made = super().materialize(rid, ino)
        copies = tuple(copy for copy in made.copies if copy.kind != "onboard")
        return Materialized(made.endpoint, made.tables, copies, made.states)


class StartsFromNothing(RankCache):
    """Zeroes a working state that should be loaded."""

    def materialize(self, rid: int, ino: int) -> Materialized:
        made = super().materialize(rid, ino)
        copies = tuple(
            Copy("zero_state", copy.window, -1, copy.target) if copy.kind == "load_state" else copy
            for copy in made.copies
        )
        return Materialized(made.endpoint, made.tables, copies, made.states)


FAULTS: list[tuple[type[RankCache], tuple[str, ...]]] = [
    (ForgetsFloors, ("dense",)),
    (CommitsWithoutLooking, ("dense",)),
    (OverstatesHints, ("dense",)),
    (WakesNobody, ("dense",)),
    (PublishesEarly, ("dense",)),
    (PublishesEarly, ("sliding",)),
    (ReversesCopies, ("host",)),
    (ForgetsOnboarding, ("host",)),
    (StartsFromNothing, ("recurrent",)),
]


@pytest.mark.parametrize(("cache", "kinds"), FAULTS, ids=str)
def test_a_fault_is_seen(cache: type[RankCache], kinds: tuple[str, ...]) -> None:
    with pytest.raises(InvariantError):
        walk(cache, kinds, 4 * SEEDS)


class FaultyMachine(machines.CacheMachine):
    make_cache = WakesNobody


def test_a_machine_runs_on_the_cache_that_it_is_given() -> None:
    with pytest.raises(InvariantError):
        run(FaultyMachine, MACHINES[machines.CacheMachine])
