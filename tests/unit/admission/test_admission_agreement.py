"""Whole rounds of several ranks on scripted caches: how endpoints are agreed.  [X1, 6.4, 9.6]"""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.admission.rig import Call, Fleet
from wavepp_worker.admission.commands import SendAdmitting, SendInstall
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    Record,
    RecordPhase,
    RoundVote,
)

LEASE, TRIM, COMMIT, RELEASE = RecordPhase
RID = 5
K = 1_000  # the worked example counts in thousands of tokens


def fleet_of(*endpoints: list[int], tokens: int = 100 * K, **options: object) -> Fleet:
    """Return ranks whose trees can resume RID at these endpoints, with RID announced."""
    fleet = Fleet(len(endpoints), **options)  # type: ignore[arg-type]
    for cache, valid in zip(fleet.caches, endpoints, strict=True):
        cache.valid[RID] = valid
        cache.available = cache.total = 1_000 * K
    fleet.round()
    fleet.announce(RID, tokens=tokens)
    fleet.round()
    return fleet


def steps(fleet: Fleet) -> list[tuple[int, RecordPhase, int]]:
    """Return (attempt, phase, endpoint) of all records of RID, repeats once."""
    seen = [r for bcast in fleet.bcasts for r in bcast.records if r.rid == RID]
    return [
        (r.attempt, r.phase, r.endpoint) for i, r in enumerate(seen) if i == 0 or seen[i - 1] != r
    ]


def endpoints(fleet: Fleet) -> list[int]:
    return [installs[RID].install.endpoint for installs in fleet.installs]


def test_two_rounds_when_nothing_is_contested() -> None:
    fleet = fleet_of([64 * K], [96 * K, 64 * K])
    assert all(installs == {} for installs in fleet.installs)
    fleet.round()
    assert steps(fleet) == [(1, LEASE, 64 * K)]
    assert endpoints(fleet) == [64 * K, 64 * K]


def test_installs_carry_tokens_to_the_first_and_sampling_to_the_last_rank() -> None:
    fleet = fleet_of([], [], [], tokens=8)
    fleet.round()
    installs = [installs[RID].install for installs in fleet.installs]
    assert installs[0].announced_at == 10.0 < installs[0].admitted_at
    assert [i.announced_at for i in installs[1:]] == [0.0, 0.0]
    assert [i.tokens for i in installs] == [RID.to_bytes(4, "little") * 8, b"", b""]
    assert [i.sampling and i.sampling.seed for i in installs] == [None, None, RID]
    assert [i.ino for i in installs] == [1, 1, 1]


def test_one_rank_uses_the_same_paths_and_sends_nothing() -> None:
    fleet = fleet_of([64 * K])
    fleet.round()
    install = fleet.installs[0][RID].install
    assert install.endpoint == 64 * K
    assert install.tokens and install.sampling
    assert fleet.bcasts == []
    assert {type(c) for c in fleet.outward[0][1:]} == {SendAdmitting, SendInstall}


SNAPSHOTS = ([64 * K, 72 * K, 90 * K], [64 * K, 80 * K])


def test_x1_path_a_lowers_by_new_attempts() -> None:
    fleet = fleet_of(*SNAPSHOTS, sparse=True)
    fleet.round(3)
    assert steps(fleet) == [(1, LEASE, 80 * K), (2, LEASE, 72 * K), (3, LEASE, 64 * K)]
    assert endpoints(fleet) == [64 * K, 64 * K]
    assert fleet.caches[1].names(RID)[:4] == ["learn", "acquire", "prepare", "commit"]


def test_x1_path_a_with_a_third_rank() -> None:
    fleet = fleet_of(*SNAPSHOTS, [60 * K, 64 * K, 70 * K, 88 * K], sparse=True)
    fleet.round(3)
    assert steps(fleet) == [(1, LEASE, 80 * K), (2, LEASE, 70 * K), (3, LEASE, 64 * K)]
    assert endpoints(fleet) == [64 * K] * 3


