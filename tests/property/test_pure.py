"""Pure functions against their definitions: all small inputs where possible, drawn ones elsewhere.

The search for hints (I4, I5), the verdict on an attempt and the chains it makes (I11, I12, I13),
snapshot points (A33), the greedy planner (I33, I34, I35).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavepp_worker.admission.decide import Action, Verdict, reconcile
from wavepp_worker.base.types import SequenceHash
from wavepp_worker.cache.probe import dense_prefix, sliding_depth, snapshot_depth
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.planner.ports import PlannedSpan, WaveSlot
from wavepp_worker.wire.rounds import Record, RecordPhase, RecordVote, VoteStatus

# ── hints ────────────────────────────────────────────────────────────────────────────────────


def keys_of(count: int) -> list[SequenceHash]:
    return [SequenceHash(bytes([number // 256, number % 256])) for number in range(count)]


@pytest.mark.parametrize("limit", [*range(130), 1_000, 3_124])
def test_dense_prefix_finds_every_depth_within_its_bound(limit: int) -> None:
    """I4: exact on a prefix-closed index, at most 2 * ceil(log2(limit + 1)) lookups."""
    keys = keys_of(limit + 3)
    bound = 2 * ceil(log2(limit + 1))
    for depth in range(limit + 4) if limit < 130 else (*range(0, limit, 17), limit, limit + 3):
        found, probes = dense_prefix(set(keys[:depth]), keys, limit)
        assert found == min(depth, limit)
        assert probes <= bound


@given(present=st.sets(st.integers(0, 39)), limit=st.integers(0, 40))
@settings(derandomize=True, max_examples=300)
def test_dense_prefix_on_a_torn_index_is_a_hint_between_the_truths(
    present: set[int], limit: int
) -> None:
    """I4: with holes the result lies between the shallow and the deep truth, never above limit."""
    keys = keys_of(40)
    found, probes = dense_prefix({keys[number] for number in present}, keys, limit)
    shallow = next((depth for depth in range(limit) if depth not in present), limit)
    deep = max((number + 1 for number in present if number < limit), default=0)
    assert shallow <= found <= max(shallow, deep) <= limit
    assert probes <= 2 * ceil(log2(limit + 1))


def test_sliding_depth_is_the_deepest_usable_endpoint() -> None:
    """I5, A6: all subsets of 7 blocks, all needs, all limits, against the rule itself."""
    keys = keys_of(7)
    for bits, needed, limit in product(range(1 << 7), range(1, 6), range(8)):
        present = {keys[number] for number in range(7) if bits >> number & 1}

        def is_usable(depth: int, present: set[SequenceHash] = present, need: int = needed) -> bool:
            return all(key in present for key in keys[max(0, depth - need) : depth])

        found, probes = sliding_depth(present, keys, limit, needed)
        assert found == max(depth for depth in range(limit + 1) if is_usable(depth))
        assert probes <= limit


def test_snapshot_depth_is_the_deepest_snapshot() -> None:
    """I5: all subsets of 6 points, all limits."""
    keys = keys_of(6)
    for bits, limit in product(range(1 << 6), range(7)):
        present = {keys[number] for number in range(6) if bits >> number & 1}
        found, probes = snapshot_depth(present, keys, limit)
        assert found == max([0, *(n + 1 for n in range(limit) if keys[n] in present)])
        assert probes == limit - found + (found > 0)


# ── snapshot points ──────────────────────────────────────────────────────────────────────────


@given(n=st.integers(1, 400), block=st.integers(1, 16), blocks=st.integers(1, 8))
@settings(derandomize=True, max_examples=300)
def test_snapshot_points_are_every_interval_and_the_deepest_endpoint(
    n: int, block: int, blocks: int
) -> None:
    """A33: multiples of I_snap up to E_max(n), and E_max(n) itself if positive."""
    interval, deepest = block * blocks, (n - 1) // block * block
    points = snapshot_points(n, block, interval)
    expected = {point for point in range(1, deepest + 1) if point % interval == 0}
    assert list(points) == sorted(expected | ({deepest} - {0}))


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────

ENDPOINTS = (0, 4, 8)
ATTEMPT = 3


def answers() -> list[RecordVote | None]:
    """Everything that one rank can answer, at three endpoints."""
    found: list[RecordVote | None] = [None]
    for status in VoteStatus:
        for endpoint in ENDPOINTS:
            is_committed = status == VoteStatus.COMMITTED
            vote = RecordVote(1, ATTEMPT, RecordPhase.LEASE, status, endpoint, is_committed, 7)
            found.append(vote)
    return found


def table_6_4(phase: RecordPhase, votes: Sequence[RecordVote | None]) -> Verdict:
    """The table of the algorithms, row by row."""
    if any(vote is None or vote.status == VoteStatus.PENDING for vote in votes):
        return Verdict(Action.REPEAT)
    told = [vote for vote in votes if vote is not None]
    gone = {VoteStatus.RELEASED, VoteStatus.UNKNOWN_RID}
    if phase == RecordPhase.RELEASE:
        return Verdict(Action.CLOSE if {v.status for v in told} <= gone else Action.REPEAT)
    bad = {VoteStatus.PREP_FAILED, VoteStatus.COMMIT_FAILED, VoteStatus.UNKNOWN_RID}
    if any(vote.status in bad for vote in told):
        failures = tuple((rank, 7) for rank, vote in enumerate(told) if vote.status in bad)
        return Verdict(Action.RELEASE, failures=failures)
    ends, commits = {vote.endpoint for vote in told}, {vote.is_committed for vote in told}
    match len(ends) == 1, commits:
        case True, held if held == {True}:
            action = Action.ADMIT
        case True, held if held == {False}:
            action = Action.COMMIT
        case False, held if held == {False}:
            action = Action.TRIM
        case _:
            action = Action.RETRY
    return Verdict(action, min(ends))


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("phase", RecordPhase)
def test_reconcile_is_the_table_for_every_combination_of_votes(
    stages: int, phase: RecordPhase
) -> None:
    """I13 and table 6.4: all answers of up to three ranks."""
    record = Record(1, ATTEMPT, phase, 8)
    reached: set[Action] = set()
    for votes in product(answers(), repeat=stages):
        verdict = reconcile(record, votes)
        assert verdict == table_6_4(phase, votes)
        reached.add(verdict.action)
        if verdict.action is Action.ADMIT:
            assert all(vote is not None and vote.is_committed for vote in votes)
            assert {vote.endpoint for vote in votes if vote is not None} == {verdict.endpoint}
    on_release = {Action.CLOSE, Action.REPEAT}
    others = {Action.REPEAT, Action.RELEASE, Action.ADMIT, Action.COMMIT}
    others |= {Action.TRIM, Action.RETRY} if stages > 1 else set()
    assert reached == (on_release if phase == RecordPhase.RELEASE else others)


class Chain:
    """One attempt chain on ranks whose valid endpoints are given; `lost` ones disappear."""

    def __init__(self, valid: Sequence[set[int]], *, auto_commit: bool, trim_commits: bool) -> None:
        self.valid = [held | {0} for held in valid]
        self.flags = {
            RecordPhase.LEASE: auto_commit,
            RecordPhase.TRIM: trim_commits,
            RecordPhase.COMMIT: True,
        }
        self.leases = [0] * len(valid)
        self.commons: list[int] = []  # after each LEASE or TRIM

    def run(self, candidate: int) -> int:
        """Follow the verdicts; return the endpoint of admission."""
        record = Record(1, 1, RecordPhase.LEASE, candidate)
        while True:
            verdict = reconcile(record, [self.answer(rank, record) for rank in self.ranks])
            if record.phase != RecordPhase.COMMIT:
                self.commons.append(verdict.endpoint)
            match verdict.action:
                case Action.ADMIT:
                    assert set(self.leases) == {verdict.endpoint}  # I13
                    return verdict.endpoint
                case Action.COMMIT:
                    record = Record(1, record.attempt, RecordPhase.COMMIT, verdict.endpoint)
                case Action.TRIM:
                    record = Record(1, record.attempt, RecordPhase.TRIM, verdict.endpoint)
                case Action.RETRY:
                    record = Record(1, record.attempt + 1, RecordPhase.LEASE, verdict.endpoint)
                case _:
                    raise AssertionError(verdict)

    @property
    def ranks(self) -> range:
        return range(len(self.valid))

    def answer(self, rank: int, record: Record) -> RecordVote:
        if record.phase != RecordPhase.COMMIT:
            self.leases[rank] = max(e for e in self.valid[rank] if e <= record.endpoint)
        endpoint = self.leases[rank]
        has_committed = self.flags[record.phase] and endpoint == record.endpoint
        status = VoteStatus.COMMITTED if has_committed else VoteStatus.PREPARED
        return RecordVote(1, record.attempt, record.phase, status, endpoint, has_committed)


def subsets(endpoints: Sequence[int]) -> Iterator[set[int]]:
    for size in range(len(endpoints) + 1):
        yield from map(set, combinations(endpoints, size))


@pytest.mark.parametrize("auto_commit", [True, False])
@pytest.mark.parametrize("trim_commits", [True, False])
def test_a_chain_falls_strictly_and_ends_soon(auto_commit: bool, trim_commits: bool) -> None:
    """I11, I12, I13: all sets of valid endpoints of two ranks (five) and three ranks (three)."""
    worlds = [
        *product(list(subsets((1, 2, 3, 4, 5))), repeat=2),
        *product(list(subsets((1, 2, 3))), repeat=3),
    ]
    for valid in worlds:
        candidate = min(max([0, *held]) for held in valid)
        chain = Chain(valid, auto_commit=auto_commit, trim_commits=trim_commits)
        agreed = chain.run(candidate)
        assert agreed == max(set.intersection(*chain.valid) & set(range(candidate + 1)))
        falls = chain.commons
        assert falls == sorted(falls, reverse=True)  # I11
        steps_at_each = [falls.count(endpoint) for endpoint in set(falls)]
        assert max(steps_at_each) <= 2  # reached by one step, found equal by the next
        assert len(set(falls)) == len(set(falls) & ({0}.union(*chain.valid)))
        valid_below = {e for held in chain.valid for e in held if e <= candidate}
        assert len(falls) <= len(valid_below) + 1  # I12


# ── the greedy planner ───────────────────────────────────────────────────────────────────────

SLOT = WaveSlot(wave=1, oldest_wave=1, admitting_count=0)


Lane = tuple[int, int, tuple[int, ...]]  # start, stop, snapshot points


def plans(block: int, points: bool) -> Iterator[tuple[int, int, list[Lane]]]:
    """Yield (budget, K, lanes): up to three lanes in blocks of 1 or 2, with ends up to 6."""
    lanes: list[Lane] = []
    for start in range(0, 4, block):
        for stop in range(start + 1, 7):
            chosen = subsets(range(start + block, stop, block)) if points else iter([set[int]()])
            lanes += [(start, stop, tuple(sorted(found))) for found in chosen]
    if block == 1 and points:
        lanes = lanes[::5]  # 65 lanes are too many for all triples
    for count in (1, 2, 3):
        for several in product(lanes, repeat=count):
            for budget in {block, 2 * block, 4}:
                yield budget, 1 + (len(several) > 1), list(several)


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("points", [False, True])
def test_greedy_waves_hold_what_the_planner_promises(block: int, points: bool) -> None:
    """I33, I34, I35 for all small inputs: never empty while a lane exists, oldest lane first."""
    count = 0
    for budget, spans_max, lanes in plans(block, points):
        count += 1
        planner = GreedyPlanner(budget, spans_max, block)
        for rid, (start, stop, snapshots) in enumerate(lanes):
            planner.add_lane(rid, start, stop, snapshots)
        position = {rid: lane[0] for rid, lane in enumerate(lanes)}
        while position:
            planned = planner.plan(SLOT)
            assert planned is not None  # never empty while a lane exists
            check_wave(planned.spans, budget, spans_max, position, lanes, block)
            planner.accept(planned.spans)  # only this advances  [I35]
            for span in planned.spans:
                position[span.rid] += span.length
                if position[span.rid] == lanes[span.rid][1]:
                    del position[span.rid]
            assert planner.lane_count() == len(position)
        assert planner.plan(SLOT) is None
    assert count > 1_000


def check_wave(
    spans: Sequence[PlannedSpan],
    budget: int,
    spans_max: int,
    position: dict[int, int],
    lanes: Sequence[Lane],
    block: int,
) -> None:
    assert sum(span.length for span in spans) <= budget  # I33
    assert 1 <= len(spans) <= spans_max
    assert spans[0].rid == min(position)  # the oldest lane's
    assert [span.rid for span in spans] == sorted({span.rid for span in spans})
    for span in spans:
        _, stop, snapshots = lanes[span.rid]
        end = span.start + span.length
        assert span.start == position[span.rid] < end <= stop  # I34
        assert end == stop or end % block == 0
        assert not any(span.start < point < end for point in snapshots)
