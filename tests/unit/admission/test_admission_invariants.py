"""Invariants of agreement, admission and rounds, each by name, over seeded fleets.

The ranks run on scripted caches, so that any set of endpoints can be valid on any rank, whatever
a real cache would keep; some sections fail, some answers get lost, and endpoints may vanish between
two sections.  The checkers read broadcasts, votes and Installs only.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from tests.unit.admission.rig import B, Fleet, ScriptedCache
from wavepp_worker.admission.commands import SendInstall
from wavepp_worker.admission.events import BroadcastReceived, GatheredReceived, VoteReceived
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import (
    FLAG_NO_FLOOR,
    Record,
    RecordPhase,
    RoundBcast,
    RoundGathered,
    RoundVote,
)

LEASE, TRIM, COMMIT, RELEASE = RecordPhase
TOKENS = 40
SEEDS = 150


class FadingCache(ScriptedCache):
    """Endpoints vanish now and then, when a lease is taken or lowered."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        super().__init__()
        self.rng = rng
        self.chance = chance

    def _fade(self, rid: int) -> None:
        valid = self.valid.get(rid, [])
        held = self.leases.get(rid)
        if valid and self.rng.random() < self.chance:
            gone = self.rng.choice(valid)
            if gone != held:
                valid.remove(gone)

    def acquire(self, rid: int, attempt: int, cap: int) -> int:
        self._fade(rid)
        return super().acquire(rid, attempt, cap)

    def trim(self, rid: int, cap: int) -> int:
        self._fade(rid)
        return super().trim(rid, cap)


class Chains:
    """Follows every chain of attempts in the broadcasts: from its first LEASE to its end."""

    def __init__(self) -> None:
        self.last: dict[int, Record] = {}
        self.lowered: Counter[int] = Counter()
        self.seen = 0

    def follow(self, bcast: RoundBcast, batch: int) -> None:
        rids = [record.rid for record in bcast.records]
        check(len(set(rids)) == len(rids) <= batch, "too many pending [I26]", rids=rids)
        for record in bcast.records:
            last = self.last.get(record.rid)
            if record == last:
                continue
            self.last[record.rid] = record
            if last is None or last.phase == RELEASE:
                check(record.phase == LEASE, "a chain begins with a lease", record=record)
                self.lowered[record.rid] = 1
                continue
            check(record.attempt >= last.attempt, "attempts grow", record=record)
            if record.phase in (LEASE, TRIM):
                self.lowered[record.rid] += 1
                check(record.endpoint < last.endpoint, "lower each time [I11]", record=record)
            elif record.phase == COMMIT:
                check(record.endpoint <= last.endpoint, "never higher [I11]", record=record)


