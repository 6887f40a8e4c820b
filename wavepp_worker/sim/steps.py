"""Virtual time: one heap of steps, and FIFO links with drawn delays.

The clock jumps to the next step, so a timeout of a minute costs nothing.  All randomness comes
from generators named after their use: one more draw in one place shifts no other.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable

Step = Callable[[], object]


class Steps:
    """The order in which things happen.

    Attributes:
        now: virtual seconds.
        generation: of the worker's processes; steps of an earlier one no longer happen.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[tuple[float, int, int | None, Step]] = []
        self._count = 0
        self._rngs: dict[str, random.Random] = {}
        self._last_at: dict[Hashable, float] = {}
        self.now = 0.0
        self.generation = 0
        self.done_count = 0

    def rng(self, name: str) -> random.Random:
        """Return the generator of this name."""
        if name not in self._rngs:
            self._rngs[name] = random.Random(f"{self._seed}/{name}")
        return self._rngs[name]

    def at(self, when: float, step: Step, *, outlives: bool = False) -> None:
        """Do `step` at `when`; with `outlives` also if the worker has restarted by then."""
        self._count += 1
        generation = None if outlives else self.generation
        heapq.heappush(self._heap, (max(when, self.now), self._count, generation, step))

    def after(self, delay_s: float, step: Step, *, outlives: bool = False) -> None:
        """Do `step` after a delay."""
        self.at(self.now + delay_s, step, outlives=outlives)

    def in_order(self, link: Hashable, delay_s: float, step: Step) -> None:
        """Deliver on one FIFO: never before what was sent on it earlier."""
        key = (self.generation, link)
        when = max(self._last_at.get(key, 0.0), self.now + delay_s)
        self._last_at[key] = when
        self.at(when, step)

    def next(self) -> bool:
        """Do the next step; return False if there is none."""
        while self._heap:
            when, _, generation, step = heapq.heappop(self._heap)
            self.now = when
            if generation is None or generation == self.generation:
                self.done_count += 1
                step()
                return True
        return False

    def forget_worker(self) -> None:
        """The worker's processes are gone: nothing that they had under way happens."""
        self.generation += 1
        self._last_at.clear()
