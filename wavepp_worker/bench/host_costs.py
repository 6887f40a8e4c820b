"""What a rank's processor does to admit one request, per rung: measured here, fitted to a line.

    work = fixed + token * prompt tokens + computed * tokens that are not reused

    naive    learn keys, first walk, second walk and pin, take blocks
    waves    learn keys, probe the index, second walk and pin, take blocks
    leases   learn keys, probe, lease walk, escrow prepare, escrow commit, materialise

The steps are those of `wavepp bench admission`, medians of a short run: a short and a long prompt
of which most is cached, and a long one of which nothing is.  Three sizes, three unknowns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import align_down
from wavepp_worker.bench.admission import (
    GROWTH_FAMILIES,
    GROWTH_RANKS,
    GROWTH_REQUESTS,
    TABLE_BLOCKS,
    run_cell,
)
from wavepp_worker.bench.admission_cell import CellTask
from wavepp_worker.bench.admission_load import AdmissionLoad

STEPS = {
    "naive": (
        "ours: learn keys", "two walks: first walk", "two walks: second walk and pin",
        "two walks: take blocks",
    ),
    "waves": (
        "ours: learn keys", "ours: probe", "two walks: second walk and pin",
        "two walks: take blocks",
    ),
    "leases": (
        "ours: learn keys", "ours: probe", "ours: lease walk", "ours: escrow prepare",
        "ours: escrow commit", "ours: materialise",
    ),
}  # fmt: skip
CACHED_SHARE = 0.9
SHORT_PART = 4  # the short prompt is so many times shorter
COLD_BLOCKS = 1  # a family shares something, or it is none
REPEATS = 3


class HostCost(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one rank's processor for one request."""

    fixed_s: float
    token_s: float
    computed_token_s: float


class CostPoint(Struct, frozen=True):
    """One measured size; medians in microseconds."""

    tokens: int
    computed_tokens: int
    steps_us: dict[str, float]


class HostCosts(Struct, frozen=True):
    """Per rung's `admission.mode`, and what it was fitted to; no points: given, not measured."""

    by_mode: dict[str, HostCost]
    points: tuple[CostPoint, ...] = ()


def measure_costs(tokens: int, block_tokens: int, note: Callable[[str], None]) -> HostCosts:
    """Measure on this machine; takes seconds, each size in a process of its own.

    Raises:
        ConfigError: the prompt is too short to be cut.
        PeerError: a measuring process failed.
    """
    short = align_down(tokens // SHORT_PART, block_tokens)
    if short < TABLE_BLOCKS * block_tokens:
        least = SHORT_PART * TABLE_BLOCKS * block_tokens
        raise ConfigError(f"host costs are measured with prompts of {least:,} tokens at least")
    cold = COLD_BLOCKS * block_tokens / tokens
    points = []
    for size, share in ((short, CACHED_SHARE), (tokens, CACHED_SHARE), (tokens, cold)):
        note(f"host costs: {size:,} tokens, {share:.0%} cached")
        load = AdmissionLoad(
            tokens=size,
            block_tokens=block_tokens,
            requests=GROWTH_REQUESTS,
            ranks=GROWTH_RANKS,
            families=GROWTH_FAMILIES,
            reuse_share=share,
        )
        result = run_cell(CellTask(kind="sections", load=load, repeats=REPEATS))
        medians = {name: spread.p50 for name, spread in result.spreads.items()}
        points.append(CostPoint(size, size - load.resumed_tokens, medians))
    return fit_costs(points)


def fit_costs(points: Sequence[CostPoint]) -> HostCosts:
    """Return the lines through three points; a slope below 0 is noise and becomes 0."""
    return HostCosts(
        {mode: _fit(points, steps) for mode, steps in STEPS.items()},
        tuple(points),
    )


def _fit(points: Sequence[CostPoint], steps: Sequence[str]) -> HostCost:
    sizes = np.array([[1.0, point.tokens, point.computed_tokens] for point in points])
    spent_s = np.array([_total_us(point.steps_us, steps) / 1e6 for point in points])
    found = np.linalg.lstsq(sizes, spent_s, rcond=None)[0]
    fixed_s, token_s, computed_token_s = (max(0.0, float(value)) for value in found)
    return HostCost(fixed_s, token_s, computed_token_s)


def _total_us(steps_us: Mapping[str, float], steps: Sequence[str]) -> float:
    return sum(steps_us[step] for step in steps)
