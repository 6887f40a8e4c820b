"""What a rank's cache should hold and promise, kept as sets of prefixes and counts.

    at         published prefix -> (tier, slot), moved by the copies that are answered
    held       slots that leases and sequences name
    available  slots - held - promised, per window

An endpoint is usable in a window if the prefixes it needs are published: all of them (dense), the
last few (sliding), the one that ends there (recurrent).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import align_down, ceil_div, endpoint_max
from wavepp_worker.cache.floors import floor_blocks, floor_states
from wavepp_worker.cache.index import Change
from wavepp_worker.cache.outcomes import Materialized
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.machines_slots import DEVICE, HOST, Prefix


@dataclass
class ModelRequest:
    """One request; endpoints and positions in tokens."""

    prompt: Prefix
    points: tuple[int, ...] = ()
    attempt: int = 0
    lease: int | None = None
    promised: list[int] | None = None  # slots per window
    is_committed: bool = False
    has_failed_here: bool = False
    made: Materialized | None = None
    written: int = 0  # by LOOP
    published: int = 0
    stored: list[int] = field(default_factory=list)  # points that LOOP has yet to report
    kept: dict[int, set[int]] = field(default_factory=dict)  # window -> points with a slot

    @property
    def phase(self) -> str:
        """What may come next."""
        if self.made is not None:
            return "published" if self.published == len(self.prompt) else "sequence"
        if self.lease is None:
            return "known"
        if self.promised is None:
            return "leased"
        return "committed" if self.is_committed else "prepared"

    def forget_attempt(self) -> None:
        """Lease and escrow are gone."""
        self.lease = self.promised = None
        self.is_committed = self.has_failed_here = False


@dataclass
class ModelWindow:
    """One window; `at` is the tree and the placement in one."""

    number: int
    spec: WindowSpec
    floor: int
    at: dict[Prefix, tuple[str, int]] = field(default_factory=dict)

    def slots(self, prefixes: Sequence[Prefix], tier: str) -> set[int]:
        """Return where those of `prefixes` are that are in `tier`."""
        places = (self.at[prefix] for prefix in prefixes)
        return {slot for where, slot in places if where == tier}


class CacheModel:
    """A rank's books, an order of magnitude simpler than the code.

    Args:
        specs, block_tokens, floor_fraction, floor_headroom_blocks: as for `RankCache`.
    """

    def __init__(
        self,
        specs: Sequence[WindowSpec],
        block_tokens: int,
        floor_fraction: float,
        floor_headroom_blocks: int,
    ) -> None:
        self.block = block_tokens
        self.windows = [
            ModelWindow(
                number,
                spec,
                floor_states(spec.slots)
                if spec.is_recurrent
                else floor_blocks(spec.slots, floor_fraction, floor_headroom_blocks),
            )
            for number, spec in enumerate(specs)
        ]
        self.requests: dict[int, ModelRequest] = {}

    # ── endpoints ────────────────────────────────────────────────────────────────────────────

    def needed(self, window: ModelWindow, prompt: Prefix, endpoint: int) -> list[Prefix]:
        """Return the prefixes that resuming at `endpoint` reads, root first.  [I8]"""
        if window.spec.is_recurrent:
            return [prompt[:endpoint]] if endpoint else []
        first = 0
        if window.spec.is_sliding:
            first = endpoint // self.block - window.spec.needed_blocks(self.block)
        ends = range(max(first, 0) * self.block + self.block, endpoint + 1, self.block)
        return [prompt[:end] for end in ends]

    def is_usable(self, prompt: Prefix, endpoint: int) -> bool:
        """Return whether every window holds what `endpoint` needs."""
        return all(
            prefix in window.at
            for window in self.windows
            for prefix in self.needed(window, prompt, endpoint)
        )

    def walk(self, prompt: Prefix, cap: int) -> int:
        """Return the deepest usable endpoint up to `cap`; 0 always is.  [I5]"""
        deepest = align_down(min(cap, endpoint_max(len(prompt), self.block)), self.block)
        ends = range(deepest, -1, -self.block)
        return next(end for end in ends if self.is_usable(prompt, end))

    # ── counts ───────────────────────────────────────────────────────────────────────────────

    def leased(self, window: ModelWindow, request: ModelRequest) -> list[Prefix]:
        """Return the prefixes that a request's lease pins."""
        return self.needed(window, request.prompt, request.lease or 0)

    def held(self, window: ModelWindow, tier: str = DEVICE) -> set[int]:
        """Return the slots of a tier that leases and sequences name."""
        found: set[int] = set()
        for request in self.requests.values():
            found |= window.slots(self.leased(window, request), tier)
            if request.made is not None and tier == DEVICE:
                found |= self.owned(window, request)
        return found

    def owned(self, window: ModelWindow, request: ModelRequest) -> set[int]:
        """Return the device slots that an admitted request names."""
        if request.made is None:
            return set()
        found = {slot for slot in request.made.tables[window.number] if slot >= 0}
        for state in request.made.states:
            if state.window == window.number:
                kept = request.kept[window.number]
                found |= {state.working, *(slot for p, slot in state.snapshots if p in kept)}
        return found

    def promised(self, window: ModelWindow) -> int:
        """Return the slots that all escrows reserve."""
        escrows = (request.promised for request in self.requests.values())
        return sum(counts[window.number] for counts in escrows if counts is not None)

    def available(self) -> list[int]:
        """Return, per window, the device slots that belong to nobody.  [I16]"""
        return [
            window.spec.slots - len(self.held(window)) - self.promised(window)
            for window in self.windows
        ]

    def demand(self, window: ModelWindow, request: ModelRequest) -> int:
        """Return the slots that a request cannot do without, at its lease's endpoint.  [E8]"""
        if window.spec.is_recurrent:
            return 1
        prompt, endpoint = request.prompt, request.lease or 0
        suffix = ceil_div(len(prompt), self.block) - endpoint // self.block
        if window.spec.is_sliding:
            suffix = min(suffix, window.spec.ring_blocks(self.block))
        # A host-resident block needs a slot to be brought back to.  [A13]
        leased = self.leased(window, request)
        return suffix + len(window.slots(leased, HOST))

    def wishes(self, window: ModelWindow, request: ModelRequest) -> tuple[int, ...]:
        """Return the snapshot points that a run from the lease's endpoint passes.  [A47]"""
        if not window.spec.is_recurrent:
            return ()
        return tuple(point for point in request.points if point > (request.lease or 0))

    def has_room(self, request: ModelRequest, *, no_floor: bool) -> bool:
        """Return whether the hard demand leaves every floor intact.  [I24]

        What is promised to the request already counts as room.
        """
        held = request.promised or [0] * len(self.windows)
        return all(
            have + own - self.demand(window, request) >= (0 if no_floor else window.floor)
            for have, own, window in zip(self.available(), held, self.windows, strict=True)
        )

    # ── what the cache says that it did ──────────────────────────────────────────────────────────

    def move(self, made: Materialized) -> None:
        """Follow the copies that move cached content between tiers."""
        for copy in made.copies:
            at = self.windows[copy.window].at
            if copy.kind not in ("offload", "onboard"):
                continue
            source, target = (DEVICE, HOST) if copy.kind == "offload" else (HOST, DEVICE)
            moved = [prefix for prefix, place in at.items() if place == (source, copy.source)]
            check(len(moved) == 1, "moves what is cached", copy=copy, moved=moved)
            at[moved[0]] = (target, copy.target)

    def follow(
        self,
        changes: Sequence[Change],
        prefix_of: Mapping[bytes, Prefix],
        publisher: ModelRequest | None,
    ) -> None:
        """Replay the change log: of a dense window, prefix-closed at every instant.  [I2]"""
        for is_stored, number, key in changes:
            window, prefix = self.windows[number], prefix_of[key]
            if not is_stored:
                deeper = any(p[: len(prefix)] == prefix and p != prefix for p in window.at)
                check(not (window.spec.is_dense and deeper), "children go first [I2]")
                del window.at[prefix]
                continue
            check(prefix not in window.at, "stored twice [I1]", window=number)
            parent = prefix[: -self.block]
            has_parent = not parent or parent in window.at or not window.spec.is_dense
            check(has_parent, "parents come first [I2]", window=number)
            slot = self._slot_of(publisher, window, prefix)
            if slot is None:
                check(False, "publishes what nobody computed [I43]", prefix=prefix)
                return
            window.at[prefix] = (DEVICE, slot)

    def _slot_of(
        self, publisher: ModelRequest | None, window: ModelWindow, prefix: Prefix
    ) -> int | None:
        """Return the publisher's own slot of a prefix; None: it cannot have computed it."""
        if publisher is None or publisher.made is None:
            return None
        is_own = len(prefix) > publisher.made.endpoint and len(prefix) <= publisher.published
        if publisher.prompt[: len(prefix)] != prefix or not is_own:
            return None
        if window.spec.is_recurrent:
            states = [s for s in publisher.made.states if s.window == window.number]
            return dict(states[0].snapshots).get(len(prefix)) if states else None
        return publisher.made.tables[window.number][len(prefix) // self.block - 1]
