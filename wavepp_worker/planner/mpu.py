"""Maximum pipeline utilisation: waves sized so that enough of them exist.  [P-MPU, algorithms 11]

    lanes ── items, W ──▶ BudgetControl ── b ──▶ pack ──▶ lone wait? ──▶ wave
                                                  │ no small fragment of a larger request
                                                  │ chunks end at snapshot points

One decision per wave number: repeated calls for the same wave, as in a lone wait, reuse its
budget.  Delays that are optional end at T_lone, and never pass T_emit.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from wavepp_worker.base.types import Instant
from wavepp_worker.planner.budget import BudgetControl, BudgetRules
from wavepp_worker.planner.lanes import LanePlanner
from wavepp_worker.planner.ports import PlannedSpan, PlannedWave, WaveSlot


class MpuSettings(Struct, frozen=True, kw_only=True):
    """What an `MpuPlanner` is told once.

    Attributes:
        spans_max: K, spans in one wave and lanes looked at.
        lone_wait_s: T_lone, longest wait of a lone small span for company.
        emit_wait_s: T_emit, longest time any optional delay holds runnable work back.
        counts_ring: all chunks in the ring are work, not each request's latest alone.  [A21]
    """

    rules: BudgetRules
    spans_max: int
    block_tokens: int
    counts_ring: bool = False
    lone_wait_s: float = 0.001
    emit_wait_s: float = 0.005


class _Decision(Struct):
    """What was decided for one wave number, for as long as that wave is not emitted."""

    wave: int
    budget: int
    runnable_at: Instant
    lone_until: Instant | None = None  # a lone wait was taken; it ends here at the latest
    lanes_seen: int = 0  # lanes added so far when the lone wait began
    retired_seen: int = 0  # oldest wave when the lone wait began


class MpuPlanner(LanePlanner):
    """Lanes in order of admission, and the budget control."""

    def __init__(self, settings: MpuSettings) -> None:
        super().__init__(settings.spans_max, settings.block_tokens)
        self._settings = settings
        self._control = BudgetControl(settings.rules)
        # (rid, wave or 0) -> (wave, length): chunks in the ring that count; 0: the latest replaces
        self._recent: dict[tuple[int, int], tuple[int, int]] = {}
        self._decision: _Decision | None = None
        self._planned_wave = 0
        self._counts = {"lone_waits": 0, "deadline_waves": 0, "fragments_skipped": 0}

    def remove_lane(self, rid: int) -> None:
        """Forget a cancelled request; the decision for the last one goes with it."""
        super().remove_lane(rid)
        if not self._lanes:
            self._decision = None

    # ── planning ─────────────────────────────────────────────────────────────────────────────

    def plan(self, slot: WaveSlot) -> PlannedWave | None:
        """Return the next wave, or None: no lane, or a lone wait (see `next_deadline`)."""
        if not self._lanes:
            return None
        self._forget_retired(slot.oldest_wave)
        decision = self._decide(slot)
        is_forced = slot.now >= self._deadline(decision)
        spans = self._pack(decision.budget, has_fragment_rule=not is_forced)
        if not is_forced and self._waits_for_company(spans, decision, slot):
            return None
        self._counts["deadline_waves"] += is_forced
        self._planned_wave = slot.wave
        return PlannedWave(decision.budget, spans)

    def accept(self, spans: tuple[PlannedSpan, ...]) -> None:
        """Advance the lanes of emitted spans, and only those.  [I35]"""
        super().accept(spans)
        wave = self._planned_wave
        for span in spans:
            key = (span.rid, wave if self._settings.counts_ring else 0)
            self._recent[key] = (wave, span.length)
        self._decision = None

    def next_deadline(self) -> Instant | None:
        """Return when a lone wait ends; None: only events make more runnable."""
        decision = self._decision
        if decision is None or decision.lone_until is None:
            return None
        return min(decision.lone_until, self._deadline(decision))

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by their metric names."""
        values = {f"wavepp_planner_{name}_total": float(n) for name, n in self._counts.items()}
        control, rules = self._control, self._settings.rules
        values["wavepp_planner_budget_tokens"] = float(control.budget)
        values["wavepp_planner_budget_steps_total"] = float(control.steps_total)
        values["wavepp_planner_decisions_total"] = float(control.decisions_total)
        values["wavepp_planner_short_decisions_total"] = float(control.short_decisions_total)
        # The last decision says nothing of a planner that has run out of work since.
        is_working = len(self._lanes) > 0
        values["wavepp_planner_work_tokens"] = float(control.work_tokens if is_working else 0)
        values["wavepp_planner_available_waves"] = float(control.waves if is_working else 0)
        values["wavepp_planner_wanted_waves"] = float(rules.supply_waves)
        return values

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _forget_retired(self, oldest_wave: int) -> None:
        gone = [key for key, (wave, _) in self._recent.items() if wave < oldest_wave]
        for key in gone:
            del self._recent[key]

    def _decide(self, slot: WaveSlot) -> _Decision:
        """Return this wave's decision, made at the first call that finds work.  [A24]"""
        if self._decision is None or self._decision.wave != slot.wave:
            suffixes = [lane.suffix for lane in self._lanes]
            items = suffixes + [length for _, length in self._recent.values()]
            budget = self._control.decide(
                items, suffixes, is_ring_empty=slot.oldest_wave == slot.wave
            )
            self._decision = _Decision(slot.wave, budget, slot.now)
        return self._decision

    def _deadline(self, decision: _Decision) -> Instant:
        """Return when this wave goes out whatever it holds.  [11.6, I39]"""
        return Instant(decision.runnable_at + self._settings.emit_wait_s)

    def _pack(self, budget: int, *, has_fragment_rule: bool) -> tuple[PlannedSpan, ...]:
        """Return spans of the first K lanes, oldest first.  [11.4, I33, I40]"""
        settings = self._settings
        fragment_min = max(settings.rules.ladder[-1], budget // 2)
        spans: list[PlannedSpan] = []
        left = budget
        for lane in self._lanes.first(settings.spans_max):
            if left == 0:
                break
            take, is_clipped = lane.chunk(left, settings.block_tokens)
            if take <= 0:
                continue
            is_fragment = take < lane.suffix
            is_small = is_fragment and not is_clipped and take < fragment_min
            if has_fragment_rule and spans and is_small:
                # A small leftover: do not cut a larger request; a younger one may fit whole.
                self._counts["fragments_skipped"] += 1
                continue
            spans.append(PlannedSpan(lane.rid, lane.scheduled, take))
            left -= take
        return tuple(spans)

    def _waits_for_company(
        self, spans: Sequence[PlannedSpan], decision: _Decision, slot: WaveSlot
    ) -> bool:
        """Return whether a lone small span waits one iteration for a request in admission.  [A28]

        The wait ends when a wave retires, a lane is added, or T_lone is over; one per wave.
        """
        if decision.lone_until is not None:
            return (
                slot.now < decision.lone_until
                and self._lanes.added_total == decision.lanes_seen
                and slot.oldest_wave == decision.retired_seen
            )
        is_lone = (
            slot.oldest_wave < slot.wave
            and len(spans) == 1
            and 2 * spans[0].length < decision.budget
            and slot.admitting_count > 0
        )
        if is_lone:
            self._counts["lone_waits"] += 1
            decision.lone_until = Instant(slot.now + self._settings.lone_wait_s)
            decision.lanes_seen = self._lanes.added_total
            decision.retired_seen = slot.oldest_wave
        return is_lone
