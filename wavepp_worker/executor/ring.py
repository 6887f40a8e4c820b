"""The ring of R = 2P waves that are emitted and not retired; rank 0 only.  [P-WAVE]"""

from __future__ import annotations

from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.types import Instant


class Ring:
    """Numbers waves 1, 2, ... and bounds how many are under way.

    Args:
        capacity: R, waves.
        stall_timeout_s: T_stall; waves are under way and none retired for so long: fatal.
    """

    def __init__(self, capacity: int, stall_timeout_s: float) -> None:
        self.capacity = capacity
        self._stall_timeout_s = stall_timeout_s
        self._progress_at = Instant(0.0)
        self._changed_at = Instant(0.0)
        self.wave_seconds = 0.0
        """Integral of `count` over time, up to the last change of it."""
        self.next_wave = 1
        self.oldest_wave = 1  # first wave not yet retired

    @property
    def count(self) -> int:
        """Waves under way."""
        return self.next_wave - self.oldest_wave

    @property
    def has_room(self) -> bool:
        """Whether a wave may be emitted."""
        return self.count < self.capacity

    def emit(self, now: Instant) -> int:
        """Take a slot; return the new wave's number."""
        check(self.has_room, "the ring is full", waves=self.count)  # I38
        if self.count == 0:
            self._progress_at = now
        self._integrate(now)
        wave = self.next_wave
        self.next_wave += 1
        return wave

    def retire(self, wave: int, now: Instant) -> None:
        """Give the oldest wave's slot back.

        Raises:
            InvariantError: `wave` is not the oldest one; a gap between results is fatal.
        """
        check(
            self.oldest_wave == wave < self.next_wave,
            "waves retire in order",
            wave=wave,
            oldest_wave=self.oldest_wave,
            next_wave=self.next_wave,
        )
        self._integrate(now)
        self.oldest_wave += 1
        self._progress_at = now

    def deadline(self) -> Instant | None:
        """Return when the ring counts as stalled; None while it is empty."""
        if self.count == 0:
            return None
        return Instant(self._progress_at + self._stall_timeout_s)

    def check_progress(self, now: Instant) -> None:
        """Raise PeerError if the ring is stalled."""
        deadline = self.deadline()
        if deadline is not None and now >= deadline:
            raise PeerError(
                f"no wave retired for {self._stall_timeout_s:g} s (executor.stall_timeout_s); "
                f"{self.count} under way, oldest_wave={self.oldest_wave}"
            )

    def _integrate(self, now: Instant) -> None:
        self.wave_seconds += self.count * (now - self._changed_at)
        self._changed_at = now
