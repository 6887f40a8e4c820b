"""What the slots of one rank really hold: a stage in miniature whose "state" is the prefix itself.

The books say which slot holds what; this model carries out the copies and the waves as LOOP would,
late and in `ino` order, and compares every slot that is read with the prefix that should be in it.
A wrong table, a copy in the wrong order or a slot given away too early is seen at the next read.
[I42, I46, I47]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.outcomes import Materialized
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.mailbox import Copy, Install, StateSlots

Prefix = tuple[int, ...]
Place = tuple[int, str, int]  # window, tier, slot

DEVICE, HOST = "device", "host"
TIERS = {  # of a copy's source and target
    "offload": (DEVICE, HOST),
    "onboard": (HOST, DEVICE),
    "load_state": (DEVICE, DEVICE),
    "onboard_state": (HOST, DEVICE),
}


@dataclass
class Running:
    """An installed request: what LOOP knows of it."""

    ino: int
    prompt: Prefix
    endpoint: int
    tables: tuple[tuple[int, ...], ...]
    states: tuple[StateSlots, ...]
    position: int = 0
    given_back: set[int] = field(default_factory=set)  # snapshot points that WAVE has published


class SlotModel:
    """One rank's device and host slots, its copy stream and its waves."""

    def __init__(self, windows: Sequence[WindowSpec], block_tokens: int) -> None:
        self.windows = tuple(windows)
        self.block_tokens = block_tokens
        self.held: dict[Place, Prefix] = {}
        self.copies: deque[tuple[int, Copy]] = deque()
        self.live: dict[int, Running] = {}
        self.ino = 0

    # ── what LOOP does ───────────────────────────────────────────────────────────────────────

    def install(self, rid: int, ino: int, prompt: Prefix, made: Materialized | Install) -> None:
        """Take an admitted request; its copies run later.  [I45, I46]"""
        check(ino == self.ino + 1, "installs arrive in order, without gaps [I45]", ino=ino)
        self.ino = ino
        running = Running(ino, prompt, made.endpoint, made.tables, made.states, made.endpoint)
        named = {place for other in self.live.values() for place in self.places(other)}
        own = self.places(running, own_only=True)
        reused = set(self.places(running)) - set(own)
        check(len(own) == len(set(own)), "a slot is used twice", rid=rid, own=own)
        check(len(reused) + len(own) == len(self.places(running)), "reuses its own", rid=rid)
        check(named.isdisjoint(own), "a slot in use changes its holder [I46]", rid=rid)
        self.live[rid] = running
        self.copies.extend((ino, copy) for copy in made.copies)

    def copy_one(self) -> None:
        """Perform the next copy of the stream.  [I47]"""
        _, copy = self.copies.popleft()
        target = (copy.window, TIERS.get(copy.kind, (DEVICE, DEVICE))[1], copy.target)
        if copy.kind == "zero_state":
            self.held[target] = ()
            return
        source = (copy.window, TIERS[copy.kind][0], copy.source)
        check(source in self.held, "copies a slot that was never written", copy=copy)
        self.held[target] = self.held[source]

    def run(self, rid: int, stop: int) -> tuple[int, ...]:
        """Compute tokens up to `stop`; return the snapshot points stored.  [I42]

        A wave waits for the copies of every Install up to its own.  [algorithms 16.2]
        """
        running = self.live[rid]
        while self.copies and self.copies[0][0] <= running.ino:
            self.copy_one()
        start = running.position
        check(start < stop <= len(running.prompt), "waves go forward [I41]", rid=rid, stop=stop)
        self._check_readable(rid, running, start)
        for window, spec in enumerate(self.windows):
            if not spec.is_recurrent:
                self._write_blocks(running, window, start, stop)
        stored = self._write_states(running, stop)
        running.position = stop
        # A later query of the same chunk reads what an earlier token of it wrote.
        self._check_readable(rid, running, stop, reach_from=start)
        return stored

    def published(self, rid: int, points: Sequence[int]) -> None:
        """WAVE took the snapshot slots of these points: the request names them no more."""
        self.live[rid].given_back.update(points)

    def end(self, rid: int) -> None:
        """The transfer reads what was computed; then the slots go back."""
        running = self.live[rid]
        if running.position > running.endpoint:
            self._check_readable(rid, running, running.position)
        del self.live[rid]

    # ── places ───────────────────────────────────────────────────────────────────────────────

    def places(self, running: Running, *, own_only: bool = False) -> list[Place]:
        """Return the device slots that a request names; `own_only`: not the reused prefix."""
        first = running.endpoint // self.block_tokens
        found: list[Place] = []
        for window, table in enumerate(running.tables):
            # A sliding window uses its own slots in turn.
            slots = list(dict.fromkeys(table[first:]))
            if not own_only:
                slots += [slot for slot in table[:first] if slot >= 0]
            found += [(window, DEVICE, slot) for slot in slots]
        for state in running.states:
            kept = [slot for point, slot in state.snapshots if point not in running.given_back]
            found += [(state.window, DEVICE, slot) for slot in (state.working, *kept)]
        return found

    def _write_blocks(self, running: Running, window: int, start: int, stop: int) -> None:
        size, table = self.block_tokens, running.tables[window]
        for index in range(start // size, ceil_div(stop, size)):
            check(table[index] >= 0, "a computed block has a slot", window=window, index=index)
            end = min(stop, (index + 1) * size)
            self.held[window, DEVICE, table[index]] = running.prompt[:end]

    def _write_states(self, running: Running, stop: int) -> tuple[int, ...]:
        stored: list[int] = []
        for state in running.states:
            self.held[state.window, DEVICE, state.working] = running.prompt[:stop]
            for point, slot in state.snapshots:
                if point == stop:
                    self.held[state.window, DEVICE, slot] = running.prompt[:stop]
                    stored.append(point)
        return tuple(dict.fromkeys(stored))

    def _check_readable(
        self, rid: int, running: Running, position: int, reach_from: int | None = None
    ) -> None:
        """Compare every slot that the token at `position` reads with the prompt's own prefix."""
        size = self.block_tokens
        for window, spec in enumerate(self.windows):
            if spec.is_recurrent:
                continue
            first_token = 0
            if spec.span_tokens is not None:
                since = position if reach_from is None else reach_from
                first_token = max(0, since - (spec.span_tokens - 1))
            table = running.tables[window]
            for index in range(first_token // size, ceil_div(position, size)):
                expected = running.prompt[: min(position, (index + 1) * size)]
                found = self.held.get((window, DEVICE, table[index]))
                is_right = found is not None and found[: len(expected)] == expected
                check(is_right, "reads a wrong block [I42]", rid=rid, window=window, index=index)
        for state in running.states:
            found = self.held.get((state.window, DEVICE, state.working))
            check(
                found == running.prompt[:position],
                "reads a wrong state [I42]",
                rid=rid,
                window=state.window,
            )
