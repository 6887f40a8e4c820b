"""The leader: selection limits, waiting and waking, cancellation, pacing, ends."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.admission.rig import EPOCH, Fleet, ScriptedCache, make_settings
from wavepp_worker.admission import limits
from wavepp_worker.admission.commands import (
    ReportGone,
    ReportReady,
    ReportRejected,
    SendCacheView,
    SendDrop,
    ShutDown,
)
from wavepp_worker.admission.events import (
    Announced,
    ShutdownRequested,
    Tick,
    ViewRequested,
    VoteReceived,
)
from wavepp_worker.admission.settings import Spacing, admission_settings
from wavepp_worker.base.errors import InvariantError, PeerError
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.config.derive import ModelFacts, derive
from wavepp_worker.config.schema import Config, ModelConfig
from wavepp_worker.wire.mailbox import Announce
from wavepp_worker.wire.rounds import (
    FLAG_COMMIT,
    FLAG_NO_FLOOR,
    HintVote,
    RecordPhase,
    RoundVote,
)

LEASE, TRIM, COMMIT, RELEASE = RecordPhase


def started(stages: int = 2, **options: object) -> Fleet:
    fleet = Fleet(stages, **options)  # type: ignore[arg-type]
    fleet.round()
    return fleet


def leases(fleet: Fleet) -> list[int]:
    """Return whom the last broadcast leases for."""
    return [record.rid for record in fleet.records if record.phase == LEASE]


def failed(fleet: Fleet, rid: int, rank: int = 1, section: str = "prepare") -> None:
    """Run rounds until the open attempt of `rid` has failed on `rank` and is closed."""
    fleet.caches[rank].failures.append((section, rid))
    fleet.round(2)
    assert [r.phase for r in fleet.records if r.rid == rid] == [RELEASE]


def keep_open(fleet: Fleet, *rids: int) -> None:
    """From now on rank 1's answers about these requests are lost: their attempts stay open."""
    original = fleet.round

    def hide(vote: RoundVote) -> RoundVote:
        kept = tuple(v for v in vote.votes if v.rid not in rids)
        return msgspec.structs.replace(vote, votes=kept)

    fleet.round = lambda count=1, **options: original(count, **{"edit": hide, **options})  # type: ignore[method-assign]


# ── selection ────────────────────────────────────────────────────────────────────────────────


class TestLimits:
    def test_x8_headroom_and_oversized(self) -> None:
        settings = make_settings(stages=4, block_tokens=64, headroom_tokens=131_072)
        votes = [RoundVote(1, 1, rank, available_tokens=600_000) for rank in range(4)]
        assert not limits.has_room(200_000, 131_072, votes, [300_000, 0, 0, 0])
        assert limits.has_room(200_000, 131_072, votes, [150_000] * 4)
        assert limits.is_oversized(settings, 190_000, 300_000)
        assert not limits.is_oversized(settings, 168_000, 300_000)

    def test_the_floor_counts_when_it_exceeds_the_headroom(self) -> None:
        settings = make_settings(headroom_tokens=8, floor_fraction=0.1, floor_headroom_blocks=100)
        assert limits.is_oversized(settings, 4 * 91, 400)
        assert not limits.is_oversized(settings, 4 * 90, 400)

    def test_a_prompt_must_fit_the_empty_pool(self) -> None:
        settings = make_settings()
        assert limits.can_ever_fit(settings, 399, 400)
        assert limits.can_ever_fit(settings, 400, 400)
        assert not limits.can_ever_fit(settings, 401, 400)

    def test_settings_come_from_the_plan(self) -> None:
        facts = ModelFacts(
            family="llama",
            layers=4,
            hidden=8,
            vocab=10,
            context_tokens=1_000,
            kv_heads=1,
            head_dim=8,
            dtype="float32",
            dtype_bytes=4,
            fingerprint="f",
        )
        config = Config(model=ModelConfig(path="m"))
        settings = admission_settings(config, derive(config, facts), rank=1, epoch=6)
        assert (settings.stages, settings.headroom_tokens) == (2, 2 * 2 * 16_384)
        assert settings.snapshot_interval_tokens == 16_384  # M, unless configured otherwise
        assert (settings.is_leader, settings.is_last, settings.epoch) == (False, True, 6)
        assert (settings.round_min_s, settings.round_quiet_s) == (0.000_2, 0.05)
        assert not settings.is_strict


