"""MpuPlanner: packing, lone waits, deadlines; X7, S14, I33, I34, I35, I39, I40."""

from __future__ import annotations

import random

import pytest

from wavepp_worker.base.types import Instant
from wavepp_worker.planner.budget import BudgetRules, budget_ladder
from wavepp_worker.planner.mpu import MpuPlanner, MpuSettings
from wavepp_worker.planner.ports import PlannedSpan, WaveSlot

M, B = 16_384, 64


def make_planner(
    *, wave_min: int = 8_192, stages: int = 4, spans_max: int = 16, counts_ring: bool = False
) -> MpuPlanner:
    rules = BudgetRules(
        ladder=budget_ladder(M, wave_min, B), ring_waves=2 * stages, supply_waves=3 * stages
    )
    return MpuPlanner(
        MpuSettings(rules=rules, spans_max=spans_max, block_tokens=B, counts_ring=counts_ring)
    )


def emit(planner: MpuPlanner, slot: WaveSlot) -> list[tuple[int, int, int]]:
    planned = planner.plan(slot)
    assert planned is not None
    planner.accept(planned.spans)
    return [(span.rid, span.start, span.length) for span in planned.spans]


def test_x7_a_leftover_does_not_cut_a_larger_request() -> None:
    """X7, I40: 6,384 tokens are left beside a tail of 10,000; the 4,000 fits whole."""
    planner = make_planner(wave_min=8_192, stages=1)
    for rid, suffix in ((1, 10_000), (2, 40_000), (3, 4_000)):
        planner.add_lane(rid, 0, suffix)
    planned = planner.plan(WaveSlot(1, 1, 0))
    assert planned is not None and planned.budget == M
    assert [(s.rid, s.length) for s in planned.spans] == [(1, 10_000), (3, 4_000)]
    assert planner.stats()["wavepp_planner_fragments_skipped_total"] == 1


def test_x7_a_large_leftover_takes_a_fragment() -> None:
    """X7: 13,384 are left beside a tail of 3,000; 13,376 of them end on a block."""
    planner = make_planner(wave_min=8_192, stages=1)
    planner.add_lane(1, 0, 3_000)
    planner.add_lane(2, 0, 40_000)
    assert emit(planner, WaveSlot(1, 1, 0)) == [(1, 0, 3_000), (2, 0, 13_376)]


def test_a_clip_at_a_snapshot_point_is_no_fragment() -> None:
    """I40: the chunk that ends at a snapshot point may be small and may follow another span."""
    planner = make_planner(wave_min=8_192, stages=1)
    planner.add_lane(1, 0, 3_000)
    planner.add_lane(2, 0, 40_000, (640, 20_480))
    assert emit(planner, WaveSlot(1, 1, 0)) == [(1, 0, 3_000), (2, 0, 640)]
    assert emit(planner, WaveSlot(2, 1, 0)) == [(2, 640, 16_384)]
    assert emit(planner, WaveSlot(3, 1, 0)) == [(2, 17_024, 3_456)]


def test_lone_small_span_waits_once_for_company() -> None:
    """A28: one wait per wave, while a request is in admission and the ring has work."""
    planner = make_planner()
    planner.add_lane(1, 0, 1_000)
    assert planner.plan(WaveSlot(2, 1, 1, Instant(5.0))) is None
    assert planner.next_deadline() == pytest.approx(5.001)
    assert planner.plan(WaveSlot(2, 1, 1, Instant(5.0009))) is None
    assert emit(planner, WaveSlot(2, 1, 1, Instant(5.001))) == [(1, 0, 1_000)]
    assert planner.next_deadline() is None
    assert planner.stats()["wavepp_planner_lone_waits_total"] == 1


@pytest.mark.parametrize("ended_by", ["lane", "retire"])
def test_lone_wait_ends_with_what_it_waits_for(ended_by: str) -> None:
    """A28: a new lane joins the wave; a retired wave ends the wait."""
    planner = make_planner()
    planner.add_lane(1, 0, 1_000)
    assert planner.plan(WaveSlot(3, 1, 1, Instant(5.0))) is None
    oldest, expected = 1, [(1, 0, 1_000)]
    if ended_by == "lane":
        planner.add_lane(2, 64, 500)
        expected.append((2, 64, 436))
    else:
        oldest = 2
    assert emit(planner, WaveSlot(3, oldest, 1, Instant(5.0001))) == expected


