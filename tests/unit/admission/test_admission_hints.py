"""Hints: what is probed again and when, and how refined candidates rise.  [algorithms 5]"""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.admission.real import RealFleet, dense, states
from tests.unit.admission.rig import B, Fleet
from wavepp_worker.base import marks
from wavepp_worker.wire.rounds import RecordPhase, RoundVote

LEASE, TRIM, COMMIT, RELEASE = RecordPhase


def refused(stages: int = 2, **options: object) -> Fleet:
    """Return a fleet that has no room for request 1, which has been announced and waits."""
    fleet = Fleet(stages, **options)  # type: ignore[arg-type]
    for cache in fleet.caches:
        cache.available = 0
    fleet.round()
    return fleet


def candidate(fleet: Fleet, rid: int = 1) -> int | None:
    found = {rank.machine._replica.requests[rid].candidate for rank in fleet.ranks}
    assert len(found) == 1  # I7
    return found.pop()


def change(fleet: Fleet, rank: int, valid: list[int], rid: int = 1) -> None:
    """The rank's index says something else from now on."""
    fleet.caches[rank].valid[rid] = valid
    fleet.caches[rank].index_version += 1
    fleet.wait(0.01)  # beyond T_idle


class TestRefresh:
    def test_a_candidate_falls_and_rises_while_the_request_waits(self) -> None:
        """A9, I7"""
        fleet = refused()
        for cache in fleet.caches:
            cache.valid[1] = [16, 32]
        fleet.announce(1)
        fleet.round()
        seen = [candidate(fleet)]
        before = marks.hits["admission.candidate_rises"]
        for valid in ([16], [8], [16, 32]):
            change(fleet, 1, valid)
            fleet.round()
            seen.append(candidate(fleet))
        assert seen == [32, 16, 8, 32]
        assert marks.hits["admission.candidate_rises"] == before + 2  # once on each rank

    def test_a_request_beyond_the_first_k_is_probed_when_it_gets_there(self) -> None:
        """The index changed once, long ago: that must not be forgotten for the younger ones."""
        fleet = refused(batch_requests_max=1)
        for cache in fleet.caches:
            cache.valid = {1: [16], 2: [16]}
        fleet.announce(1, 2)
        fleet.round()
        change(fleet, 1, [8])
        change(fleet, 1, [8], rid=2)
        fleet.round()
        assert (candidate(fleet, 1), candidate(fleet, 2)) == (8, 16)
        fleet.cancel(1)
        fleet.round()
        fleet.wait(0.01)
        fleet.round()
        assert candidate(fleet, 2) == 8

    def test_what_changed_during_an_attempt_is_seen_after_it(self) -> None:
        """8.4: a new chain begins with fresh hints, even if others used up the index's news."""
        fleet = Fleet(2)
        fleet.round()
        fleet.announce(9)
        fleet.round(3)  # 9 runs, so it is never quiet
        fleet.announce(1)
        fleet.round()
        fleet.caches[1].failures.append(("prepare", 1))
        change(fleet, 0, [16])
        change(fleet, 1, [16])
        fleet.announce(2)  # waits behind, is probed with every change
        fleet.round()
        assert fleet.records[0].phase == LEASE  # 1 is tried from its old candidate
        fleet.round()
        fleet.caches[1].capacity_generation += 1
        fleet.wait(0.01)
        fleet.round(2)
        assert [(r.rid, r.attempt, r.endpoint) for r in fleet.records] == [(1, 2, 16)]

    def test_nothing_is_probed_while_the_index_stands_still(self) -> None:
        fleet = refused()
        fleet.announce(1)
        fleet.round()
        probed: list[int] = []
        hint = fleet.caches[0].hint
        fleet.caches[0].hint = lambda rid, cap=None: probed.append(rid) or hint(rid, cap)  # type: ignore[method-assign, func-returns-value]
        for _ in range(5):
            fleet.wait(0.01)
            fleet.round()
        assert probed == []


