"""Field scenarios that concern admission, on several ranks with real caches.

Each test names its scenario first.  After every step the caches check their books; at the end of
a test nothing is held.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.unit.admission.real import RealFleet, dense, states
from tests.unit.admission.rig import B
from wavepp_worker.admission.commands import ReportGone, ReportReady, ReportRejected
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.wire.rounds import RecordPhase, RoundVote

LEASE, TRIM, COMMIT, RELEASE = RecordPhase


def blocks(first: int, count: int) -> range:
    return range(first, first + count)


def rejections(fleet: RealFleet) -> list[tuple[int, str]]:
    return [(c.rid, c.text) for c in fleet.outward[0] if isinstance(c, ReportRejected)]


def drain(fleet: RealFleet, rids: list[int], rounds: int = 400) -> list[int]:
    """Finish whatever is admitted, until all of `rids` ended; return the order of admission."""
    order: list[int] = []
    left = set(rids)
    for _ in range(rounds):
        for rid in sorted(left, key=lambda r: r in fleet.installs[0]):
            if rid in left and fleet.is_admitted(rid):
                order.append(rid)
                left.discard(rid)
                fleet.finish(rid)
        if not left:
            return order
        fleet.round()
        fleet.check_waiting_hold_nothing()
    raise AssertionError(f"{left} did not end")


class TestUnevenCaches:
    """FS-02: tail blocks are missing on one rank only."""

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("missing", [0, 2, 5, 8])
    @pytest.mark.parametrize("is_late", [False, True])
    def test_all_ranks_start_at_the_smallest_endpoint(
        self, rank: int, missing: int, is_late: bool
    ) -> None:
        """FS-02: before the hint, or between hint and lease; richer ranks drop the excess."""
        fleet = RealFleet([dense(40)], [dense(40)], [dense(40)])
        fleet.warm(1, blocks(0, 8))
        if not is_late:
            fleet.books[rank].evict(0, missing)
        fleet.ask(2, (*blocks(0, 8), *blocks(100, 3)))
        fleet.round()
        if is_late:
            fleet.books[rank].evict(0, missing)
        assert fleet.until_admitted(2) == 8 - missing
        for other in range(3):
            assert fleet.books[other].view().referenced == (11,)
        fleet.finish(2)
        fleet.check_empty()


class TestEmptyRounds:
    def test_a_rank_with_nothing_to_say_takes_part_in_every_round(self) -> None:
        """FS-06, I31: 10,000 rounds; at random one rank has no hints, votes or acks to send."""
        rng = random.Random(6)
        fleet = RealFleet([dense(30)], [dense(30)], [dense(30)], check_always=False)
        applied: list[list[tuple[int, tuple[object, ...]]]] = [[], [], []]
        for rank, seen in zip(fleet.ranks, applied, strict=True):
            replica = rank.machine._replica
            apply = replica.apply

            def noted(bcast, now, apply=apply, seen=seen):  # type: ignore[no-untyped-def]
                seen.append((bcast.round, bcast.records))
                return apply(bcast, now)

            replica.apply = noted  # type: ignore[method-assign]

        def edit(vote: RoundVote) -> RoundVote:
            if rng.random() < 0.3:  # answers get lost, as if this rank had had nothing to do
                return msgspec.structs.replace(vote, votes=())
            return vote

        asked = ended = 0
        for number in range(10_000):
            if number % 20 == 0 and asked - ended < 8:
                asked += 1
                fleet.ask(asked, blocks(rng.randrange(3) * 100, rng.randint(1, 9)))
                if rng.random() < 0.2:
                    fleet.cancel(asked)
            fleet.round(edit=edit)
            for rid in [r for r in fleet.leader.queue.running if fleet.is_admitted(r)]:
                known = [rid in rank.machine._replica.requests for rank in fleet.ranks]
                if all(known):
                    for rank in range(3):
                        fleet.compute(rid, rank)
                        fleet.free(rid, rank)
            ended += len(fleet.sent(ReportGone))
            fleet.outward[0].clear()
            del fleet.bcasts[:-1]
        numbers = [[number for number, _ in seen] for seen in applied]
        assert numbers[0] == list(range(2, 10_002))
        assert applied[0] == applied[1] == applied[2]
        assert ended >= asked - 8 > 200


class TestCapacity:
    def test_a_prompt_that_can_never_fit_is_refused_at_once(self) -> None:
        """FS-40: N + 1 blocks, then ten small ones; the text names required and available."""
        fleet = RealFleet([dense(25)], [dense(20)])
        fleet.ask(99, blocks(0, 21))
        for rid in range(1, 11):
            fleet.ask(rid, blocks(100 * rid, 2))
        fleet.round()
        required, available = 21 * B, 20 * B
        text = f"the prompt of {required} tokens exceeds the cache of {available} tokens"
        assert rejections(fleet) == [(99, text)]
        drain(fleet, list(range(1, 11)))
        fleet.check_empty()

    def test_a_prompt_of_exactly_the_cache_fits(self) -> None:
        """FS-40: N blocks are admitted; the last token of block N + 1 is one too many."""
        fleet = RealFleet([dense(25)], [dense(20)], floor_fraction=0.25, headroom_tokens=40)
        fleet.ask(1, blocks(0, 20))
        fleet.ask(2, blocks(0, 20), 1)
        fleet.round()
        assert [rid for rid, _ in rejections(fleet)] == [2]
        assert drain(fleet, [1]) == [1]
        fleet.check_empty()

    def test_a_reused_prefix_in_the_host_tier_is_pinned_with_its_suffix_or_not_at_all(self) -> None:
        """FS-41: prefixes of 512 and 736 host blocks, totals of 1,600 and 1,200, cache of 2,048."""
        fleet = RealFleet(
            [dense(2_048, host_slots=2_048)],
            [dense(2_048, host_slots=2_048)],
            check_always=False,
        )
        fleet.warm(1, blocks(0, 512), 0)
        fleet.warm(2, blocks(10_000, 736), 0)
        fleet.warm(3, blocks(20_000, 2_048), 0)  # pushes both out to the host tier
        assert all(cache.view().host_cached == (1_248,) for cache in fleet.books)
        fleet.ask(4, blocks(0, 1_600))
        fleet.ask(5, blocks(10_000, 1_200))
        assert fleet.until_admitted(4) == 512
        fleet.round(20)
        assert not fleet.is_admitted(5)
        fleet.check_waiting_hold_nothing()
        fleet.finish(4)
        assert fleet.until_admitted(5) == 736
        fleet.finish(5)
        fleet.check_empty()

    def test_two_prompts_of_seventy_percent_run_one_after_the_other(self) -> None:
        """FS-42: each is admitted once, so no token is computed twice."""
        fleet = RealFleet([dense(20)], [dense(20)])
        fleet.ask(1, blocks(0, 14))
        fleet.ask(2, blocks(100, 14))
        fleet.until_admitted(1)
        fleet.round(20)
        assert not fleet.is_admitted(2)
        assert fleet.steps(2) == []  # not even tried
        fleet.finish(1)
        fleet.until_admitted(2)
        installs = [fleet.install(rid) for rid in (1, 2)]
        assert sum(i.prompt_tokens - i.endpoint for i in installs) == 2 * 14 * B
        fleet.finish(2)
        fleet.check_empty()

    def test_four_prompts_of_forty_percent_all_succeed(self) -> None:
        """FS-43: two fit at a time; nobody is refused, and the order is that of arrival."""
        fleet = RealFleet([dense(20)], [dense(20)], floor_fraction=0.1)
        for rid in range(1, 5):
            fleet.ask(rid, blocks(100 * rid, 8))
        assert drain(fleet, [1, 2, 3, 4]) == [1, 2, 3, 4]
        assert rejections(fleet) == []
        fleet.check_empty()

    def test_a_large_prompt_is_not_passed_by_small_ones_for_long(self) -> None:
        """FS-44: 50% in use, 60% waits, small prompts keep coming: it is next, whatever they do.

        With free choice the small ones would keep the cache busy for ever.
        """
        fleet = RealFleet([dense(20)], [dense(20)], batch_requests_max=4)
        fleet.ask(1, blocks(0, 10))
        fleet.until_admitted(1)
        fleet.ask(2, blocks(100, 12))
        small = 100
        for number in range(60):
            small += 1
            fleet.ask(small, blocks(1_000 * small, 1))
            fleet.round(2)
            if number == 30:
                fleet.finish(1)
        admitted = [rid for rid in fleet.installs[0] if rid != 1]
        assert 2 in admitted
        passed = admitted.index(2)
        assert passed <= 4 - 1, "at most K - 1 pass the large one [I27]"

    def test_the_worker_is_as_large_as_its_smallest_rank(self) -> None:
        """FS-47: memory is taken on the last rank; that one decides, and serving is told."""
        fleet = RealFleet([dense(40)], [dense(40)], [dense(12)])
        assert fleet.sent(ReportReady) == [ReportReady(12 * B)]
        fleet.ask(1, blocks(0, 13))
        fleet.ask(2, blocks(0, 12))
        fleet.round()
        assert [rid for rid, _ in rejections(fleet)] == [1]
        assert drain(fleet, [2]) == [2]
        fleet.check_empty()

    def test_acknowledgements_count_in_the_round_they_arrive_not_in_queue_order(self) -> None:
        """FS-49: the last of many is complete first; its place is given away at once."""
        fleet = RealFleet([dense(80)], [dense(80)], batch_requests_max=4)
        for rid in range(1, 9):
            fleet.ask(rid, blocks(100 * rid, 2))
        fleet.round(2)
        assert all(fleet.is_admitted(rid) for rid in (1, 2, 3, 4))

        def only_4(vote: RoundVote) -> RoundVote:
            return msgspec.structs.replace(vote, installed=(4,))

        fleet.round(edit=only_4)
        assert fleet.leader.queue.pending.keys() == {1, 2, 3, 5}


class TestStatesOnly:
    def test_a_rank_without_a_dense_window_never_limits_tokens(self) -> None:
        """FS-34, A50: prompts of any length; short are state slots, and those are waited for.

        Two slots: a request takes one to work in and one more for its last snapshot, which can be
        taken from it as soon as it is written.  The third request waits with nothing held.
        """
        fleet = RealFleet([states(2)], [states(2)], headroom_tokens=1_000_000, floor_fraction=0.1)
        assert fleet.sent(ReportReady) == [ReportReady(UNLIMITED_TOKENS)]
        for rid in (1, 2, 3):
            fleet.ask(rid, blocks(1_000 * rid, 500))
        fleet.until_admitted(1)
        for rank in range(2):
            fleet.compute(1, rank)
        fleet.until_admitted(2)
        fleet.round(20)
        assert not fleet.is_admitted(3)
        fleet.check_waiting_hold_nothing()
        assert rejections(fleet) == []
        fleet.finish(1)
        fleet.until_admitted(3)
        fleet.finish(2)
        fleet.finish(3)
        fleet.check_empty()


class TestSameIdTwice:
    """FS-51: the rank's part; serving gives every request its own inner id."""

    def fleet(self) -> RealFleet:
        return RealFleet([dense(20)], [dense(20)])

    def assert_one_life(self, fleet: RealFleet) -> None:
        assert fleet.sent(ReportGone) == [ReportGone(1)]
        announced = [e.rid for bcast in fleet.bcasts for e in bcast.announces]
        assert announced == [1]
        assert rejections(fleet) == []
        fleet.check_empty()

    def test_both_queued(self) -> None:
        """FS-51: before the announce is sent, and after it."""
        fleet = self.fleet()
        fleet.ask(1, blocks(0, 4))
        fleet.ask(1, blocks(500, 9))
        fleet.round()
        fleet.ask(1, blocks(500, 9))
        fleet.until_admitted(1)
        assert fleet.install(1).prompt_tokens == 4 * B
        fleet.finish(1)
        self.assert_one_life(fleet)

    def test_running_and_in_its_last_chunk(self) -> None:
        """FS-51: while it runs, and when one rank has finished."""
        fleet = self.fleet()
        fleet.ask(1, blocks(0, 4))
        fleet.until_admitted(1)
        fleet.ask(1, blocks(500, 9))
        fleet.round(3)
        fleet.compute(1, 0)
        fleet.free(1, 0)
        fleet.ask(1, blocks(500, 9))
        fleet.round(3)
        fleet.compute(1, 1)
        fleet.free(1, 1)
        fleet.round()
        self.assert_one_life(fleet)

    def test_cancelled_but_still_draining(self) -> None:
        """FS-51: the id is taken until the last rank has voted gone, and free again then."""
        fleet = self.fleet()
        fleet.ask(1, blocks(0, 4))
        fleet.until_admitted(1)
        fleet.cancel(1)
        fleet.round()
        fleet.free(1, 0)
        fleet.round(2)
        fleet.ask(1, blocks(500, 9))
        fleet.round(3)
        fleet.free(1, 1)
        fleet.round()
        self.assert_one_life(fleet)
        fleet.ask(1, blocks(500, 9))
        fleet.round(2)
        assert fleet.install(1).prompt_tokens == 9 * B
        assert fleet.install(1).ino == 2


class TestCancelledWhileQueued:
    def test_none_of_a_hundred_is_ever_admitted(self) -> None:
        """FS-58: a full worker, 100 queued, all cancelled; then the next one starts at once."""
        fleet = RealFleet([dense(20)], [dense(20)])
        fleet.ask(1, blocks(0, 20))
        fleet.until_admitted(1)
        rids = list(range(10, 110))
        for rid in rids:
            fleet.ask(rid, blocks(1_000 * rid, 3))
        fleet.round(3)  # two rounds' worth are announced, the rest still wait at the leader
        for rid in rids:
            fleet.cancel(rid)
        fleet.round(2)
        assert {c.rid for c in fleet.outward[0] if isinstance(c, ReportGone)} == set(rids)
        assert fleet.ranks[0].machine.stats()["wavepp_queue_requests"] == 0
        assert len(fleet.leader.requests) == 1
        fleet.finish(1)
        fleet.ask(2, blocks(500, 20))
        fleet.round(2)
        assert fleet.is_admitted(2)
        assert fleet.installs[0].keys() == {1, 2}
        fleet.finish(2)
        fleet.check_empty()