@pytest.mark.parametrize(
    ("oldest", "admitting", "suffix"), [(2, 1, 1_000), (1, 0, 1_000), (1, 1, 9_000)]
)
def test_no_lone_wait_without_a_reason(oldest: int, admitting: int, suffix: int) -> None:
    """An empty ring, nobody in admission, or a wave that is half full already."""
    planner = make_planner()
    planner.add_lane(1, 0, suffix)
    assert planner.plan(WaveSlot(2, oldest, admitting)) is not None


def test_cancel_during_a_lone_wait_leaves_no_deadline() -> None:
    planner = make_planner()
    planner.add_lane(1, 0, 1_000)
    assert planner.plan(WaveSlot(2, 1, 1, Instant(5.0))) is None
    planner.remove_lane(1)
    assert planner.next_deadline() is None
    planner.add_lane(2, 0, 1_000)  # much later: a wait of its own, not the old one's rest
    assert planner.plan(WaveSlot(2, 1, 1, Instant(9.0))) is None
    assert planner.next_deadline() == pytest.approx(9.001)


def test_s14_polls_of_one_wave_are_one_decision() -> None:
    """S14: fifty polls in T_lone while a smaller budget is the target: the budget stays."""
    planner = make_planner()
    for rid in range(1, 25):
        planner.add_lane(rid, 0, M)
    assert emit(planner, WaveSlot(1, 1, 0)) == [(1, 0, M)]
    for rid in range(2, 25):
        planner.remove_lane(rid)
    planner.add_lane(25, 0, 1_000)
    for step in range(50):
        assert planner.plan(WaveSlot(2, 1, 1, Instant(step * 1e-5))) is None
    assert planner.stats()["wavepp_planner_budget_tokens"] == M
    for wave in range(2, 9):  # one decision a wave: the seventh is not enough with R = 8
        planner.add_lane(100 + wave, 0, 1_000)
        emit(planner, WaveSlot(wave, 1, 0, Instant(1.0 + wave)))
    assert planner.stats()["wavepp_planner_budget_tokens"] == M
    planner.add_lane(200, 0, 1_000)
    emit(planner, WaveSlot(9, 1, 0, Instant(20.0)))
    assert planner.stats()["wavepp_planner_budget_tokens"] == 8_192


def test_i39_nothing_optional_delays_beyond_t_emit() -> None:
    """I39: with T_lone longer than T_emit the deadline rules, and its wave has no rules left."""
    rules = BudgetRules(ladder=(M, 8_192), ring_waves=8, supply_waves=12)
    planner = MpuPlanner(
        MpuSettings(rules=rules, spans_max=16, block_tokens=B, lone_wait_s=1.0, emit_wait_s=0.005)
    )
    planner.add_lane(1, 0, 1_000)
    assert planner.plan(WaveSlot(2, 1, 1, Instant(0.0))) is None
    assert planner.next_deadline() == pytest.approx(0.005)
    assert emit(planner, WaveSlot(2, 1, 1, Instant(0.005))) == [(1, 0, 1_000)]
    assert planner.stats()["wavepp_planner_deadline_waves_total"] == 1


def test_the_supply_of_waves_is_shown_while_there_is_work() -> None:
    """S = 12 waves are wanted; four suffixes of 8,192 fill four waves of the smallest budget."""
    planner = make_planner()
    for rid in range(1, 5):
        planner.add_lane(rid, 0, 8_192)
    emit(planner, WaveSlot(1, 1, 0))
    stats = planner.stats()
    assert stats["wavepp_planner_work_tokens"] == 32_768
    assert stats["wavepp_planner_available_waves"] == 4
    assert stats["wavepp_planner_wanted_waves"] == 12
    assert stats["wavepp_planner_decisions_total"] == 1
    assert stats["wavepp_planner_short_decisions_total"] == 1
    for rid in range(1, 5):
        planner.remove_lane(rid)
    stats = planner.stats()
    assert stats["wavepp_planner_work_tokens"] == stats["wavepp_planner_available_waves"] == 0
    for rid in range(10, 50):
        planner.add_lane(rid, 0, M)
    emit(planner, WaveSlot(2, 1, 0))
    stats = planner.stats()
    assert stats["wavepp_planner_work_tokens"] == 40 * M + 8_192, "with what is under way"
    assert stats["wavepp_planner_available_waves"] >= 40
    assert stats["wavepp_planner_decisions_total"] == 2
    assert stats["wavepp_planner_short_decisions_total"] == 1