class TestRefine:
    POINTS = ([64, 72, 90], [64, 80])

    def fleet(self) -> Fleet:
        fleet = refused(hint_refine=True, sparse=True)
        for cache, points in zip(fleet.caches, self.POINTS, strict=True):
            cache.valid[1] = list(points)
        fleet.announce(1, tokens=100)
        fleet.round()
        return fleet

    def settle(self, fleet: Fleet) -> list[int | None]:
        """Run rounds until the candidate has settled; return its values."""
        seen = [candidate(fleet)]
        replica = fleet.ranks[0].machine._replica
        for _ in range(20):
            if replica.is_ready(replica.requests[1]):
                return seen
            fleet.round()
            if candidate(fleet) != seen[-1]:
                seen.append(candidate(fleet))
        raise AssertionError(f"the candidate does not settle: {seen}")

    def test_it_falls_until_all_agree(self) -> None:
        """A8"""
        assert self.settle(self.fleet()) == [80, 72, 64]

    def test_it_rises_when_a_rank_finds_more(self) -> None:
        """A9 with A8: every rank starts again, so that the new common point is found."""
        fleet = self.fleet()
        self.settle(fleet)
        before = marks.hits["admission.refine_again"]
        change(fleet, 1, [64, 72, 88])
        fleet.round()
        assert candidate(fleet) == 64
        assert self.settle(fleet) == [64, 88, 72]
        assert marks.hits["admission.refine_again"] == before + 2  # once on each rank
        assert {len(r.machine._replica.requests[1].hints) for r in fleet.ranks} == {2}

    def test_it_falls_when_the_agreed_point_is_lost_but_the_deepest_is_not(self) -> None:
        fleet = self.fleet()
        self.settle(fleet)
        change(fleet, 1, [80])
        fleet.round()
        assert self.settle(fleet)[-1] == 0

    def test_it_settles_again_and_again_whatever_the_index_does(self) -> None:
        """Only settled requests are probed anew, so each chain of refinements ends."""
        fleet = self.fleet()
        replica = fleet.ranks[0].machine._replica
        settled = 0
        for number in range(40):
            change(fleet, 0, [64, 72, 90 + number % 2])
            change(fleet, 1, [64, 80 + number % 3])
            fleet.round()
            settled += replica.is_ready(replica.requests[1])
        assert settled >= 8

    def test_a_change_that_matters_to_nobody_costs_no_vote(self) -> None:
        fleet = self.fleet()
        self.settle(fleet)
        change(fleet, 1, [64, 68, 80])
        fleet.round()
        assert fleet.votes[0].hints == ()
        assert self.settle(fleet) == [64]

    def test_nobody_is_selected_before_the_candidate_has_settled(self) -> None:
        """A younger request whose candidate is settled is not held up."""
        fleet = self.fleet()
        for cache in fleet.caches:
            cache.available = 1_000
            cache.valid[2] = [16]
        before = marks.hits["admission.passed_unsettled"]
        fleet.announce(2, tokens=100)
        fleet.round(2)
        assert [(r.rid, r.endpoint) for r in fleet.records if r.phase == LEASE] == [(2, 16)]
        assert marks.hits["admission.passed_unsettled"] > before
        fleet.round(3)
        assert fleet.installs[0][1].install.endpoint == 64

    def test_a_request_that_has_failed_is_not_passed_while_it_settles(self) -> None:
        """I27, A51: unsettled or not, it is next."""
        fleet = self.fleet()
        for cache in fleet.caches:
            cache.available = 1_000
        fleet.caches[0].failures.append(("prepare", 1))
        self.settle(fleet)
        while not fleet.leader.requests[1].must_wait:
            fleet.round()
        change(fleet, 1, [64, 72, 88])
        before = marks.hits["admission.refused_unsettled"]
        fleet.announce(2)
        while 1 not in fleet.installs[0]:
            assert all(record.rid == 1 for record in fleet.records)
            fleet.round()
        assert marks.hits["admission.refused_unsettled"] > before
        assert fleet.installs[0][1].install.endpoint == 72

    def test_ranks_that_are_not_sparse_do_not_refine(self) -> None:
        """The minimum is valid on all of them; a second vote would only cost a round."""
        fleet = refused(hint_refine=True)
        for cache, valid in zip(fleet.caches, ([32], [16]), strict=True):
            cache.valid[1] = [16, *valid]
            cache.available = 1_000
        fleet.announce(1)
        fleet.round(2)
        assert [(r.phase, r.endpoint) for r in fleet.records] == [(LEASE, 16)]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_whether_it_is_done_follows_from_the_votes_on_every_rank(self, rank: int) -> None:
        """I7: one sparse rank, whichever; the others would not know by themselves."""
        windows = [[dense(40)], [dense(40)]]
        windows[rank] = [dense(40), states(8)]
        fleet = RealFleet(*windows, hint_refine=True, snapshot_interval_tokens=4 * B)
        fleet.warm(1, range(10))  # points 4, 8, 10
        fleet.books[rank].evict(1, 3)
        fleet.ask(2, (*range(10), 99))
        fleet.round()
        assert {r.machine._replica._hints._is_refining for r in fleet.ranks} == {True}
        assert fleet.until_admitted(2) == 0
        assert fleet.steps(2) == [(1, LEASE, 0)]

    def test_losing_the_sparse_votes_is_not_possible_to_miss(self) -> None:
        """Refinement follows the merged votes, equally everywhere, also when they change."""
        fleet = self.fleet()

        def dense_now(vote: RoundVote) -> RoundVote:
            return msgspec.structs.replace(vote, is_sparse=False)

        fleet.round(edit=dense_now)
        flags = {rank.machine._replica._hints._is_refining for rank in fleet.ranks}
        assert flags == {False}
