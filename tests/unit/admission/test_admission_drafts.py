"""Scenarios that broke earlier drafts of admission, on several ranks with real caches.

Each test names its scenario first; the state is built by hand and the inputs are driven one by
one.  [algorithms 23, 19]
"""

from __future__ import annotations

from tests.unit.admission.real import RealFleet, dense
from tests.unit.admission.rig import B
from wavepp_worker.admission.events import SequenceFreed
from wavepp_worker.base import marks
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.outcomes import Prepared, Shortfall
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.rounds import FLAG_COMMIT, FLAG_NO_FLOOR, RecordPhase, VoteStatus

LEASE, TRIM, COMMIT, RELEASE = RecordPhase


def blocks(first: int, count: int) -> range:
    return range(first, first + count)


def leased(fleet: RealFleet) -> list[int]:
    return [record.rid for record in fleet.records if record.phase == LEASE]


def rounds_until_leased(fleet: RealFleet, rid: int, rounds: int = 20) -> None:
    """Run rounds until a LEASE of `rid` is sent."""
    for _ in range(rounds):
        fleet.round()
        if rid in leased(fleet):
            return
    raise AssertionError(f"no lease of {rid} in {rounds} rounds")


def test_s7_a_long_prompt_with_a_long_hit_is_oversized_by_its_whole_footprint() -> None:
    """S7: 100 blocks, floor 10, headroom 20; 98 blocks, 90 of them cached, on two ranks."""
    fleet = RealFleet([dense(100)], [dense(120)], floor_fraction=0.1, headroom_tokens=20 * B)
    fleet.warm(1, blocks(0, 90), 0)
    fleet.ask(2, blocks(0, 98))
    rounds_until_leased(fleet, 2)
    assert fleet.records[0].flags == FLAG_COMMIT | FLAG_NO_FLOOR
    assert fleet.until_admitted(2) == 90
    assert fleet.steps(2) == [(1, LEASE, 90)]
    fleet.finish(2)
    fleet.check_empty()


class Squeezed:
    """X (rid 9) runs with 2 blocks; A (1) has 10 of its 15 blocks cached on both ranks.

    A passes the leader's check, which counts its own prefix as available.  On rank 1, with 20
    blocks and a floor of 5, its lease leaves too little; on rank 0, with 24 and 6, it fits.
    """

    def __init__(self, **options: object) -> None:
        self.fleet = RealFleet([dense(24)], [dense(20)], floor_fraction=0.25, **options)
        self.fleet.warm(8, blocks(0, 10), 0)
        self.fleet.ask(9, blocks(900, 2))
        self.fleet.until_admitted(9)
        self.fleet.round(2)  # acknowledged everywhere

    def ask_a(self) -> None:
        self.fleet.ask(1, blocks(0, 15))


def test_s8_room_that_appears_between_the_failing_section_and_the_vote_is_news() -> None:
    """S8: rank 1 takes the last Freed after the section that failed A, before its vote."""
    squeezed = Squeezed()
    fleet, cache = squeezed.fleet, squeezed.fleet.books[1]
    squeezed.ask_a()
    fleet.round()
    fleet.compute(9, 1)
    original = cache.available_tokens

    def freed_meanwhile() -> int:
        cache.available_tokens = original  # type: ignore[method-assign]
        cache.free(9)
        return original()

    cache.available_tokens = freed_meanwhile  # type: ignore[method-assign]
    fleet.round()
    answer = fleet.votes[0].votes[0]
    assert (leased(fleet), answer.status) == ([1], VoteStatus.PREP_FAILED)
    assert answer.generation < fleet.votes[0].capacity_generation
    fleet.note(1, fleet.ranks[1].handle(SequenceFreed(9), Instant(fleet.now)))
    before = marks.hits["admission.news_capacity"]
    assert fleet.until_admitted(1, rounds=4) == 10  # X still runs on rank 0: it is not quiet
    assert marks.hits["admission.news_capacity"] > before
    assert fleet.steps(1) == [(1, LEASE, 10), (1, RELEASE, 0), (2, LEASE, 10)]


def test_s10_a_request_that_ends_before_its_acknowledgements_are_merged_leaves_pending() -> None:
    """S10: K = 1; X is freed on all ranks before the round that carries its acks."""
    fleet = RealFleet([dense(20)], [dense(20)], batch_requests_max=1)
    fleet.ask(1, blocks(0, 5))
    fleet.ask(2, blocks(100, 5))
    fleet.until_admitted(1)
    assert fleet.leader.queue.pending.keys() == {1}
    before = marks.hits["admission.gone_with_installed"]
    for rank in range(2):
        fleet.compute(1, rank)
    fleet.free(1)
    fleet.round()
    assert marks.hits["admission.gone_with_installed"] == before + 2
    assert 1 not in fleet.leader.requests
    assert fleet.until_admitted(2, rounds=2) == 0
    fleet.finish(2)
    fleet.check_empty()


def test_s11_no_last_resort_on_the_view_of_one_rank() -> None:
    """S11: A fails while the younger Y of the same round is admitted; rank 0 frees Y first."""
    squeezed = Squeezed()
    fleet = squeezed.fleet
    squeezed.ask_a()
    fleet.ask(2, blocks(200, 1))
    fleet.round(2)
    assert leased(fleet) == [1, 2]
    fleet.round(2)
    assert fleet.is_admitted(2) and not fleet.is_admitted(1)
    for rank in range(2):
        fleet.compute(9, rank)
    fleet.free(9)  # room on rank 1 is news; Y's one block is still too much there
    rounds_until_leased(fleet, 1)
    fleet.round(2)
    assert fleet.steps(1)[-1] == (2, RELEASE, 0)
    fleet.free(2, 0)
    fleet.round(20)
    assert fleet.steps(1)[-1] == (2, RELEASE, 0)  # rank 1 has not voted Y gone
    assert fleet.leader.counts["last_resort"] == 0
    fleet.check_waiting_hold_nothing()
    fleet.free(2, 1)
    assert fleet.until_admitted(1) == 10
    assert fleet.leader.counts["last_resort"] == 0
    fleet.finish(1)
    fleet.check_empty()