def test_at_most_k_requests_are_pending_until_all_ranks_acknowledge() -> None:
    fleet = started(batch_requests_max=2)
    fleet.announce(1, 2, 3, 4, 5)
    fleet.round(2)
    assert leases(fleet) == [1, 2]
    assert set(fleet.leader.queue.pending) == {1, 2}
    fleet.round()
    assert leases(fleet) == []  # admitted, the acknowledgements travel in this round
    fleet.round()
    assert leases(fleet) == [3, 4]


def test_s10_acknowledgements_end_pending_even_after_the_request_is_freed() -> None:
    fleet = started(batch_requests_max=1)
    fleet.announce(1, 2)
    fleet.round(2)
    fleet.free(1)
    fleet.round()
    assert fleet.leader.queue.pending.keys() == {2}
    fleet.round()
    assert leases(fleet) == [2]


def test_one_rank_without_acknowledgement_keeps_a_request_pending() -> None:
    fleet = started(batch_requests_max=1)
    fleet.announce(1, 2)
    fleet.round(2)
    fleet.round(2, edit=lambda vote: msgspec.structs.replace(vote, installed=()))
    assert fleet.leader.queue.pending.keys() == {1}
    fleet.round(edit=lambda vote: msgspec.structs.replace(vote, installed=(1,)))
    assert fleet.leader.queue.pending.keys() == {2}


def test_a_lowered_attempt_counts_until_it_is_answered() -> None:
    fleet = started()
    for cache in fleet.caches:
        cache.valid[1], cache.available = [32, 16], 100
    fleet.announce(1, tokens=60)
    fleet.round()
    fleet.caches[0].valid[1] = [16]  # evicted: rank 1 commits 32, rank 0 leases 16
    fleet.announce(2, tokens=60)
    fleet.round(2)
    assert [(r.rid, r.endpoint) for r in fleet.records] == [(1, 16)]  # 44 + 60 > 100
    fleet.round()
    assert leases(fleet) == [2]


def test_tokens_opened_in_the_same_decision_count() -> None:
    fleet = started(headroom_tokens=100)
    fleet.caches[1].available = 250
    fleet.announce(1, 2, 3, tokens=60)
    fleet.round(2)
    assert leases(fleet) == [1, 2]  # 3 * 60 + 100 > 250


def test_the_fuller_rank_decides_and_reported_needs_are_not_counted_twice() -> None:
    fleet = started(headroom_tokens=100)
    fleet.caches[1].available = 160
    fleet.announce(1, 2, tokens=60)
    fleet.round(2)
    assert leases(fleet) == [1]
    fleet.round()  # the same vote that shows what 1 took leaves room for 2
    assert leases(fleet) == [2]


def test_an_open_attempt_that_was_reported_is_not_counted_twice() -> None:
    """The vote that says PREPARED shows what was taken: 44 + 60 > 100 does not matter any more."""
    fleet = started(auto_commit=False)
    for cache in fleet.caches:
        cache.valid[1], cache.available = [16], 100
    fleet.announce(1, 2, tokens=60)
    fleet.round(2)
    assert [(r.rid, r.phase) for r in fleet.records] == [(1, LEASE)]
    fleet.round()
    assert [(r.rid, r.phase) for r in fleet.records] == [(1, COMMIT), (2, LEASE)]


def test_the_reused_prefix_is_not_needed_again() -> None:
    fleet = started(headroom_tokens=100)
    for cache in fleet.caches:
        cache.valid[1], cache.available = [40], 120
    fleet.announce(1, tokens=60)
    fleet.round(2)
    assert [(r.rid, r.endpoint) for r in fleet.records] == [(1, 40)]


def test_a_refused_head_blocks_younger_requests() -> None:
    fleet = started(headroom_tokens=100)
    fleet.caches[0].available = 140
    fleet.announce(1, tokens=80)
    fleet.announce(2, tokens=8)
    fleet.round(5)
    assert fleet.installs[0] == {}
    fleet.caches[0].available = 180
    fleet.round(2)
    assert leases(fleet) == [1]


def test_a_request_without_candidate_does_not_block() -> None:
    fleet = started()
    fleet.announce(1, 2)

    def late(vote: RoundVote) -> RoundVote:
        return msgspec.structs.replace(vote, hints=tuple(h for h in vote.hints if h.rid != 1))

    fleet.round(edit=late)
    fleet.round()
    assert leases(fleet) == [2]
    assert fleet.ranks[0].next_deadline() == pytest.approx(fleet.now + 0.000_5)


