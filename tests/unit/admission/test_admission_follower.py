"""One follower, one record at a time: which sections run, and what is voted."""

from __future__ import annotations

import pytest

from tests.unit.admission.rig import EPOCH, B, ScriptedCache, make_settings
from wavepp_worker.admission.commands import (
    Outward,
    SendCacheView,
    SendInstall,
    SendVote,
    ShutDown,
    Transition,
)
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    GatheredReceived,
    HintProbed,
    Tick,
)
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.base.errors import InvariantError, PeerError
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.mailbox import Announce, Freed, Sampling
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    FLAG_NO_FLOOR,
    AnnounceEntry,
    HintVote,
    Record,
    RecordPhase,
    RecordVote,
    RoundBcast,
    RoundGathered,
    RoundVote,
    VoteStatus,
)

RID = 42
LEASE, TRIM, COMMIT, RELEASE = RecordPhase


class Follower:
    """Rank 1 of 2 and the leader's side of its rounds."""

    def __init__(self, endpoints: list[int] | None = None, **changes: object) -> None:
        self.cache = ScriptedCache()
        self.cache.valid[RID] = endpoints if endpoints is not None else [32, 16]
        self.rank = InlineRank(make_settings(rank=1, stages=2, **changes), self.cache)  # type: ignore[arg-type]
        self.number = 0
        self.now = 1.0
        self.entry = AnnounceEntry(RID, 1, 40, bytes(320), (), Sampling(seed=5))

    def apply(self, **parts: object) -> RoundVote:
        """Send the next broadcast; return the vote."""
        self.number += 1
        bcast = RoundBcast(EPOCH, self.number, **parts)  # type: ignore[arg-type]
        votes = [c.vote for c in self.handle(BroadcastReceived(bcast)) if isinstance(c, SendVote)]
        assert len(votes) == 1
        self.vote = votes[0]
        return self.vote

    def merge(self, **leader_vote: object) -> list[Outward]:
        leader = RoundVote(EPOCH, self.number, 0, **leader_vote)  # type: ignore[arg-type]
        gathered = RoundGathered(EPOCH, self.number, (leader, self.vote))
        return self.handle(GatheredReceived(gathered))

    def handle(self, event: BroadcastReceived | GatheredReceived) -> list[Outward]:
        commands = self.rank.handle(event, Instant(self.now))
        self.rank.machine.check_invariants()
        return [c for c in commands if not isinstance(c, Transition)]

    def announced(self) -> Follower:
        self.apply(announces=(self.entry,))
        self.merge(hints=(HintVote(RID, 32),))
        self.cache.calls.clear()
        return self

    def record(
        self, phase: RecordPhase, endpoint: int = 32, attempt: int = 1, flags: int = FLAG_COMMIT
    ) -> RecordVote:
        """Send one record in a round of its own; return the answer."""
        vote = self.apply(records=(Record(RID, attempt, phase, endpoint, flags),))
        self.merge()
        assert len(vote.votes) == 1
        return vote.votes[0]

    def admitted(self) -> Follower:
        self.announced()
        record = Record(RID, 1, LEASE, 32, FLAG_COMMIT)
        answer = self.apply(records=(record,)).votes[0]
        self.out = self.merge(votes=(answer,))
        return self


def test_announce_is_answered_with_a_hint_in_the_same_round() -> None:
    follower = Follower([32, 16])
    vote = follower.apply(announces=(follower.entry,))
    assert vote.hints == (HintVote(RID, 32),)
    assert (vote.available_tokens, vote.total_tokens) == (1_000, 1_000)
    follower.merge(hints=(HintVote(RID, 16),))
    assert follower.apply().hints == ()


def test_candidate_is_the_minimum_of_all_hints() -> None:
    follower = Follower([32, 16])
    follower.apply(announces=(follower.entry,))
    follower.merge()
    request = follower.rank.machine._replica.requests[RID]
    assert (request.candidate, request.phase) == (None, "announced")
    follower.apply()
    follower.merge(hints=(HintVote(RID, 16),))
    assert (request.candidate, request.phase) == (16, "hinted")


