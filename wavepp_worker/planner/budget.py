"""How large the next wave may be: the budget ladder and what moves along it.  [P-MPU]

    ladder     M, M/2, M/4, ... b_min                                          [algorithms E6]
    n(b)       max( ceil(W / b), pieces larger than b/2 )   waves that b supplies      [E7]
    target     the largest b with n(b) >= S, else b_min; but no smaller than a budget that fills
               the ring by itself, once more than rho * W would be newly split         [11.2]
    damping    a step up persists R/2 decisions, a step down R; a burst rises at once  [11.3]

Fewer tokens per wave mean more waves: with little work left after reuse that keeps every stage
busy, with much work it only costs launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import align_down, ceil_div


class BudgetRules(Struct, frozen=True, kw_only=True):
    """Numbers that the choice of a budget depends on.

    Attributes:
        ladder: budgets in tokens, falling; multiples of the block size.
        ring_waves: R = 2P.
        supply_waves: S = R + (F - 1) * P.
        split_fraction: rho, the share of W that a smaller budget may newly split.
        shrink_margin: h; shrinks only while the supply would be short with so much more work.
        burst_factor: grows at once if the next larger budget supplies this many times S.
    """

    ladder: tuple[int, ...]
    ring_waves: int
    supply_waves: int
    split_fraction: float = 0.125
    shrink_margin: float = 0.125
    burst_factor: int = 2


def budget_ladder(wave_tokens_max: int, wave_tokens_min: int, block_tokens: int) -> tuple[int, ...]:
    """Return M, M/2, ... down to b_min, in tokens, each a multiple of `block_tokens`.  [E6]"""
    check(
        0 < block_tokens <= wave_tokens_min <= wave_tokens_max
        and wave_tokens_min % block_tokens == 0
        and wave_tokens_max % block_tokens == 0,
        "budgets are multiples of the block size, b_min at most M",
        wave_tokens_max=wave_tokens_max,
        wave_tokens_min=wave_tokens_min,
        block_tokens=block_tokens,
    )
    ladder = [wave_tokens_max]
    while ladder[-1] > wave_tokens_min:
        ladder.append(max(wave_tokens_min, align_down(ladder[-1] // 2, block_tokens)))
    return tuple(ladder)


def waves_available(budget: int, items: Sequence[int]) -> int:
    """Return n(b): a lower bound on the waves that `items` fill.  Non-increasing in b.  [E7, I36]

    Args:
        budget: b, tokens.
        items: unscheduled suffixes and counted in-flight chunks, tokens each.
    """
    return max(ceil_div(sum(items), budget), sum(2 * item > budget for item in items))


def target_budget(rules: BudgetRules, items: Sequence[int], suffixes: Sequence[int]) -> int:
    """Return the budget that this much work asks for; a rung of the ladder.  [11.2, I36]

    Args:
        items: as in `waves_available`.
        suffixes: the unscheduled ones among them; only these can be newly split.
    """
    ladder = rules.ladder
    supply = [waves_available(budget, items) for budget in ladder]
    target = _largest(supply, rules.supply_waves)
    enough = _largest(supply, rules.ring_waves)
    if target is None:
        target = len(ladder) - 1
    if enough is None or target <= enough:
        return ladder[target]
    # Budget `enough` fills the ring already: thin further only while few pieces are newly cut.
    # `newly` grows as b shrinks, so the first violation ends the search exactly.
    split_max = rules.split_fraction * sum(items)
    best = enough
    for rung in range(enough, target + 1):
        newly = sum(s for s in suffixes if ladder[rung] < s <= ladder[enough])
        if newly > split_max:
            break
        best = rung
    return ladder[best]


def _largest(supply: Sequence[int], wanted: int) -> int | None:
    """Return the first rung, that is the largest budget, that supplies `wanted` waves."""
    return next((rung for rung, waves in enumerate(supply) if waves >= wanted), None)


class BudgetControl:
    """The budget in force, moved one decision at a time.  [11.3]"""

    def __init__(self, rules: BudgetRules) -> None:
        self._rules = rules
        self._rung = 0
        self._ups = 0
        self._downs = 0
        self.steps_total = 0
        """Changes of the budget since the start."""
        self.decisions_total = 0
        self.short_decisions_total = 0
        """Decisions whose budget supplies less than S waves."""
        self.work_tokens = 0
        """W of the last decision."""
        self.waves = 0
        """n(b) of the last decision, b being its outcome."""

    @property
    def budget(self) -> int:
        """Tokens of the next wave."""
        return self._rules.ladder[self._rung]

    def decide(self, items: Sequence[int], suffixes: Sequence[int], *, is_ring_empty: bool) -> int:
        """Take one decision, the first for a wave number; return its budget.  [A24, I37]"""
        rules, before = self._rules, self._rung
        target = rules.ladder.index(target_budget(rules, items, suffixes))
        if is_ring_empty:  # nothing in flight to protect: adopt at once, or a burst is over first
            self._rung, self._ups, self._downs = target, 0, 0
        elif target < self._rung:
            self._downs = 0
            self._grow(target, items)
        elif target > self._rung:
            self._ups = 0
            self._shrink(items)
        else:
            self._ups = self._downs = 0
        self.steps_total += self._rung != before
        self.decisions_total += 1
        self.work_tokens, self.waves = sum(items), waves_available(self.budget, items)
        self.short_decisions_total += self.waves < rules.supply_waves
        return self.budget

    def _grow(self, target: int, items: Sequence[int]) -> None:
        rules = self._rules
        larger = rules.ladder[self._rung - 1]
        is_burst = (
            self._rung - target >= 2
            or waves_available(larger, items) >= rules.burst_factor * rules.supply_waves
        )
        self._ups += 1
        if is_burst or 2 * self._ups >= rules.ring_waves:
            self._rung, self._ups = target, 0

    def _shrink(self, items: Sequence[int]) -> None:
        rules = self._rules
        padded = ceil_div(int((1 + rules.shrink_margin) * sum(items)), self.budget)
        pieces = sum(2 * item > self.budget for item in items)
        self._downs = self._downs + 1 if max(padded, pieces) < rules.supply_waves else 0
        if self._downs >= rules.ring_waves:
            self._rung, self._downs = self._rung + 1, 0