class TestOversized:
    def test_one_at_a_time_at_the_head_without_margin(self) -> None:
        fleet = started(headroom_tokens=400)
        fleet.announce(1, 2, tokens=700)
        fleet.announce(3, tokens=8)
        fleet.round(2)
        assert [(r.rid, r.flags) for r in fleet.records] == [(1, FLAG_COMMIT | FLAG_NO_FLOOR)]
        fleet.round(2)
        assert leases(fleet) == [2]

    def test_it_still_needs_its_own_tokens(self) -> None:
        fleet = started(headroom_tokens=400)
        fleet.caches[1].available = 699
        fleet.announce(1, tokens=700)
        fleet.round(3)
        assert leases(fleet) == []
        fleet.caches[1].available = 700
        fleet.round(2)
        assert leases(fleet) == [1]

    def test_s7_the_whole_footprint_counts(self) -> None:
        """100 blocks, floor 10, headroom 20, a request of 98 blocks of which 90 are cached."""
        cache = RankCache([WindowSpec(slots=100)], 4, 0.1, 100, check_always=True)
        fleet = Fleet(
            1,
            [cache],
            headroom_tokens=80,
            floor_fraction=0.1,
            floor_headroom_blocks=100,
        )
        tokens = b"".join(t.to_bytes(4, "little") for t in range(98 * 4))
        keys = sequence_keys(tokens, 4, scope_key("s7"))
        fleet.round()
        for rid, size in ((1, 90 * 4), (2, 98 * 4)):
            event_keys = keys[: 32 * (size // 4)]
            fleet.feed(0, announced(rid, size, event_keys, tokens[: 4 * size]))
            fleet.round(2)
            install = fleet.installs[0][rid].install
            assert install.endpoint == (0 if rid == 1 else 90 * 4)
            cache.publish(rid, size)
            fleet.free(rid)
            fleet.round()


def announced(rid: int, size: int, keys: bytes, tokens: bytes) -> Announced:
    return Announced(Announce(rid, size, keys, tokens))


# ── failures, news, solo, last resort ────────────────────────────────────────────────────────


class TestWaiting:
    def busy(self) -> Fleet:
        """Return a fleet where 1 runs, and 2 has failed on rank 1 and waits."""
        fleet = started()
        fleet.announce(1)
        fleet.round(3)
        fleet.announce(2)
        fleet.round()
        failed(fleet, 2)
        return fleet

    def test_it_holds_nothing_and_nothing_happens_without_news(self) -> None:
        fleet = self.busy()
        fleet.announce(3)
        fleet.round(20)
        assert leases(fleet) == []
        assert fleet.caches[0].leases == fleet.caches[1].leases == {}  # I29

    def test_a_higher_generation_of_the_failing_rank_wakes_it_after_t_idle(self) -> None:
        fleet = self.busy()
        closed = fleet.now
        fleet.caches[0].capacity_generation = 7  # rank 0 did not fail: no news
        fleet.round(3)
        assert leases(fleet) == []
        fleet.caches[1].capacity_generation = 1
        fleet.round(2)
        assert leases(fleet) == [2]
        assert fleet.now >= closed + 0.005

    def test_it_is_not_tried_again_before_t_idle(self) -> None:
        fleet = started(round_idle_s=0.5, round_quiet_s=0.5)
        fleet.announce(2)
        fleet.round()
        failed(fleet, 2)
        closed = fleet.now
        fleet.caches[1].capacity_generation = 1
        while not leases(fleet):
            fleet.wait(0.1)
            fleet.feed(0, ViewRequested(1))
            fleet.round()
        assert fleet.now >= closed + 0.5

    def test_s8_room_between_the_failing_section_and_the_vote_is_news(self) -> None:
        fleet = self.busy()
        fleet.caches[1].capacity_generation = 1
        fleet.round(2)
        assert leases(fleet) == [2]
        cache = fleet.caches[1]
        original = cache.available_tokens

        def freed_meanwhile() -> int:
            cache.capacity_generation = 2  # after the section, before the vote
            return original()

        cache.failures.append(("prepare", 2))
        cache.available_tokens = freed_meanwhile  # type: ignore[method-assign]
        fleet.round()
        assert leases(fleet) == []
        fleet.round(4)
        assert fleet.installs[0].keys() == {1, 2}

    def test_quiet_wakes_it_only_when_every_rank_voted_gone(self) -> None:
        fleet = self.busy()
        fleet.free(1, 0)
        fleet.round(10)
        assert leases(fleet) == []
        fleet.free(1, 1)
        fleet.round(2)
        assert leases(fleet) == [2]

    def test_an_attempt_open_at_the_same_time_that_closes_is_news(self) -> None:
        """S12: both fail on different ranks; the older is retried alone."""
        fleet = started()
        fleet.announce(9)
        fleet.round(3)  # 9 runs on, so it is never quiet
        fleet.announce(1, 2, 3)
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.caches[0].failures.append(("commit", 2))
        fleet.round(2)
        assert leases(fleet) == [1, 2, 3]
        fleet.round()
        assert [(r.rid, r.phase) for r in fleet.records] == [(1, RELEASE), (2, RELEASE)]
        fleet.round(2)
        assert leases(fleet) == [1]
        assert 1 in fleet.installs[0]
        fleet.round()
        assert leases(fleet) == []  # 1 is still pending, 2 waits for its acknowledgements
        fleet.round()
        assert leases(fleet) == [2]

    def test_it_is_tried_alone(self) -> None:
        """A51: news is not enough while something else is pending."""
        fleet = started()
        fleet.announce(1, 2)
        keep_open(fleet, 2)
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.round(3)
        fleet.caches[1].capacity_generation = 1
        fleet.round(10)
        assert leases(fleet) == [2]
        assert 1 not in fleet.leader.queue.pending

    def test_nothing_is_selected_beside_it(self) -> None:
        fleet = self.busy()
        fleet.caches[1].capacity_generation = 1
        keep_open(fleet, 2)
        fleet.announce(3)
        fleet.round(10)
        assert leases(fleet) == [2]
        assert fleet.leader.queue.pending.keys() == {2}
        assert 3 not in fleet.installs[0]

    def test_a_head_that_is_being_cancelled_blocks_nobody(self) -> None:
        fleet = self.busy()
        fleet.announce(3)
        fleet.round(2)
        fleet.round(between=lambda: fleet.cancel(2))
        fleet.round()
        assert (fleet.bcasts[-1].cancels, leases(fleet)) == ((2,), [3])

    def test_the_end_of_a_companion_is_news_once(self) -> None:
        """Else two requests that failed each other would keep a busy worker trying for ever."""
        fleet = started()
        fleet.announce(9)
        fleet.round(3)  # 9 runs on, so it is never quiet
        fleet.announce(1, 2)
        fleet.caches[1].failures += [("prepare", 1), ("prepare", 1)]
        fleet.caches[0].failures.append(("commit", 2))
        fleet.round(40)
        tried = {(r.rid, r.attempt) for bcast in fleet.bcasts for r in bcast.records if r.rid != 9}
        assert tried == {(1, 1), (2, 1), (1, 2)}

    def test_a_cancelled_companion_is_news_when_it_is_gone(self) -> None:
        fleet = started()
        fleet.announce(9)
        fleet.round(3)
        fleet.announce(1, 2)
        keep_open(fleet, 2)
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.round(2)
        fleet.round(10)
        assert leases(fleet) == [2]  # repeated for want of an answer; 1 waits
        fleet.cancel(2)
        fleet.round(10)
        assert 1 in fleet.installs[0]

    def test_a_releasing_head_is_not_passed(self) -> None:
        """I27: an attempt that failed blocks younger ones even before it is closed."""
        fleet = started()
        fleet.announce(1)
        fleet.round()
        fleet.caches[0].failures.append(("prepare", 1))
        fleet.round()
        keep_open(fleet, 1)  # RELEASE is not acknowledged
        fleet.announce(2)
        fleet.round(10)
        assert [(r.rid, r.phase) for r in fleet.records] == [(1, RELEASE)]

    def test_hints_are_refreshed_for_the_next_chain(self) -> None:
        fleet = self.busy()
        for cache in fleet.caches:
            cache.valid[2] = [16]
            cache.index_version += 1
        fleet.caches[1].capacity_generation = 1
        fleet.wait(0.01)
        fleet.round(2)
        assert [(r.attempt, r.endpoint) for r in fleet.records] == [(2, 16)]


class TestLastResort:
    def quiet_solo_failed(self, **options: object) -> Fleet:
        """Return a fleet whose only request failed first, and again alone while it was quiet."""
        fleet = started(**options)
        for cache in fleet.caches:
            cache.valid[1] = [16]
        fleet.announce(1)
        fleet.round()
        failed(fleet, 1)
        fleet.caches[1].failures.append(("prepare", 1))
        while not leases(fleet):
            fleet.round()
        assert [(r.attempt, r.endpoint, r.flags) for r in fleet.records] == [(2, 16, FLAG_COMMIT)]
        fleet.round()
        return fleet

    def next_lease(self, fleet: Fleet) -> tuple[int, int]:
        for _ in range(10):
            fleet.round()
            if leases(fleet):
                return fleet.records[0].endpoint, fleet.records[0].flags
        raise AssertionError("nothing was leased")

    def test_from_zero_without_floors(self) -> None:
        fleet = self.quiet_solo_failed()
        assert self.next_lease(fleet) == (0, FLAG_COMMIT | FLAG_NO_FLOOR)
        fleet.round()
        assert fleet.installs[0][1].install.endpoint == 0

    def test_s11_not_while_a_follower_may_still_hold_slots(self) -> None:
        fleet = started()
        fleet.announce(1, 2)
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.round(4)
        assert 2 in fleet.installs[0]
        fleet.caches[1].capacity_generation = 1  # news, but not quiet
        fleet.caches[1].failures.append(("prepare", 1))
        assert self.next_lease(fleet) == (0, FLAG_COMMIT)
        fleet.free(2, 0)
        fleet.round(10)
        assert leases(fleet) == []
        fleet.free(2, 1)
        fleet.caches[1].failures.append(("prepare", 1))
        assert self.next_lease(fleet) == (0, FLAG_COMMIT)  # the first that is opened quiet
        assert self.next_lease(fleet) == (0, FLAG_COMMIT | FLAG_NO_FLOOR)

    def test_not_when_an_older_request_runs_by_then(self) -> None:
        """A52: quiet when the solo attempt failed, not quiet any more: floors and C as usual."""
        fleet = started()
        for cache in fleet.caches:
            cache.valid[2] = [16]
        fleet.announce(1)

        def hide(vote: RoundVote) -> RoundVote:
            return msgspec.structs.replace(vote, hints=())

        fleet.round(edit=hide)  # 1 has no candidate yet, and blocks nobody
        fleet.announce(2)
        fleet.caches[1].failures += [("prepare", 2), ("prepare", 2)]
        fleet.round()
        assert self.next_lease(fleet) == (16, FLAG_COMMIT)
        fleet.round()
        fleet.wait(0.01)
        assert self.next_lease(fleet) == (16, FLAG_COMMIT)  # alone and quiet
        fleet.round()
        assert fleet.leader.requests[2].is_last_resort_due

        def tell(vote: RoundVote) -> RoundVote:
            return msgspec.structs.replace(vote, hints=(HintVote(1, 0),))

        fleet.round(edit=tell)
        fleet.round(4)
        assert fleet.installs[0].keys() == {1}
        fleet.caches[1].capacity_generation += 1
        fleet.round(2)
        assert [(r.rid, r.endpoint, r.flags) for r in fleet.records] == [(2, 16, FLAG_COMMIT)]

    def test_its_failure_is_a_bug(self) -> None:
        fleet = self.quiet_solo_failed()
        fleet.caches[1].failures.append(("prepare", 1))
        with pytest.raises(InvariantError, match="last resort"):
            fleet.round(10)

    def test_its_failure_ends_that_request_only_in_production(self) -> None:
        fleet = self.quiet_solo_failed(is_strict=False)
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.announce(2)
        fleet.round(20)
        rejected = fleet.sent(ReportRejected)
        assert [(c.rid, c.code) for c in rejected] == [(1, "failed")]  # type: ignore[attr-defined]
        assert fleet.sent(ReportGone) == []
        assert 2 in fleet.installs[0]
        assert 1 not in fleet.leader.requests


# ── cancellation and ends ────────────────────────────────────────────────────────────────────


class TestCancel:
    def assert_gone(self, fleet: Fleet, rid: int) -> None:
        assert fleet.sent(ReportGone) == [ReportGone(rid)]
        assert rid not in fleet.leader.requests
        assert all(rid not in rank.machine._replica.requests for rank in fleet.ranks)
        assert all(rid not in cache.leases for cache in fleet.caches)
        assert rid not in fleet.ranks[0].machine._replica.prompts
        before = list(fleet.outward[0])
        fleet.cancel(rid)
        assert fleet.outward[0] == before

    def test_before_the_announce_it_is_dropped_locally(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.cancel(1)
        self.assert_gone(fleet, 1)
        fleet.round()
        assert fleet.bcasts[-1].announces == fleet.bcasts[-1].cancels == ()

    def test_while_it_waits_for_capacity(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        failed(fleet, 1)
        fleet.cancel(1)
        fleet.announce(2)
        fleet.round()
        assert fleet.bcasts[-1].cancels == (1,)
        self.assert_gone(fleet, 1)
        fleet.round()
        assert leases(fleet) == [2]

    def test_before_its_attempt_is_sent(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()  # the attempt is opened by this round's decision
        fleet.cancel(1)
        fleet.round()
        assert (fleet.bcasts[-1].cancels, fleet.records) == ((1,), [])
        self.assert_gone(fleet, 1)

    @pytest.mark.parametrize("rounds", [1, 2])
    def test_with_an_attempt_open(self, rounds: int) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        keep_open(fleet, 1)
        fleet.round(rounds)
        assert fleet.caches[1].leases == {1: 0}
        fleet.cancel(1)
        fleet.round()
        assert (fleet.bcasts[-1].cancels, fleet.records) == ((1,), [])
        self.assert_gone(fleet, 1)
        assert fleet.leader.queue.pending == {}

    def test_while_it_is_being_released(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        fleet.caches[1].failures.append(("commit", 1))
        fleet.round()
        fleet.cancel(1)
        fleet.round()
        self.assert_gone(fleet, 1)

    def test_between_a_broadcast_and_its_merge_it_becomes_a_drop(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        fleet.round(between=lambda: fleet.cancel(1))
        assert 1 in fleet.installs[1]
        assert fleet.sent(SendDrop) == []
        fleet.round()
        assert fleet.sent(SendDrop) == [SendDrop(1, 1)]
        assert fleet.bcasts[-1].cancels == ()
        fleet.free(1)
        fleet.round()
        self.assert_gone(fleet, 1)

    def test_between_a_broadcast_and_its_merge_that_does_not_admit(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        fleet.caches[1].failures.append(("prepare", 1))
        fleet.round(between=lambda: fleet.cancel(1))
        fleet.round()
        assert (fleet.bcasts[-1].cancels, fleet.records) == ((1,), [])
        self.assert_gone(fleet, 1)

    def test_after_admission_only_loop_is_told_once(self) -> None:
        """S3, A55"""
        fleet = started()
        fleet.announce(1)
        fleet.round(3)
        fleet.cancel(1)
        fleet.cancel(1)
        fleet.round(3)
        assert fleet.sent(SendDrop) == [SendDrop(1, 1)]
        assert all(bcast.cancels == () for bcast in fleet.bcasts)

    def test_after_rank_0_freed_it_loop_is_still_told(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round(3)
        fleet.free(1, 0)
        fleet.round()
        fleet.cancel(1)
        fleet.round()
        assert fleet.sent(SendDrop) == [SendDrop(1, 1)]
        fleet.free(1, 1)
        fleet.round()
        self.assert_gone(fleet, 1)

    def test_cancels_are_repeated_until_every_rank_voted_gone(self) -> None:
        fleet = started(stages=3)
        fleet.announce(1)
        fleet.round()
        fleet.cancel(1)

        def hide(vote: RoundVote) -> RoundVote:
            return msgspec.structs.replace(vote, gone=()) if vote.rank == 2 else vote

        fleet.round(2, edit=hide)
        assert fleet.bcasts[-1].cancels == (1,)
        assert fleet.sent(ReportGone) == []
        fleet.round()
        assert fleet.sent(ReportGone) == [ReportGone(1)]
        fleet.round()
        assert fleet.bcasts[-1].cancels == ()


def test_ready_is_reported_once_with_the_smallest_rank() -> None:
    """FS-47: the common capacity is the least of all stages."""
    fleet = Fleet(2, [ScriptedCache(500), ScriptedCache(300)])
    fleet.round(3)
    assert fleet.sent(ReportReady) == [ReportReady(300)]


def test_arrivals_before_all_ranks_voted_wait_for_it() -> None:
    fleet = Fleet(2)
    fleet.announce(1)
    fleet.round()
    assert fleet.bcasts[-1].announces == ()
    fleet.round()
    assert [entry.rid for entry in fleet.bcasts[-1].announces] == [1]


def test_prompts_that_never_fit_are_rejected_at_the_announce() -> None:
    """FS-40: with both numbers; what fits is served."""
    fleet = Fleet(2, [ScriptedCache(500), ScriptedCache(300)])
    fleet.round()
    fleet.announce(1, tokens=301)
    fleet.announce(2, tokens=300)
    fleet.round(2)
    rejected = fleet.sent(ReportRejected)
    assert [(c.rid, c.code) for c in rejected] == [  # type: ignore[attr-defined]
        (1, "prompt_too_long_for_cache")
    ]
    assert "301 tokens" in rejected[0].text  # type: ignore[attr-defined]
    assert [entry.rid for bcast in fleet.bcasts for entry in bcast.announces] == [2]
    assert fleet.installs[1].keys() == {2}
    fleet.free(2)
    fleet.round()
    assert fleet.sent(ReportGone) == [ReportGone(2)]


def test_a_full_worker_refuses_further_requests() -> None:
    fleet = started(queue_requests_max=2)
    fleet.announce(1, 2, 3)
    assert [(c.rid, c.code) for c in fleet.sent(ReportRejected)] == [  # type: ignore[attr-defined]
        (3, "overloaded")
    ]
    fleet.round(3)
    fleet.free(1)
    fleet.round()
    fleet.announce(4)
    fleet.round(2)
    assert 4 in fleet.installs[0]


def test_a_live_request_announced_again_is_ignored() -> None:
    fleet = started()
    fleet.announce(1, 1)
    fleet.round(2)
    fleet.announce(1)
    fleet.round()
    assert [entry.rid for bcast in fleet.bcasts for entry in bcast.announces] == [1]


def test_nothing_is_remembered_after_all_ranks_voted_gone() -> None:
    fleet = started()
    for rid in range(1, 40):
        fleet.announce(rid)
        fleet.round(3)
        fleet.free(rid)
        fleet.round()
    leader, replica = fleet.leader, fleet.ranks[0].machine._replica
    assert len(fleet.sent(ReportGone)) == 39
    sizes = (leader.requests, leader.queue.pending, leader.queue.running, replica.requests)
    assert [len(part) for part in sizes] == [0, 0, 0, 0]
    assert (replica.prompts, replica._gone_due, replica._installed_due) == ({}, [], [])


# ── rounds ───────────────────────────────────────────────────────────────────────────────────


def test_announces_per_round_are_limited_by_count_and_bytes() -> None:
    fleet = started(block_tokens=1)
    for cache in fleet.caches:
        cache.available = cache.total = 10_000_000
    fleet.round()
    fleet.announce(*range(1, 19), tokens=4)
    fleet.round(2)
    assert [len(bcast.announces) for bcast in fleet.bcasts[-2:]] == [16, 2]
    tokens = 4 * (3 << 20) // 32
    fleet.announce(30, 31, tokens=tokens)
    fleet.round(2)
    assert [len(bcast.announces) for bcast in fleet.bcasts[-2:]] == [1, 1]


class TestSpacing:
    """9.5, measured from the start of the last round."""

    def due(self, fleet: Fleet) -> float:
        deadline = fleet.ranks[0].next_deadline()
        assert deadline is not None
        return round(deadline - fleet.now, 6)

    def test_heartbeat_when_quiet_and_while_requests_only_run(self) -> None:
        fleet = started()
        assert self.due(fleet) == 0.05
        fleet.announce(1)
        fleet.round(3)
        assert self.due(fleet) == 0.05

    def test_at_once_for_arrivals_cancels_views_and_shutdown(self) -> None:
        for cause in range(4):
            fleet = started()
            fleet.announce(1)
            fleet.round(3)
            assert self.due(fleet) == 0.05
            if cause == 0:
                fleet.announce(2)
            elif cause == 1:
                fleet.cancel(1)
            else:
                fleet.feed(0, [ViewRequested(1), ShutdownRequested("")][cause - 2])
            assert self.due(fleet) == 0.000_2

    def test_active_idle(self) -> None:
        fleet = started()
        fleet.announce(1)
        fleet.round()
        assert self.due(fleet) == 0.000_5  # an attempt is open
        fleet.round()
        assert self.due(fleet) == 0.005  # acknowledgements are due
        fleet.round()
        fleet.announce(2)
        fleet.round()
        failed(fleet, 2)
        assert self.due(fleet) == 0.005  # waits for capacity

    def test_rounds_are_counted_by_their_spacing(self) -> None:
        fleet = started()
        fleet.round()
        assert self.counted(fleet) == {"min": 0, "active": 0, "idle": 0, "quiet": 2}
        fleet.announce(1)
        fleet.round(3)  # for the arrival; for the attempt; for the acknowledgements
        assert self.counted(fleet) == {"min": 1, "active": 1, "idle": 1, "quiet": 2}
        fleet.feed(0, ViewRequested(1))
        fleet.round(2)
        assert self.counted(fleet) == {"min": 2, "active": 1, "idle": 1, "quiet": 3}
        assert sum(self.counted(fleet).values()) == 8 - 1

    def counted(self, fleet: Fleet) -> dict[str, float]:
        stats = fleet.ranks[0].machine.stats()
        names = [f'wavepp_spaced_rounds_total{{spacing="{spacing}"}}' for spacing in Spacing]
        return {name.split('"')[1]: stats[name] for name in names}

    def test_none_while_a_round_is_open_and_ticks_before_time_do_nothing(self) -> None:
        fleet = started()
        assert fleet.feed(0, Tick()) == []
        fleet.round(between=lambda: self.assert_open(fleet))
        assert fleet.ranks[0].machine.round_started_at is None

    def assert_open(self, fleet: Fleet) -> None:
        assert fleet.ranks[0].next_deadline() is None
        assert fleet.ranks[0].machine.round_started_at == fleet.now
        assert fleet.feed(0, Tick()) == []


class TestCounters:
    def test_what_admission_costs_a_request(self) -> None:
        """Rank 1 promised 36 tokens and leases 20: the second attempt is admitted at 20."""
        fleet = started()
        fleet.caches[0].valid[1], fleet.caches[1].valid[1] = [20, 36], [20]
        fleet.caches[1].hints[1] = 36
        fleet.announce(1)
        fleet.round(4)
        assert fleet.installs[1][1].install.endpoint == 20
        for rank in fleet.ranks:
            stats = rank.machine.stats()
            assert stats["wavepp_admitted_total"] == 1
            assert stats["wavepp_admitted_candidate_tokens_total"] == 36
            assert stats["wavepp_admitted_attempts_total"] == 2
        assert fleet.ranks[0].machine.stats()["wavepp_admission_retry_total"] == 1

    def test_age_of_the_oldest_that_waits(self) -> None:
        fleet = started()
        machine = fleet.ranks[0].machine
        assert machine.oldest_wait_s(Instant(fleet.now)) == 0
        fleet.announce(1)
        arrived_at = fleet.now
        assert machine.oldest_wait_s(Instant(arrived_at + 2.0)) == 2.0, "before its first round"
        fleet.round()
        fleet.wait(1.0)
        fleet.announce(2)
        assert machine.oldest_wait_s(Instant(arrived_at + 2.0)) == 2.0
        keep_open(fleet, 2)
        fleet.round(4)
        assert list(fleet.installs[0]) == [1]
        now = Instant(fleet.now)
        assert machine.oldest_wait_s(now) == pytest.approx(now - arrived_at - 1.0, abs=0.01)
        fleet.cancel(2)
        fleet.round()
        assert machine.oldest_wait_s(now) == 0, "it does not wait any more"


class TestVotes:
    def test_late_repeated_and_foreign_votes_are_ignored(self) -> None:
        fleet = started(stages=3)
        stale = fleet.votes[0]

        def disturb() -> None:
            now = stale.round + 1
            assert fleet.feed(0, VoteReceived(stale)) == []
            for vote in (
                RoundVote(EPOCH - 1, now, 1),
                RoundVote(EPOCH, now, 3),
                RoundVote(EPOCH, now, 0),
                RoundVote(EPOCH, now + 1, 1),
            ):
                assert fleet.feed(0, VoteReceived(vote)) == []
            assert fleet.ranks[0].machine._votes.keys() == {0}

        fleet.round(between=disturb)
        assert fleet.ranks[0].machine.stats()["wavepp_stale_messages_total"] == 5
        fleet.feed(0, VoteReceived(fleet.votes[0]))
        fleet.round()
        assert fleet.ranks[0].machine.stats()["wavepp_rounds_total"] == 3

    def test_a_rank_that_fails_ends_the_worker_before_the_others_answer(self) -> None:
        fleet = started(stages=3)
        now = fleet.votes[0].round + 1

        def fail() -> None:
            old = RoundVote(EPOCH - 1, now, 2, fatal="of an old epoch")
            assert fleet.feed(0, VoteReceived(old)) == []
            fleet.feed(0, VoteReceived(RoundVote(EPOCH, now, 2, fatal="no device")))

        with pytest.raises(PeerError, match="rank 2 failed: no device"):
            fleet.round(between=fail)

    def test_a_rank_that_fails_ends_the_worker(self) -> None:
        fleet = started()
        with pytest.raises(PeerError, match="rank 1 failed: no device"):
            fleet.round(edit=lambda vote: msgspec.structs.replace(vote, fatal="no device"))


def test_views_are_requested_one_per_round_from_every_rank() -> None:
    fleet = started()
    fleet.feed(0, ViewRequested(4))
    fleet.feed(0, ViewRequested(5))
    fleet.round(3)
    for rank in range(2):
        assert fleet.sent(SendCacheView, rank) == [SendCacheView(4), SendCacheView(5)]


@pytest.mark.parametrize("stages", [1, 3])
def test_shutdown_stops_every_rank_and_the_clock(stages: int) -> None:
    fleet = started(stages=stages)
    fleet.announce(1)
    fleet.round(3)
    fleet.feed(0, ShutdownRequested("bye"))
    fleet.round()
    for rank in range(stages):
        assert fleet.sent(ShutDown, rank) == [ShutDown("bye")]
    assert fleet.ranks[0].next_deadline() is None
    assert fleet.feed(0, Tick()) == []
    fleet.free(1, 0)
