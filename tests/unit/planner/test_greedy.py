"""Greedy packing.  [algorithms 11.4, I33, I34, I35]"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.planner.ports import PlannedSpan, PlannedWave, WaveSlot

SLOT = WaveSlot(wave=1, oldest_wave=1, admitting_count=0)


def make_planner(*lanes: tuple[int, int, int], budget: int = 16, spans: int = 4) -> GreedyPlanner:
    planner = GreedyPlanner(budget, spans, block_tokens=4)
    for rid, start, stop in lanes:
        planner.add_lane(rid, start, stop)
    return planner


def next_spans(planner: GreedyPlanner) -> list[tuple[int, int, int]]:
    wave = planner.plan(SLOT)
    if wave is None:
        return []
    planner.accept(wave.spans)
    return [(span.rid, span.start, span.length) for span in wave.spans]


def test_no_lane_no_wave() -> None:
    assert make_planner().plan(SLOT) is None


def test_oldest_first_and_the_last_one_cut_at_a_block() -> None:
    planner = make_planner((7, 0, 6), (3, 8, 40), (5, 0, 4))
    assert planner.plan(SLOT) == PlannedWave(
        16, (PlannedSpan(7, 0, 6), PlannedSpan(3, 8, 8))
    )  # 2 tokens are left, less than a block of a longer request


def test_a_small_rest_is_given_to_a_request_that_fits_whole() -> None:
    planner = make_planner((1, 0, 14), (2, 0, 40), (3, 4, 6))
    assert next_spans(planner) == [(1, 0, 14), (3, 4, 2)]
    assert next_spans(planner) == [(2, 0, 16)]


def test_several_chunks_of_one_request_follow_each_other() -> None:
    planner = make_planner((1, 4, 41))
    waves = [next_spans(planner) for _ in range(4)]
    assert waves == [[(1, 4, 16)], [(1, 20, 16)], [(1, 36, 5)], []]
    assert planner.lane_count() == 0


def test_at_most_k_spans() -> None:
    planner = make_planner((1, 0, 1), (2, 0, 1), (3, 0, 1), spans=2)
    assert next_spans(planner) == [(1, 0, 1), (2, 0, 1)]
    assert next_spans(planner) == [(3, 0, 1)]


def test_planning_alone_schedules_nothing() -> None:
    planner = make_planner((1, 0, 40))
    assert planner.plan(SLOT) == planner.plan(SLOT)


def test_a_shortened_acceptance_advances_by_what_was_accepted() -> None:
    planner = make_planner((1, 0, 40))
    planner.accept((PlannedSpan(1, 0, 8),))
    assert next_spans(planner) == [(1, 8, 16)]


def test_a_removed_lane_is_not_scheduled_again() -> None:
    planner = make_planner((1, 0, 40), (2, 0, 8))
    next_spans(planner)
    planner.remove_lane(1)
    planner.remove_lane(99)
    assert next_spans(planner) == [(2, 0, 8)]


@pytest.mark.parametrize(
    "spans",
    [(PlannedSpan(1, 4, 4),), (PlannedSpan(1, 0, 44),), (PlannedSpan(1, 0, 0),)],
)
def test_accepting_what_does_not_follow_is_refused(spans: tuple[PlannedSpan, ...]) -> None:
    with pytest.raises(InvariantError):
        make_planner((1, 0, 40)).accept(spans)


def test_a_lane_starts_on_a_block() -> None:
    with pytest.raises(InvariantError):
        make_planner((1, 3, 40))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 70)), min_size=1, max_size=8),
    budget_blocks=st.integers(1, 8),
    spans_max=st.integers(1, 4),
)
def test_waves_cover_every_request_exactly_once(
    lengths: list[tuple[int, int]], budget_blocks: int, spans_max: int
) -> None:
    lanes = [(rid, 4 * first, 4 * first + more) for rid, (first, more) in enumerate(lengths)]
    planner = make_planner(*lanes, budget=4 * budget_blocks, spans=spans_max)
    position = {rid: start for rid, start, _ in lanes}
    stop = {rid: stop for rid, _, stop in lanes}
    while spans := next_spans(planner):
        assert len(spans) <= spans_max
        assert sum(length for _, _, length in spans) <= 4 * budget_blocks
        assert len({rid for rid, _, _ in spans}) == len(spans)
        unfinished = [rid for rid in position if position[rid] < stop[rid]]
        assert spans[0][0] == unfinished[0]  # the oldest is never passed over
        for rid, start, length in spans:
            assert start == position[rid]
            assert length > 0
            position[rid] += length
            assert position[rid] == stop[rid] or position[rid] % 4 == 0
    assert position == stop
