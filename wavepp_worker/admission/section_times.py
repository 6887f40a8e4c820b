"""Time spent in the cache's sections, by a clock that the driver lends; without one, nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Final

from wavepp_worker.admission.commands import (
    AcquireLease,
    CommitEscrow,
    Forget,
    Learn,
    Materialize,
    PrepareEscrow,
    Probe,
    ReadCapacity,
    ReleaseAttempt,
    Section,
    TrimLease,
)

NAMES: Final[dict[type[Section], str]] = {
    Learn: "learn",
    Probe: "probe",
    AcquireLease: "acquire",
    TrimLease: "trim",
    PrepareEscrow: "prepare",
    CommitEscrow: "commit",
    ReleaseAttempt: "release",
    Materialize: "materialize",
    Forget: "forget",
    ReadCapacity: "capacity",
}
EVENTS: Final = ("publish", "free")  # sections that LOOP asks for


class SectionTimes:
    """Seconds and runs of each section since the start.

    Args:
        clock: seconds, never falling; None: nothing is measured, as in simulations.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys((*NAMES.values(), *EVENTS), 0.0)
        self._runs = dict.fromkeys(self._seconds, 0)
        self._name = ""
        self._began_at = 0.0

    def of(self, section: Section | str) -> SectionTimes:
        """Return a context that measures one section; they do not nest."""
        self._name = section if isinstance(section, str) else NAMES[type(section)]
        return self

    def __enter__(self) -> None:
        if self._clock is not None:
            self._began_at = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._clock is not None:
            self._seconds[self._name] += self._clock() - self._began_at
            self._runs[self._name] += 1

    def stats(self) -> dict[str, float]:
        """Return counters by their metric names; none without a clock."""
        if self._clock is None:
            return {}
        values: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            values[f'wavepp_section_seconds_total{{section="{name}"}}'] = seconds
            values[f'wavepp_sections_total{{section="{name}"}}'] = float(self._runs[name])
        return values