def test_x1_path_b_lowers_by_trims() -> None:
    fleet = fleet_of(*SNAPSHOTS, sparse=True, auto_commit=False)
    fleet.round(4)
    assert steps(fleet) == [
        (1, LEASE, 80 * K),
        (1, TRIM, 72 * K),
        (1, TRIM, 64 * K),
        (1, COMMIT, 64 * K),
    ]
    assert not any(r.flags & FLAG_COMMIT for bcast in fleet.bcasts for r in bcast.records)
    assert endpoints(fleet) == [64 * K, 64 * K]
    assert Call("trim", RID, 72 * K) in fleet.caches[1].calls


def test_x1_path_c_refines_hints_before_any_lease() -> None:
    fleet = fleet_of(*SNAPSHOTS, sparse=True, hint_refine=True)
    request = fleet.ranks[0].machine._replica.requests[RID]
    seen = [request.candidate]
    for _ in range(3):
        fleet.round()
        seen.append(request.candidate)
    assert seen == [80 * K, 72 * K, 64 * K, 64 * K]
    fleet.round()
    assert steps(fleet) == [(1, LEASE, 64 * K)]
    assert endpoints(fleet) == [64 * K, 64 * K]


def test_attention_only_trim_commits_in_the_same_step() -> None:
    fleet = fleet_of([96 * K], [96 * K], tokens=100 * K)
    fleet.caches[0].valid[RID] = [64 * K, 32 * K]  # evicted between hint and lease
    fleet.caches[1].valid[RID] = [32 * K]
    fleet.round(2)
    assert steps(fleet) == [(1, LEASE, 96 * K), (1, TRIM, 32 * K)]
    assert fleet.records[0].flags == FLAG_COMMIT
    assert endpoints(fleet) == [32 * K, 32 * K]


def test_equal_leases_below_the_candidate_are_committed() -> None:
    fleet = fleet_of([96 * K], [96 * K])
    for cache in fleet.caches:
        cache.valid[RID] = [64 * K]
    fleet.round(2)
    assert steps(fleet) == [(1, LEASE, 96 * K), (1, COMMIT, 64 * K)]
    assert endpoints(fleet) == [64 * K, 64 * K]


def test_x4_a_cut_claim_lowers_all_ranks() -> None:
    """Rank 0's lease ends before a contested victim; rank 1 had committed the candidate."""
    fleet = fleet_of([96 * K, 64 * K], [96 * K, 64 * K])
    fleet.caches[0].valid[RID] = [64 * K]
    fleet.round(2)
    assert steps(fleet) == [(1, LEASE, 96 * K), (2, LEASE, 64 * K)]
    assert endpoints(fleet) == [64 * K, 64 * K]
    names = fleet.caches[1].names(RID)
    assert names.index("release") < len(names) - 1 - names[::-1].index("acquire")


def test_a_failure_releases_all_ranks() -> None:
    fleet = fleet_of([96 * K], [96 * K], [96 * K])
    fleet.caches[1].failures = [("prepare", RID)]
    fleet.round(2)
    assert steps(fleet) == [(1, LEASE, 96 * K), (1, RELEASE, 0)]
    assert [cache.leases for cache in fleet.caches] == [{}, {}, {}]
    assert fleet.caches[0].names(RID)[-1] == "release"
    assert fleet.caches[1].names(RID)[-1] == "prepare"


def test_a_missing_answer_repeats_the_record_and_old_answers_do_not_count() -> None:
    fleet = fleet_of([96 * K], [96 * K])

    def hide(vote: RoundVote) -> RoundVote:
        return msgspec.structs.replace(vote, votes=())

    fleet.round(3, edit=hide)
    assert fleet.bcasts[-1].records == (Record(RID, 1, LEASE, 96 * K, FLAG_COMMIT),)
    assert fleet.installs == [{}, {}]
    fleet.round()
    assert fleet.caches[1].names(RID) == ["learn", "acquire", "prepare", "commit", "materialize"]
    assert endpoints(fleet) == [96 * K, 96 * K]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_installs_are_numbered_in_arrival_order_on_every_rank(stages: int) -> None:
    fleet = Fleet(stages)
    fleet.round()
    fleet.announce(9, 3, 7)
    fleet.round(2)
    for rank in range(stages):
        installs = [c.install for c in fleet.sent(SendInstall, rank)]  # type: ignore[attr-defined]
        assert [(i.ino, i.rid) for i in installs] == [(1, 9), (2, 3), (3, 7)]
    assert [c.count for c in fleet.sent(SendAdmitting)] == [3, 0]  # type: ignore[attr-defined]
