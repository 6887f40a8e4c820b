"""What a measurement is reported as: distributions, growth, and the facts of the machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from wavepp_worker.base.errors import check

CPU_FACTS = Path("/proc/cpuinfo")


class Spread(Struct, frozen=True):
    """A distribution, in microseconds."""

    count: int
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


class Growth(Struct, frozen=True):
    """How a cost grows with a size.

    Attributes:
        sizes: rising.
        values: one figure per size.
        exponent: e of the fitted value = c * size ** e: 0 is flat, 1 is proportional.
        ratio: last value over first value.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]
    exponent: float
    ratio: float


class Machine(Struct, frozen=True):
    """What a reader of the figures needs to know of the machine."""

    cpus: int
    cpu_model: str
    python: str
    system: str
    load_average: float  # over the last minute, when the run began


def spread_us(samples_ns: Sequence[int]) -> Spread:
    """Return the distribution of durations given in nanoseconds."""
    check(len(samples_ns) > 0, "a distribution has samples")
    ordered = sorted(sample / 1e3 for sample in samples_ns)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    median = statistics.median(ordered)
    return Spread(len(ordered), at(0.1), median, at(0.9), at(0.99), ordered[-1])


def growth_of(sizes: Sequence[int], values: Sequence[float]) -> Growth:
    """Fit a power law through (size, value) by least squares on logarithms."""
    check(len(sizes) == len(values) > 1, "growth needs two sizes at least", sizes=len(sizes))
    slope, _ = statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(value) for value in values]
    )
    return Growth(tuple(sizes), tuple(values), slope, values[-1] / values[0])


def machine_facts() -> Machine:
    """Return the facts of this machine, now."""
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=_cpu_model(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.machine()}",
        load_average=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    if CPU_FACTS.exists():
        for line in CPU_FACTS.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown"