def test_lease_at_the_candidate_commits_in_the_same_step() -> None:
    follower = Follower().announced()
    vote = follower.record(LEASE)
    assert vote == RecordVote(RID, 1, LEASE, VoteStatus.COMMITTED, 32, True)
    assert follower.cache.names(RID) == ["acquire", "prepare", "commit"]


def test_lease_below_the_candidate_stays_prepared() -> None:
    follower = Follower([16]).announced()
    assert follower.record(LEASE) == RecordVote(RID, 1, LEASE, VoteStatus.PREPARED, 16)
    assert follower.cache.names(RID) == ["acquire", "prepare"]


def test_lease_without_auto_commit_stays_prepared() -> None:
    follower = Follower().announced()
    assert follower.record(LEASE, flags=0).status == VoteStatus.PREPARED


def test_flags_waive_the_floors() -> None:
    follower = Follower().announced()
    follower.record(LEASE, flags=FLAG_COMMIT | FLAG_NO_FLOOR)
    assert [c.value for c in follower.cache.calls if c.name == "prepare"] == [1]


def test_a_failed_prepare_holds_nothing_and_carries_its_generation() -> None:
    follower = Follower().announced()
    follower.cache.failures = [("prepare", RID)]
    follower.cache.capacity_generation = 9
    vote = follower.record(LEASE)
    assert (vote.status, vote.generation, vote.is_committed) == (VoteStatus.PREP_FAILED, 9, False)
    follower.cache.names(RID)
    assert follower.record(RELEASE, 0, flags=0).status == VoteStatus.RELEASED
    assert follower.cache.names(RID) == []


def test_a_failed_commit_keeps_the_reservation_until_released() -> None:
    follower = Follower().announced()
    follower.cache.failures = [("commit", RID)]
    follower.cache.capacity_generation = 9
    vote = follower.record(LEASE)
    assert (vote.status, vote.generation) == (VoteStatus.COMMIT_FAILED, 9)
    assert RID in follower.cache.leases
    assert follower.record(RELEASE, 0, flags=0).status == VoteStatus.RELEASED
    assert follower.cache.names(RID)[-1] == "release"
    assert follower.cache.leases == {}


def test_trim_lands_and_commits() -> None:
    follower = Follower().announced()
    follower.record(LEASE, flags=0)
    assert follower.record(TRIM, 16) == RecordVote(RID, 1, TRIM, VoteStatus.COMMITTED, 16, True)
    assert follower.cache.names(RID) == ["acquire", "prepare", "trim", "commit"]


def test_trim_that_falls_further_stays_prepared_then_commits_when_told() -> None:
    follower = Follower([32, 8]).announced()
    follower.record(LEASE, flags=0)
    assert follower.record(TRIM, 16) == RecordVote(RID, 1, TRIM, VoteStatus.PREPARED, 8)
    assert follower.record(COMMIT, 8, flags=0).status == VoteStatus.COMMITTED


def test_a_new_attempt_releases_the_old_one_first() -> None:
    follower = Follower().announced()
    follower.record(LEASE)
    assert follower.record(LEASE, 16, attempt=2) == RecordVote(
        RID, 2, LEASE, VoteStatus.COMMITTED, 16, True
    )
    names = follower.cache.names(RID)
    assert names == ["acquire", "prepare", "commit", "release", "acquire", "prepare", "commit"]


def test_a_repeated_record_is_answered_without_doing_anything() -> None:
    """I30"""
    follower = Follower().announced()
    for phase, endpoint, flags in [(LEASE, 32, 0), (TRIM, 16, FLAG_COMMIT), (RELEASE, 0, 0)]:
        first = follower.record(phase, endpoint, flags=flags)
        follower.cache.calls.clear()
        assert follower.record(phase, endpoint, flags=flags) == first
        assert follower.cache.calls == []


def test_a_record_of_an_older_attempt_is_answered_with_the_current_state() -> None:
    """I32"""
    follower = Follower().announced()
    follower.record(LEASE)
    current = follower.record(LEASE, 16, attempt=2)
    follower.cache.calls.clear()
    assert follower.record(LEASE, 32, attempt=1) == current
    assert follower.record(RELEASE, 0, attempt=1, flags=0) == current
    assert follower.cache.calls == []


