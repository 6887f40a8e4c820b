"""The budget ladder, its target and its damping: worked examples X5, X6, X9 and I36, I37."""

from __future__ import annotations

import random
from itertools import product

import pytest

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.planner.budget import (
    BudgetControl,
    BudgetRules,
    budget_ladder,
    target_budget,
    waves_available,
)

M = 16_384


def rules(
    *, stages: int = 4, wave_min: int = 8_192, fills: int = 2, block: int = 64
) -> BudgetRules:
    return BudgetRules(
        ladder=budget_ladder(M, wave_min, block),
        ring_waves=2 * stages,
        supply_waves=2 * stages + (fills - 1) * stages,
    )


@pytest.mark.parametrize(
    ("wave_min", "ladder"),
    [
        (16_384, (16_384,)),
        (8_192, (16_384, 8_192)),
        (6_144, (16_384, 8_192, 6_144)),
        (1_024, (16_384, 8_192, 4_096, 2_048, 1_024)),
    ],
)
def test_ladder_halves_down_to_the_smallest_budget(wave_min: int, ladder: tuple[int, ...]) -> None:
    assert budget_ladder(M, wave_min, 64) == ladder


def test_ladder_refuses_budgets_off_the_block_grid() -> None:
    for wave_max, wave_min in ((100, 64), (128, 60), (64, 128), (64, 0)):
        with pytest.raises(InvariantError):
            budget_ladder(wave_max, wave_min, 64)


def test_x5_two_full_waves_of_work() -> None:
    """X5: two cold prompts of M tokens."""
    work = [M, M]
    assert [waves_available(b, work) for b in (16_384, 8_192)] == [2, 4]
    assert target_budget(rules(), work, work) == 8_192
    fine = rules(wave_min=1_024)
    assert [waves_available(b, work) for b in fine.ladder] == [2, 4, 8, 16, 32]
    assert target_budget(fine, work, work) == 2_048


def test_x6_an_eighth_may_be_newly_split() -> None:
    """X6: ten suffixes of 12,000 would all be cut by 8,192; six of 24,576 are cut already."""
    ten, six = [12_000] * 10, [24_576] * 6
    assert waves_available(M, ten) == 10
    assert waves_available(8_192, ten) == 15
    assert target_budget(rules(), ten, ten) == M
    assert waves_available(M, six) == 9
    assert target_budget(rules(), six, six) == 8_192


def test_x9_one_step_takes_half_a_ring_up_and_a_ring_down() -> None:
    """X9, I37: with P = 4, growth after 4 decisions and a shrink after 8."""
    control = BudgetControl(rules())
    much, little = [9_000] * 20, [M, M]
    assert control.decide(little, little, is_ring_empty=True) == 8_192
    budgets = [control.decide(much, much, is_ring_empty=False) for _ in range(4)]
    assert budgets == [8_192, 8_192, 8_192, M]
    budgets = [control.decide(little, little, is_ring_empty=False) for _ in range(8)]
    assert budgets == [M] * 7 + [8_192]
    assert control.steps_total == 3


def test_an_interrupted_wish_starts_again() -> None:
    """I37: persistence means consecutive decisions."""
    control = BudgetControl(rules())
    much, little = [9_000] * 20, [M, M]
    control.decide(little, little, is_ring_empty=True)
    for _ in range(3):
        control.decide(much, much, is_ring_empty=False)
    control.decide(little, little, is_ring_empty=False)
    budgets = [control.decide(much, much, is_ring_empty=False) for _ in range(4)]
    assert budgets == [8_192, 8_192, 8_192, M]


def test_a_burst_grows_at_once() -> None:
    """A27: the next larger budget would supply twice S."""
    control = BudgetControl(rules())
    control.decide([M, M], [M, M], is_ring_empty=True)
    burst = [M] * 24
    assert control.decide(burst, burst, is_ring_empty=False) == M


def test_a_supply_that_is_short_by_little_does_not_shrink() -> None:
    """A25: eleven and a half waves; with an eighth more work the supply would be enough."""
    control = BudgetControl(rules())
    work = [M] * 11 + [M // 2]
    for _ in range(40):
        assert control.decide(work, work, is_ring_empty=False) == M


def test_target_stays_on_the_ladder_and_supply_falls_with_the_budget() -> None:
    """I36: exhaustive over small inputs."""
    ladders = [budget_ladder(m, low, 1) for m in range(1, 9) for low in range(1, m + 1)]
    for ladder, count in product(ladders, range(1, 4)):
        some = BudgetRules(ladder=ladder, ring_waves=2, supply_waves=3)
        for items in product(range(1, 10), repeat=count):
            supply = [waves_available(budget, items) for budget in ladder]
            assert supply == sorted(supply)
            target = target_budget(some, items, items)
            assert target in ladder
            if max(supply) < some.ring_waves:
                assert target == ladder[-1]


def test_constant_work_settles_and_noise_changes_little() -> None:
    """I36: at most one change per rung with constant items; few with 5 % noise."""
    rng = random.Random(5)
    for _ in range(300):
        some = rules(stages=rng.choice([1, 2, 4, 8]), wave_min=rng.choice([512, 1_024, 4_096]))
        items = [rng.randint(64, 40_000) for _ in range(rng.randint(1, 30))]
        control = BudgetControl(some)
        for _ in range(40 * some.ring_waves):
            control.decide(items, items, is_ring_empty=False)
        settled = control.steps_total
        assert settled <= len(some.ladder)
        for _ in range(3 * some.ring_waves):
            control.decide(items, items, is_ring_empty=False)
        assert control.steps_total == settled
    for _ in range(30):
        some = rules(stages=4, wave_min=1_024)
        base = [rng.randint(64, 40_000) for _ in range(rng.randint(1, 30))]
        control = BudgetControl(some)
        for _ in range(400):
            items = [max(1, int(x * rng.uniform(0.95, 1.05))) for x in base]
            control.decide(items, items, is_ring_empty=False)
        assert control.steps_total <= 8