def scripted(seed: int) -> tuple[random.Random, Fleet]:
    rng = random.Random(seed)
    stages = rng.randint(1, 4)
    chance = rng.choice([0.0, 0.0, 0.4])
    caches: list[object] = [
        FadingCache(random.Random(seed * 10 + r), chance) for r in range(stages)
    ]
    fleet = Fleet(
        stages,
        caches,
        sparse=rng.random() < 0.7,
        auto_commit=rng.random() < 0.6,
        hint_refine=rng.random() < 0.3,
        batch_requests_max=rng.choice([1, 2, 4]),
    )
    for rid in range(1, 7):
        for cache in fleet.caches:
            depth = rng.randint(0, TOKENS // B - 1)
            cache.valid[rid] = sorted(
                rng.sample(range(B, TOKENS, B), min(depth, rng.randint(0, 6)))
            )
            if rng.random() < 0.1:
                cache.failures.append((rng.choice(["prepare", "commit"]), rid))
    return rng, fleet


def check_candidates(fleet: Fleet) -> None:
    """I7: the candidate is the minimum of the votes, and the same on all ranks."""
    replicas = [rank.machine._replica for rank in fleet.ranks]
    for rid, request in replicas[0].requests.items():
        for replica in replicas[1:]:
            other = replica.requests[rid]
            same = (request.candidate, request.hints) == (other.candidate, other.hints)
            check(same, "ranks have different candidates [I7]", one=request, other=other)
        if len(request.hints) == len(replicas):
            lowest = min(request.hints.values())
            check(request.candidate == lowest, "not the minimum [I7]", request=request)


def check_holding(fleet: Fleet) -> None:
    """I14, I29: a rank holds something exactly for the attempts that are open on it."""
    for rank, cache in zip(fleet.ranks, fleet.caches, strict=True):
        holding = {r.rid for r in rank.machine._replica.requests.values() if r.is_holding}
        check(set(cache.leases) == holding, "holds too much [I14, I29]", leases=cache.leases)


def check_installs(fleet: Fleet) -> None:
    """I13: one endpoint and one number per request, committed by every rank before."""
    for rid in {rid for installs in fleet.installs for rid in installs}:
        found = [installs[rid].install for installs in fleet.installs if rid in installs]
        check(len(found) == len(fleet.ranks), "not on all ranks [I13]", rid=rid)
        check(len({(i.endpoint, i.ino) for i in found}) == 1, "differently [I13]", rid=rid)
        for cache in fleet.caches:
            committed = [c.value for c in cache.calls if (c.name, c.rid) == ("commit", rid)]
            check(committed[-1] == found[0].endpoint, "not committed [I13]", rid=rid)


@pytest.mark.parametrize("part", range(3))
def test_agreement_over_seeded_fleets(part: int) -> None:
    """I7, I11, I12, I13, I14, I26, I29."""
    for seed in range(part * SEEDS, (part + 1) * SEEDS):
        rng, fleet = scripted(seed)
        chains = Chains()
        batch = fleet.leader._settings.batch_requests_max
        lose = rng.choice([0.0, 0.2])

        def edit(vote: RoundVote, rng: random.Random = rng, lose: float = lose) -> RoundVote:
            kept = tuple(v for v in vote.votes if rng.random() >= lose)
            return msgspec.structs.replace(vote, votes=kept)

        fleet.round()
        fleet.announce(*range(1, 7), tokens=TOKENS)
        distinct = {
            rid: len({0, *(e for cache in fleet.caches for e in cache.valid[rid])})
            for rid in range(1, 7)
        }
        for _ in range(200):
            fleet.round(edit=edit)
            if fleet.bcasts:
                chains.follow(fleet.bcasts[-1], batch)
            check_candidates(fleet)
            check_holding(fleet)
            check_installs(fleet)
            if all(rid in fleet.installs[-1] for rid in range(1, 7)):
                break
            if not fleet.leader.queue.pending and fleet.leader.queue.running:
                done = next(iter(fleet.leader.queue.running))  # whoever waits, waits for this
                fleet.free(done)
        else:
            raise AssertionError(f"seed {seed}: {fleet.leader.requests}")
        for rid in range(1, 7):  # endpoints that vanish only make fewer of them
            steps = chains.lowered[rid]
            check(steps <= distinct[rid] + 1, "too many steps [I12]", seed=seed, rid=rid)


def test_at_most_one_oversized_request_is_pending_and_it_was_the_head() -> None:
    """I26: three oversized requests among small ones, in arrival order."""
    fleet = Fleet(2, headroom_tokens=400)
    for cache in fleet.caches:
        cache.available = cache.total = 1_000
    fleet.round()
    for rid in range(1, 7):
        fleet.announce(rid, tokens=700 if rid % 2 == 0 else 8)
    admitted: list[int] = []
    for _ in range(60):
        fleet.round()
        big = [r.rid for r in fleet.leader.queue.pending.values() if r.is_oversized]
        assert len(big) <= 1
        waiting = [r.rid for r in fleet.leader.queue.waiting()]
        assert not big or not waiting or big[0] < waiting[0]
        for record in fleet.records:
            assert bool(record.flags & FLAG_NO_FLOOR) == (record.rid % 2 == 0)
        admitted = list(fleet.installs[0])
    assert admitted == [1, 2, 3, 4, 5, 6]


def test_nobody_is_selected_while_an_older_request_is_refused() -> None:
    """I27: with a refusing head nothing younger is tried, however small; then in order."""
    rng = random.Random(27)
    for _ in range(40):
        fleet = Fleet(2, headroom_tokens=rng.choice([0, 40]), batch_requests_max=4)
        fleet.round()
        sizes = {rid: B * rng.randint(1, 20) for rid in range(1, 13)}
        for rid, tokens in sizes.items():
            fleet.announce(rid, tokens=tokens)
        opened: list[int] = []
        for _ in range(200):
            for cache in fleet.caches:
                cache.available = rng.choice([60, 100, 200])
            fleet.round()
            for record in fleet.records:
                if record.phase == LEASE and record.rid not in opened:
                    opened.append(record.rid)
        assert opened == sorted(sizes), "in arrival order, each one [I27]"


@pytest.mark.parametrize("seed", range(60))
def test_any_frame_delivered_again_is_as_good_as_delivered_once(seed: int) -> None:
    """I30, I31, I32: two equal fleets, one with repeats of old frames and of an old epoch.

    Its ranks send, call and remember exactly what those of the other one do.
    """
    rng = random.Random(seed)
    twins = [scripted(seed)[1], scripted(seed)[1]]
    frames: list[tuple[int, object]] = []
    for fleet in twins:
        fleet.round()
        fleet.announce(*range(1, 7), tokens=TOKENS)
    for _ in range(30):
        for fleet in twins:
            fleet.round()
        disturbed = twins[1]
        leader, followers = disturbed.ranks[0], disturbed.ranks[1:]
        if disturbed.bcasts:
            frames.append((1, BroadcastReceived(disturbed.bcasts[-1])))
            frames.append((0, VoteReceived(disturbed.votes[0])))
            gathered = RoundGathered(
                disturbed.bcasts[-1].epoch,
                disturbed.bcasts[-1].round,
                (RoundVote(disturbed.bcasts[-1].epoch, disturbed.bcasts[-1].round, 0),),
            )
            frames.append((1, GatheredReceived(gathered)))
        for target, frame in rng.sample(frames, min(3, len(frames))):
            for name in ("bcast", "vote", "gathered"):
                message = getattr(frame, name, None)
                if message is None:
                    continue
                old_epoch = msgspec.structs.replace(message, epoch=message.epoch - 1)
                for again in (frame, msgspec.structs.replace(frame, **{name: old_epoch})):
                    for rank in followers if target else [leader]:
                        assert rank.handle(again, Instant(disturbed.now)) == []
    plain, disturbed = twins
    assert [cache.calls for cache in plain.caches] == [cache.calls for cache in disturbed.caches]
    assert plain.bcasts == disturbed.bcasts  # I31
    assert plain.outward == disturbed.outward
    assert any(isinstance(c, SendInstall) for c in plain.outward[0])


def test_records_of_the_past_inside_a_broadcast_change_nothing() -> None:
    """I30, I32: whatever was asked before is asked again, with what is asked now.

    Old attempts are answered with the current state, known records with the same answer, records
    of requests that are gone with UNKNOWN_RID; no section runs, and the outcome is the same.
    """
    fleet = Fleet(2, sparse=True)
    for cache, valid in zip(fleet.caches, ([32, 16], [24, 16]), strict=True):
        cache.valid[1] = valid
        cache.valid[2] = [8]
    fleet.round()
    fleet.announce(1, tokens=TOKENS)
    fleet.caches[1].failures.append(("prepare", 1))
    fleet.announce(2, tokens=TOKENS)
    past: dict[Record, None] = {}
    build = fleet.leader.build

    def with_the_past() -> RoundBcast:
        bcast = build()
        latest = {record.rid: record for record in bcast.records}
        old = [
            record
            for record in past
            if record not in bcast.records
            and (record.phase != TRIM or latest.get(record.rid, record).phase != TRIM)
        ]
        past.update(dict.fromkeys(bcast.records))
        return msgspec.structs.replace(bcast, records=(*old, *bcast.records))

    fleet.leader.build = with_the_past  # type: ignore[method-assign]
    for _ in range(30):
        fleet.round()
        if 2 in fleet.leader.requests and 2 in fleet.installs[1]:
            fleet.free(2)
    assert fleet.installs[0][1].install.endpoint == fleet.installs[1][1].install.endpoint == 16
    assert len(past) >= 4
    for cache in fleet.caches:
        counts = Counter((call.name, call.rid) for call in cache.calls)
        assert counts["materialize", 1] == counts["materialize", 2] == 1
        assert cache.leases == {}
    attempts = max(record.attempt for record in past if record.rid == 1)
    acquired = Counter(call.rid for call in fleet.caches[0].calls if call.name == "acquire")
    assert acquired[1] == attempts