@pytest.mark.parametrize(("counts_ring", "budget_after"), [(False, 8_192), (True, M)])
def test_two_long_prompts_keep_their_budget_if_the_whole_ring_counts(
    counts_ring: bool, budget_after: int
) -> None:
    """A21: one prompt in the ring, one to come, eight full waves each; S = 12, R = 8.

    With a chunk per request the supply looks like nine waves at most, and the budget halves.
    """
    planner = make_planner(counts_ring=counts_ring)
    planner.add_lane(1, 0, 8 * M)
    wave = 0
    for rid in range(2, 6):  # the first two arrive together, later ones when one has been emitted
        planner.add_lane(rid, 0, 8 * M)
        while planner.lane_count() > (rid == 2):
            wave += 1
            emit(planner, WaveSlot(wave, max(1, wave - 7), 0, Instant(float(wave))))
    assert planner.stats()["wavepp_planner_budget_tokens"] == budget_after


def test_chunks_of_retired_waves_count_no_longer() -> None:
    """A21: eight chunks count while they are in the ring, and none when it is empty."""
    planner = make_planner(counts_ring=True)
    planner.add_lane(1, 0, 20 * M)
    for wave in range(1, 9):
        emit(planner, WaveSlot(wave, 1, 0, Instant(float(wave))))
    planner.remove_lane(1)
    planner.add_lane(2, 0, M)
    emit(planner, WaveSlot(9, 9, 0, Instant(9.0)))  # the ring is empty: the target is adopted
    assert planner.stats()["wavepp_planner_budget_tokens"] == 8_192


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_keep_the_rules_of_a_wave(seed: int) -> None:
    """I33, I34, I35, I40: budget, K, one span per request, contiguity, no small fragments."""
    rng = random.Random(seed)
    spans_max = rng.choice([1, 2, 16])
    planner = make_planner(wave_min=rng.choice([64, 1_024, 8_192, M]), spans_max=spans_max)
    state: dict[int, int] = {}
    stops: dict[int, int] = {}
    points: dict[int, tuple[int, ...]] = {}
    wave, oldest, now, order = 1, 1, 0.0, []
    for rid in range(1, 40):
        start = B * rng.randint(0, 200)
        stop = start + rng.choice([1, 63, 64, 65, 3_000, 9_000, 50_000])
        marks = tuple(sorted({B * rng.randint(1, 900) for _ in range(rng.choice([0, 3]))}))
        planner.add_lane(rid, start, stop, marks)
        state[rid], stops[rid], points[rid] = start, stop, marks
        order.append(rid)
        for _ in range(rng.randint(0, 3)):
            oldest = rng.randint(oldest, wave)
            now += 0.0004
            planned = planner.plan(WaveSlot(wave, oldest, rng.randint(0, 1), Instant(now)))
            if planned is None:
                continue
            check_wave(planned.spans, planned.budget, state, stops, points, spans_max, order)
            accepted = planned.spans[: rng.randint(1, len(planned.spans))]
            planner.accept(accepted)
            for span in accepted:
                state[span.rid] += span.length
                if state[span.rid] == stops[span.rid]:
                    order.remove(span.rid)
            wave += 1
    while planner.lane_count():
        now += 0.01
        planned = planner.plan(WaveSlot(wave, wave, 0, Instant(now)))
        assert planned is not None
        planner.accept(planned.spans)
        for span in planned.spans:
            state[span.rid] += span.length
        wave += 1
    assert state == stops


def check_wave(
    spans: tuple[PlannedSpan, ...],
    budget: int,
    state: dict[int, int],
    stops: dict[int, int],
    points: dict[int, tuple[int, ...]],
    spans_max: int,
    order: list[int],
) -> None:
    assert 0 < len(spans) <= spans_max
    assert spans[0].rid == order[0]
    assert len({span.rid for span in spans}) == len(spans)
    assert sum(span.length for span in spans) <= budget <= M
    for span in spans:
        end = span.start + span.length
        assert span.start == state[span.rid]
        assert span.length > 0
        assert end == stops[span.rid] or end % B == 0
        assert not any(span.start < point < end for point in points[span.rid])