def test_answers_of_older_attempts_are_forgotten() -> None:
    """However often a waiting head is tried, what a rank remembers of it stays small."""
    follower = Follower().announced()
    for attempt in range(1, 50):
        follower.record(LEASE, attempt=attempt)
        follower.record(RELEASE, 0, attempt=attempt, flags=0)
    assert len(follower.rank.machine._replica.requests[RID].answers) == 2


def test_an_unknown_request_is_named_as_such() -> None:
    follower = Follower()
    assert follower.record(RELEASE).status == VoteStatus.UNKNOWN_RID
    assert follower.record(LEASE).status == VoteStatus.UNKNOWN_RID


def test_records_that_do_not_follow_the_state_are_a_bug() -> None:
    with pytest.raises(InvariantError, match="does not follow"):
        Follower().announced().record(COMMIT)
    follower = Follower().announced()
    follower.record(LEASE)
    with pytest.raises(InvariantError, match="committed"):
        follower.record(TRIM, 16)
    follower = Follower().announced()
    follower.record(LEASE, flags=0)
    with pytest.raises(InvariantError, match="not leased"):
        follower.record(COMMIT, 16)


def test_unanimous_commit_installs_without_another_round() -> None:
    follower = Follower().admitted()
    install = follower.out[0].install  # type: ignore[attr-defined]
    assert (install.ino, install.rid, install.endpoint, install.prompt_tokens) == (1, RID, 32, 40)
    assert install.tables == ((1, 2, 3),)
    assert install.tokens == b""
    assert install.sampling == Sampling(seed=5)
    assert follower.apply().installed == (RID,)
    follower.merge()
    assert follower.apply().installed == ()


def test_nothing_is_installed_unless_all_committed() -> None:
    follower = Follower().announced()
    record = Record(RID, 1, LEASE, 32, FLAG_COMMIT)
    follower.apply(records=(record,))
    answer = RecordVote(RID, 1, LEASE, VoteStatus.PREPARED, 16)
    assert follower.merge(votes=(answer,)) == []
    follower.apply(records=(record,))
    assert follower.merge() == []  # votes of earlier rounds are not kept


def test_an_admission_that_this_rank_did_not_commit_is_a_bug() -> None:
    follower = Follower([16]).announced()
    vote = follower.apply(records=(Record(RID, 1, LEASE, 32, FLAG_COMMIT),))
    forged = RecordVote(RID, 1, LEASE, VoteStatus.COMMITTED, 16, True)
    follower.vote = RoundVote(EPOCH, vote.round, 1, votes=(forged,))
    with pytest.raises(InvariantError, match="did not commit"):
        follower.merge(votes=(forged,))


def test_records_after_admission_are_answered_with_it() -> None:
    follower = Follower().admitted()
    follower.cache.calls.clear()
    assert follower.record(RELEASE, 0, flags=0).status == VoteStatus.COMMITTED
    assert follower.record(LEASE, 16, attempt=2).endpoint == 32
    assert follower.cache.calls == []


def test_a_repeated_record_never_admits_twice() -> None:
    """I13, I30: the answer to a record of an admitted request is its admission."""
    follower = Follower().admitted()
    follower.cache.calls.clear()
    vote = follower.apply(records=(Record(RID, 1, LEASE, 32, FLAG_COMMIT),))
    assert vote.votes[0].is_committed
    assert follower.merge(votes=vote.votes) == []
    assert follower.cache.names(RID) == []


def test_freed_votes_gone_once_and_forgets() -> None:
    follower = Follower().admitted()
    follower.rank.freed(Freed(RID), Instant(2.0))
    assert follower.cache.names(RID)[-2:] == ["free", "forget"]
    assert follower.apply().gone == (RID,)
    follower.merge()
    assert follower.apply().gone == ()
    assert follower.rank.machine._replica.requests == {}


def test_freed_without_install_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="not installed"):
        Follower().announced().rank.freed(Freed(RID), Instant(2.0))


