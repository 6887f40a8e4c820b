"""Worked example X1 on several real hybrid caches: attention to 100 blocks on every rank, snapshots
at different points, and one endpoint that all can resume.  [algorithms 6.4, 19, A33]

Points count in blocks.  A warm-up request offers a snapshot slot every second block; which states
a rank has written is told by its LOOP, so every rank keeps exactly the points of the example.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.admission.real import RealFleet, dense, states
from tests.unit.admission.rig import B
from wavepp_worker.base import marks
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.rounds import FLAG_COMMIT, RecordPhase

LEASE, TRIM, COMMIT, RELEASE = RecordPhase
PREFIX = range(100)
EXTENDED = (*PREFIX, *range(900, 910))
HYBRID = (dense(240), states(60))
RID = 5


def fleet_of(
    *points: Sequence[int], windows: Sequence[Sequence[WindowSpec]] = (), **options: object
) -> RealFleet:
    """Return ranks that keep PREFIX with snapshots at these points, RID announced."""
    shapes = windows or [HYBRID] * len(points)
    fleet = RealFleet(*shapes, snapshot_interval_tokens=2 * B, **options)
    fleet.ask(1, PREFIX, 1)
    fleet.until_admitted(1)
    for rank, kept in enumerate(points):
        fleet.compute(1, rank, points=[point * B for point in kept])
        fleet.free(1, rank)
    fleet.round(2)
    fleet.ask(RID, EXTENDED)
    fleet.round()
    return fleet


def resumed_at(fleet: RealFleet) -> int:
    endpoint = fleet.until_admitted(RID)
    for rank in range(len(fleet.ranks)):
        assert fleet.install(RID, rank).endpoint == endpoint * B
    fleet.finish(RID)
    fleet.check_empty()
    return endpoint


EXAMPLE = ([64, 72, 90], [64, 80])


def test_x1_path_a_on_two_hybrid_caches() -> None:
    """X1, path A: every exact lease commits at once, so each lower endpoint is a new attempt."""
    before = marks.hits["admission.implicit_release"]
    fleet = fleet_of(*EXAMPLE)
    assert resumed_at(fleet) == 64
    assert fleet.steps(RID) == [(1, LEASE, 80), (2, LEASE, 72), (3, LEASE, 64)]
    assert marks.hits["admission.implicit_release"] == before + 4  # A43: both ranks, twice


def test_x1_path_a_with_a_third_rank_without_attention() -> None:
    """X1, path A with 60/64/70/88 on a rank of recurrent layers only: three attempts."""
    shapes = (HYBRID, HYBRID, (states(60),))
    fleet = fleet_of(*EXAMPLE, [60, 64, 70, 88], windows=shapes)
    assert resumed_at(fleet) == 64
    assert fleet.steps(RID) == [(1, LEASE, 80), (2, LEASE, 70), (3, LEASE, 64)]


def test_x1_path_b_on_two_hybrid_caches() -> None:
    """X1, path B: nobody commits early, so richer ranks trim, and a trim may land below."""
    before = marks.hits["admission.trim_below"]
    fleet = fleet_of(*EXAMPLE, auto_commit=False)
    assert resumed_at(fleet) == 64
    assert fleet.steps(RID) == [(1, LEASE, 80), (1, TRIM, 72), (1, TRIM, 64), (1, COMMIT, 64)]
    assert marks.hits["admission.trim_below"] == before + 1
    assert not any(r.flags & FLAG_COMMIT for bcast in fleet.bcasts for r in bcast.records)


def test_x1_path_c_on_two_hybrid_caches() -> None:
    """X1, path C: hints are refined first; the first lease is exact everywhere."""
    fleet = fleet_of(*EXAMPLE, hint_refine=True)
    request = fleet.ranks[0].machine._replica.requests[RID]
    seen = [request.candidate]
    while not fleet.is_admitted(RID):
        fleet.round()
        if request.candidate != seen[-1]:
            seen.append(request.candidate)
    assert seen == [80 * B, 72 * B, 64 * B]
    assert fleet.steps(RID) == [(1, LEASE, 64)]
    assert resumed_at(fleet) == 64


@pytest.mark.parametrize("options", [{}, {"auto_commit": False}, {"hint_refine": True}])
def test_x1_ends_at_zero_when_no_snapshot_is_common(options: dict[str, object]) -> None:
    """X1: 0 is valid on every rank, and no state is needed there.  [I11]"""
    fleet = fleet_of([64, 90], [72, 80], [90], **options)
    assert resumed_at(fleet) == 0


def test_one_sparse_rank_is_enough_to_trim_without_a_commit() -> None:
    """A10: a rank of dense layers never commits a trim that a sparse one may undo."""
    fleet = fleet_of([], [64, 72], windows=((dense(240),), HYBRID))
    fleet.books[0].evict(0, 40)  # the tail: rank 0 has 60 blocks, its last hint says 100
    fleet.books[1].evict(1, 2)
    assert resumed_at(fleet) == 0
    trims = [r for bcast in fleet.bcasts for r in bcast.records if r.phase == TRIM]
    assert [record.flags & FLAG_COMMIT for record in trims] == [0]


class TestSnapshotPoints:
    """A33: chosen by the leader, the same on all ranks, and only where a rank keeps states."""

    def test_every_rank_learns_the_same_points_and_rank_0_ends_chunks_there(self) -> None:
        fleet = RealFleet([dense(40)], HYBRID, snapshot_interval_tokens=4 * B)
        fleet.ask(1, range(10), 1)
        fleet.until_admitted(1)
        points = tuple(count * B for count in (4, 8, 10))
        announced = [entry for bcast in fleet.bcasts for entry in bcast.announces]
        assert [entry.snapshot_points for entry in announced] == [points]
        assert [fleet.install(1, rank).snapshot_points for rank in range(2)] == [points, ()]
        assert fleet.install(1, 0).states == ()
        assert [p for p, _ in fleet.install(1, 1).states[0].snapshots] == list(points)

    def test_without_states_there_are_none(self) -> None:
        fleet = RealFleet([dense(40)], [dense(40)], snapshot_interval_tokens=4 * B)
        fleet.warm(1, range(10))
        announced = [entry for bcast in fleet.bcasts for entry in bcast.announces]
        assert [entry.snapshot_points for entry in announced] == [()]
        assert fleet.install(1, 0).snapshot_points == ()
