"""Ranks meet through Dynamo's real discovery, file backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from wavepp_worker.base.errors import ConfigError, PeerError
from wavepp_worker.runtime.membership import Membership, RankRecord

pytestmark = pytest.mark.dynamo

MakeMember = Callable[[str], Membership]


@pytest.fixture
def make_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeMember]:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path))
    members: list[Membership] = []

    def make(group: str = "g") -> Membership:
        members.append(Membership("a.b", group, "127.0.0.1"))
        return members[-1]

    yield make
    for member in members:
        member.close()


def record_of(member: Membership, rank: int, epoch: int = 5) -> RankRecord:
    return RankRecord(
        rank=rank,
        epoch=epoch,
        instance=member.instance,
        rounds_address=f"tcp://rounds{rank}",
        wave_address=f"tcp://wave{rank}",
        store_address="",
    )


def join_all(
    members: list[Membership], records: list[RankRecord], timeout_s: float = 10.0
) -> list[tuple[RankRecord, ...] | PeerError]:
    """Join from one thread per member, each for as many ranks as the last record names."""
    ranks = max(record.rank for record in records) + 1

    def join(member: Membership, record: RankRecord) -> tuple[RankRecord, ...] | PeerError:
        try:
            return member.join(record, ranks, timeout_s)
        except PeerError as error:
            return error

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(join, members, records))


def test_all_ranks_see_all_records_in_rank_order(make_member: MakeMember) -> None:
    members = [make_member("g") for _ in range(3)]
    records = [record_of(member, rank) for rank, member in enumerate(members)]
    assert join_all(members, records) == [tuple(records)] * 3


def test_groups_do_not_meet(make_member: MakeMember) -> None:
    members = [make_member("g1"), make_member("g2")]
    records = [record_of(member, rank) for rank, member in enumerate(members)]
    results = join_all(members, records, timeout_s=0.5)
    assert [str(result) for result in results] == [
        "ranks [1] did not appear within 0.5 s",
        "ranks [0] did not appear within 0.5 s",
    ]


def test_earlier_epoch_is_ignored_and_learns_that_it_is_over(make_member: MakeMember) -> None:
    stale, new0, new1 = (make_member("g") for _ in range(3))
    records = [record_of(stale, 1, epoch=4), record_of(new0, 0), record_of(new1, 1)]
    outcome = join_all([stale, new0, new1], records)
    assert outcome[1:] == [tuple(records[1:])] * 2
    assert str(outcome[0]).startswith("epoch 4 is over")


def test_two_processes_of_one_rank_are_refused(make_member: MakeMember) -> None:
    members = [make_member("g") for _ in range(3)]
    records = [record_of(members[0], 2), record_of(members[1], 1), record_of(members[2], 1)]
    outcome = join_all(members, records, timeout_s=3.0)
    assert any("two processes claim rank 1" in str(result) for result in outcome)
    assert not any(isinstance(result, tuple) for result in outcome)


def test_discovery_that_ends_at_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")
    with pytest.raises(ConfigError, match="mem"):
        Membership("n", "g", "127.0.0.1")