class TestCancelRecord:
    """Whatever the phase before ADMITTED: escrow, lease, keys, then gone.  [I14]"""

    def cancel(self, follower: Follower) -> tuple[list[str], tuple[int, ...]]:
        follower.cache.calls.clear()
        gone = follower.apply(cancels=(RID,)).gone
        follower.merge()
        return follower.cache.names(RID), gone

    def test_unknown(self) -> None:
        assert self.cancel(Follower()) == ([], (RID,))

    def test_announced(self) -> None:
        follower = Follower()
        follower.apply(announces=(follower.entry,))
        follower.merge()
        assert self.cancel(follower) == (["forget"], (RID,))

    def test_hinted_and_its_due_hint(self) -> None:
        follower = Follower().announced()
        follower.cache.index_version += 1
        follower.cache.hints[RID] = 8
        assert self.cancel(follower) == (["forget"], (RID,))
        assert follower.rank.machine._replica.requests == {}

    @pytest.mark.parametrize("flags", [0, FLAG_COMMIT])
    def test_leased_or_committed(self, flags: int) -> None:
        follower = Follower().announced()
        follower.record(LEASE, flags=flags)
        assert self.cancel(follower) == (["release", "forget"], (RID,))

    @pytest.mark.parametrize(
        ("section", "names"), [("prepare", ["forget"]), ("commit", ["release", "forget"])]
    )
    def test_failed(self, section: str, names: list[str]) -> None:
        follower = Follower().announced()
        follower.cache.failures = [(section, RID)]
        follower.record(LEASE)
        assert self.cancel(follower) == (names, (RID,))

    def test_released(self) -> None:
        follower = Follower().announced()
        follower.record(LEASE)
        follower.record(RELEASE, 0, flags=0)
        assert self.cancel(follower) == (["forget"], (RID,))

    def test_admitted_is_left_to_the_release_of_loop(self) -> None:
        """S2"""
        follower = Follower().admitted()
        assert self.cancel(follower) == ([], ())
        follower.rank.freed(Freed(RID), Instant(2.0))
        assert follower.apply().gone == (RID,)

    def test_repeated_is_answered_again(self) -> None:
        follower = Follower().announced()
        self.cancel(follower)
        assert self.cancel(follower) == ([], (RID,))

    def test_before_records_of_the_same_round(self) -> None:
        follower = Follower().announced()
        vote = follower.apply(cancels=(RID,), records=(Record(RID, 1, LEASE, 32, FLAG_COMMIT),))
        assert vote.votes[0].status == VoteStatus.UNKNOWN_RID


class TestHintRefresh:
    """A9: waiting requests are probed again when the index changed, at most once per T_idle."""

    def test_changed_hints_are_voted_once(self) -> None:
        follower = Follower().announced()
        follower.cache.hints[RID] = 16
        assert follower.apply().hints == ()  # the index did not change
        follower.merge()
        follower.cache.index_version += 1
        assert follower.apply().hints == (HintVote(RID, 16),)
        follower.merge()
        assert follower.rank.machine._replica.requests[RID].candidate == 16
        assert follower.apply().hints == ()

    def test_rate_is_limited_and_nothing_is_lost(self) -> None:
        follower = Follower().announced()
        follower.cache.index_version, follower.cache.hints[RID] = 1, 16
        follower.apply()
        follower.merge()
        follower.cache.index_version, follower.cache.hints[RID] = 2, 8
        assert follower.apply().hints == ()
        follower.merge()
        follower.now += 0.006
        assert follower.apply().hints == (HintVote(RID, 8),)

    def test_not_while_an_attempt_is_open(self) -> None:
        follower = Follower().announced()
        follower.record(LEASE)
        follower.cache.index_version, follower.cache.hints[RID] = 1, 16
        assert follower.apply().hints == ()


