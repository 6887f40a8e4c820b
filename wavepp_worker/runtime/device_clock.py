"""When waves ran, on the host's clock, of a device that tells only durations.  Pure.

CUDA events know the time between two of them.  What ties them to the host's clock: no wave asks
for anything before it was launched, and none ends after its fence was seen.  Between the two, a
wave follows the one before at the distance that the device measured.  So the error stays within
one wave's slack however long the device's clock has drifted.
"""

from __future__ import annotations


class DeviceClock:
    """Places one stage's waves, in order."""

    def __init__(self) -> None:
        self._ended_at: float | None = None  # of the last wave placed

    def place(
        self, *, launched_at: float, seen_at: float, since_last_s: float, busy_s: float
    ) -> tuple[float, float]:
        """Return when the device came to a wave, and when the wave ended.

        Args:
            launched_at: when the host began to enqueue it.
            seen_at: when the host knew that it had ended.
            since_last_s: from the end of the wave before; of no meaning for the first.
            busy_s: from then to its end.
        """
        began_at = launched_at
        if self._ended_at is not None:
            began_at = max(began_at, self._ended_at + since_last_s)
        began_at = min(began_at, seen_at - busy_s)
        if self._ended_at is not None:  # waves never overlap, whatever the clocks say
            began_at = max(began_at, self._ended_at)
        # A device that counts too fast would fall behind for ever.
        self._ended_at = max(began_at, min(began_at + busy_s, seen_at))
        return began_at, self._ended_at