def test_s11_the_last_resort_comes_after_a_quiet_solo_attempt_and_succeeds() -> None:
    """S11, A52: floors alone are in the way; then endpoint 0 without floors, at once admitted."""
    fleet = RealFleet([dense(20)], [dense(20)])
    fleet.warm(8, blocks(0, 10), 0)
    cache = fleet.books[1]
    original, refused = cache.prepare, []

    def prepare(rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        if no_floor:
            return original(rid, no_floor=True)
        refused.append(rid)
        cache.release(rid)
        return Shortfall((1,), cache.capacity_generation)

    cache.prepare = prepare  # type: ignore[method-assign]
    fleet.ask(1, blocks(0, 15))
    assert fleet.until_admitted(1) == 0
    assert [step for step in fleet.steps(1) if step[1] == LEASE] == [
        (1, LEASE, 10),
        (2, LEASE, 10),
        (3, LEASE, 0),
    ]
    assert refused == [1, 1]
    fleet.finish(1)
    fleet.check_empty()


def test_s12_two_requests_that_fail_each_other_are_retried_one_at_a_time() -> None:
    """S12: A fails on rank 1, B on rank 0, in one round; A is tried alone and comes first."""
    squeezed = Squeezed(batch_requests_max=3)
    fleet = squeezed.fleet
    squeezed.ask_a()
    fleet.ask(2, blocks(200, 2))  # B: rank 0 has 7 left beside A, and a floor of 6
    for rid in range(3, 8):
        fleet.ask(rid, blocks(1_000 * rid, 1))
    fleet.round(2)
    assert leased(fleet) == [1, 2, 3]
    fleet.round()
    released = [(r.rid, r.phase) for r in fleet.records if r.phase == RELEASE]
    assert released == [(1, RELEASE), (2, RELEASE)]
    rounds_until_leased(fleet, 1)  # B's end was news; X still stands in the way
    assert leased(fleet) == [1]
    fleet.round(20)
    for rank in range(2):
        fleet.compute(9, rank)
    fleet.free(9)
    fleet.finish(3)  # rank 1 has no block to spare
    fleet.until_admitted(1)
    order = [rid for rid in fleet.installs[0] if rid not in (8, 9)]
    assert order.index(1) <= 2, "at most K - 1 younger requests pass A [I27]"
    assert 2 not in order
    tried = [r.rid for bcast in fleet.bcasts for r in bcast.records if r.phase == LEASE]
    assert 2 not in tried[tried.index(3) + 1 :], "B is not selected before A is admitted"
    fleet.finish(1)
    for rid in (2, 4, 5, 6, 7):
        fleet.until_admitted(rid)
        fleet.finish(rid)
    fleet.check_empty()


class TestX8:
    """Worked example X8: P = 4, M = 16,384, so headroom is 131,072 tokens."""

    HEADROOM = 131_072

    def fleet(self, *cache_tokens: int) -> RealFleet:
        return RealFleet(
            *([dense(tokens // 64)] for tokens in cache_tokens),
            block_tokens=64,
            check_always=False,
            headroom_tokens=self.HEADROOM,
            snapshot_interval_tokens=64,
        )

    def ask(self, fleet: RealFleet, rid: int, tokens: int) -> None:
        fleet.ask_tokens(rid, rid.to_bytes(4, "little") * tokens)

    def test_x8_a_third_long_prompt_waits_for_headroom(self) -> None:
        """X8: 150K + 150K + 200K + 131K > 600K on the smallest rank."""
        fleet = self.fleet(700_032, 700_032, 600_000, 700_032)
        for rid, tokens in ((1, 150_000), (2, 150_000), (3, 200_000)):
            self.ask(fleet, rid, tokens)
        before = marks.hits["admission.refused_tokens"]
        fleet.round(2)
        assert leased(fleet) == [1, 2]
        fleet.round(10)
        assert (fleet.is_admitted(1), fleet.is_admitted(2)) == (True, True)
        assert leased(fleet) == []
        assert marks.hits["admission.refused_tokens"] > before
        fleet.finish(1)
        assert fleet.until_admitted(3) == 0

    def test_x8_an_oversized_prompt_is_admitted_alone_without_headroom(self) -> None:
        """X8, A17: 190K + 131K > 300K: at the head, one at a time, no floors."""
        fleet = self.fleet(300_032, 300_032, 300_032, 300_032)
        self.ask(fleet, 1, 190_000)
        self.ask(fleet, 2, 190_000)
        fleet.round(2)
        assert [(r.rid, r.flags) for r in fleet.records] == [(1, FLAG_COMMIT | FLAG_NO_FLOOR)]
        fleet.until_admitted(1)
        fleet.round(10)
        assert not fleet.is_admitted(2)
        fleet.finish(1)
        assert fleet.until_admitted(2) == 0


def test_s15_a_small_sliding_pool_does_not_refuse_a_long_prompt() -> None:
    """S15, A50: a pool of 12 blocks for a sliding window; a prompt of 200 blocks is admitted."""
    sliding = WindowSpec(span_tokens=2 * B, chunk_tokens=8 * B, slots=12)
    fleet = RealFleet([sliding], [dense(240), sliding], headroom_tokens=10 * B)
    fleet.ask(1, blocks(0, 200))
    assert fleet.until_admitted(1, rounds=4) == 0
    fleet.finish(1)
    fleet.check_empty()