class TestLateAndRepeatedFrames:
    def test_a_repeated_broadcast_is_ignored(self) -> None:
        follower = Follower().announced()
        follower.record(LEASE)
        follower.cache.calls.clear()
        for number in (1, 2):
            bcast = RoundBcast(EPOCH, number, announces=(follower.entry,), cancels=(RID,))
            assert follower.handle(BroadcastReceived(bcast)) == []
        assert follower.cache.calls == []

    def test_a_repeated_gathering_is_ignored(self) -> None:
        follower = Follower().admitted()
        answer = RecordVote(RID, 1, LEASE, VoteStatus.COMMITTED, 32, True)
        assert follower.merge(votes=(answer,)) == []
        assert follower.rank.machine.stats()["wavepp_stale_messages_total"] == 1

    def test_another_epoch_is_ignored(self) -> None:
        follower = Follower().announced()
        assert follower.handle(BroadcastReceived(RoundBcast(EPOCH - 1, 2, shutdown=True))) == []
        follower.apply()
        gathered = RoundGathered(EPOCH + 1, follower.number, ())
        assert follower.handle(GatheredReceived(gathered)) == []
        assert follower.rank.machine._replica.open_bcast is not None
        follower.merge()
        assert follower.rank.machine._replica.open_bcast is None

    def test_an_announce_that_was_delivered_before_is_ignored(self) -> None:
        follower = Follower().announced()
        follower.apply(cancels=(RID,))
        follower.merge()
        follower.cache.calls.clear()
        follower.apply(announces=(follower.entry,))
        assert follower.cache.names(RID) == []

    def test_a_gap_in_the_rounds_ends_the_rank(self) -> None:
        with pytest.raises(PeerError, match="round 3 came after round 1"):
            Follower().announced().handle(BroadcastReceived(RoundBcast(EPOCH, 3)))

    def test_a_broadcast_before_the_last_merge_is_a_bug(self) -> None:
        follower = Follower()
        follower.apply()
        with pytest.raises(InvariantError, match="before the last was merged"):
            follower.apply()


def test_view_request_and_shutdown() -> None:
    follower = Follower()
    out = follower.handle(BroadcastReceived(RoundBcast(EPOCH, 1, view_request=8)))
    assert out[0] == SendCacheView(8)
    follower.vote = next(c.vote for c in out if isinstance(c, SendVote))
    follower.number = 1
    follower.merge()
    bcast = RoundBcast(EPOCH, 2, shutdown=True, reason="done")
    assert follower.handle(BroadcastReceived(bcast)) == [ShutDown("done")]
    assert follower.handle(BroadcastReceived(RoundBcast(EPOCH, 3))) == []
    assert follower.rank.next_deadline() is None


def test_a_follower_has_no_clock_and_no_clients() -> None:
    follower = Follower()
    assert follower.rank.next_deadline() is None
    assert follower.rank.handle(Tick(), Instant(5.0)) == []
    with pytest.raises(InvariantError, match="for the leader"):
        follower.rank.handle(Announced(Announce(1, B, bytes(32), b"")), Instant(5.0))


def test_sections_are_answered_one_by_one() -> None:
    follower = Follower()
    machine = follower.rank.machine
    with pytest.raises(InvariantError, match="unasked"):
        machine.handle(HintProbed(0, 0), Instant(1.0))
    bcast = RoundBcast(EPOCH, 1, announces=(follower.entry,))
    machine.handle(BroadcastReceived(bcast), Instant(1.0))
    with pytest.raises(InvariantError, match="not answered"):
        machine.handle(Tick(), Instant(1.0))


def test_stories_tell_the_way_of_a_request() -> None:
    follower = Follower()
    seen: list[tuple[str, str]] = []
    original = follower.rank.handle

    def handle(event, now):  # type: ignore[no-untyped-def]
        commands = original(event, now)
        seen.extend((str(c.old), str(c.new)) for c in commands if isinstance(c, Transition))
        return commands

    follower.rank.handle = handle  # type: ignore[method-assign]
    follower.admitted()
    follower.rank.freed(Freed(RID), Instant(2.0))
    assert [new for _, new in seen] == [
        "announced",
        "hinted",
        "leasing",
        "leased",
        "committed",
        "admitted",
        "done",
    ]
    assert [old for old, _ in seen[1:]] == [new for _, new in seen[:-1]]
    assert isinstance(follower.out[0], SendInstall)
