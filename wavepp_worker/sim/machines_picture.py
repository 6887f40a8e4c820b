"""A world's state as plain values, without what no future step can see.

Two worlds with equal pictures behave alike from then on, so an exhaustive search may treat them as
one.  Left out or made relative are: counters, the absolute clock and round number, how long ago
something was, the absolute capacity generation and index version, and the ages of blocks, of which
only the order counts.  Anything else that differs keeps two states apart: a number that grows for
ever and is forgotten here makes a search endless, never incomplete.
"""

from __future__ import annotations

import marshal
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from wavepp_worker.admission.decide import FAILED
from wavepp_worker.admission.leader import Leader
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.sim.machines_world import SmallWorld
from wavepp_worker.wire.rounds import RecordVote, RoundVote

# Counters and pictures of the past, which no decision reads.
PAST = {"_counters", "counts", "_stale_count", "evicted_total", "now", "announced", "delivered"}
PAST |= {"announced_at", "admitted_at", "leased_at", "_age", "_changes", "dropped_total"}
PAST |= {"offloaded_total", "onboarded_total", "round_counts"}
# The same in every state of one search, or nothing that is kept between steps.
FIXED = {"settings", "_settings", "spec", "prompts", "windows", "keys", "tokens", "sampling"}
FIXED |= {"epoch", "_check_always", "_emit", "_out", "_flow"}
# Follows from the blocks, which are all there.
DERIVED = {"_ready", "_ready_max", "evictable_children", "is_evictable", "children"}
SKIPPED = frozenset(PAST | FIXED | DERIVED)
INSTANTS = frozenset(["retry_at", "_last_start", "_refreshed_at", "round_started_at"])
INSTANT_STEPS = 2.0  # beyond so many rounds, an instant is just past


def digest(world: SmallWorld) -> bytes:
    """Return 16 bytes that two worlds share exactly if their pictures are equal."""
    return blake2b(marshal.dumps(picture(world), 2), digest_size=16).digest()


def picture(world: SmallWorld) -> Any:
    """Return the world as nested lists of numbers, strings and bytes."""
    caches = [inline.cache for inline in world.ranks]
    return _Painter(caches, world.now, world.ranks[0].machine._replica.round).paint(world)


def books(cache: RankCache) -> Any:
    """Return everything that a cache promises and holds: a failed section leaves it as it was."""
    painter = _Painter([cache], 0.0, 0, is_world=False)
    return painter.paint_books(cache)


PLAIN = (type(None), int, str, bytes, bool, float)
RELATIVE = INSTANTS | {"round", "capacity_generation", "generation", "failures", "version"}
RELATIVE |= {"_probed_version", "age", "_votes", "has_failed"}
_fields: dict[type, tuple[tuple[str, bool], ...]] = {}


def _fields_of(value: object) -> tuple[tuple[str, bool], ...]:
    """Return (attribute, whether it is relative) in a fixed order, for those that count."""
    kind = type(value)
    found = _fields.get(kind)
    if found is None:
        names: list[str] = []
        for base in reversed(kind.__mro__):
            slots = getattr(base, "__slots__", ())
            names += [slots] if isinstance(slots, str) else list(slots)
        if isinstance(value, Struct):
            names = list(value.__struct_fields__)
        names += getattr(value, "__dict__", {})
        found = tuple((name, name in RELATIVE) for name in names if name not in SKIPPED)
        _fields[kind] = found
    return found


class _Painter:
    """One pass over one world."""

    def __init__(
        self, caches: Sequence[RankCache], now: float, round_index: int, *, is_world: bool = True
    ) -> None:
        self._is_world = is_world
        self._now = now
        self._round = round_index
        self._generations = [cache.capacity_generation for cache in caches]
        self._versions = [cache.index_version for cache in caches]
        self._rank = 0
        self._seen: dict[int, int] = {}
        self._ages: list[list[int]] = []
        self._painters: dict[type, Callable[[Any], Any]] = {
            **dict.fromkeys(PLAIN, lambda value: value),
            **dict.fromkeys((dict, Counter, defaultdict), self._paint_mapping),
            **dict.fromkeys((list, tuple, deque), self._paint_all),
            **dict.fromkeys((set, frozenset), self._paint_set),
            InlineRank: self._paint_rank,
        }

    def paint(self, value: Any) -> Any:
        """Return the picture of any value."""
        return self._painters.get(type(value), self._paint_other)(value)

    def _paint_mapping(self, value: Mapping[Any, Any]) -> Any:
        return [(self.paint(key), self.paint(item)) for key, item in value.items()]

    def _paint_all(self, value: Iterable[Any]) -> Any:
        painters, other = self._painters, self._paint_other
        return [painters.get(type(item), other)(item) for item in value]

    def _paint_set(self, value: Iterable[Any]) -> Any:
        return sorted(self._paint_all(value), key=repr)

    def _paint_rank(self, inline: InlineRank) -> Any:
        self._rank = inline.machine.settings.rank
        return [self.paint_books(inline.cache), self._paint_object(inline.machine)]

    def paint_books(self, cache: RankCache) -> Any:
        self._ages = []
        painted = self._paint_object(cache)
        order = {age: turn for turn, age in enumerate(sorted({cell[0] for cell in self._ages}))}
        for cell in self._ages:
            cell[0] = order[cell[0]]
        return painted

    def _paint_other(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return str(value.value)
        if isinstance(value, tuple):
            return self._paint_all(value)
        return None if callable(value) else self._paint_object(value)

    def _paint_object(self, value: Any) -> Any:
        kind = type(value)
        if not isinstance(value, Struct):  # a message has no identity
            count = len(self._seen)
            number = self._seen.setdefault(id(value), count)
            if number < count:
                return number
        painters, other = self._painters, self._paint_other
        rank, self._rank = self._rank, value.rank if kind is RoundVote else self._rank
        painted: list[Any] = [kind.__name__]
        for name, is_relative in _fields_of(value):
            field = getattr(value, name)
            if is_relative:
                painted.append(self._paint_relative(value, name, field))
            else:
                painted.append(painters.get(type(field), other)(field))
        self._rank = rank
        return painted

    def _paint_relative(self, owner: Any, name: str, value: Any) -> Any:  # noqa: PLR0911
        match name:
            case "round":
                return value - self._round
            case "capacity_generation":
                return value - self._generations[self._rank]
            case "generation" if isinstance(owner, RecordVote):
                return value - self._generations[self._rank] if owner.status in FAILED else 0
            case "failures":
                return [(rank, number - self._generations[rank]) for rank, number in value]
            case "has_failed":  # of an escrow: a note about the past, not a holding
                return self._is_world and value
            case "version":
                return 0
            case "_votes" if isinstance(owner, Leader):  # kept for what they say of capacity
                generations = zip(value, self._generations, strict=False)
                return [(v.available_tokens, v.capacity_generation - now) for v, now in generations]
            case "_probed_version":
                return value == self._versions[self._rank]
            case "age" if isinstance(owner, Block):
                cell = [value if owner.parent is not None else -1]
                self._ages.append(cell)
                return cell
            case _ if name in INSTANTS:
                if value is None:
                    return None
                return min(max(value - self._now, -INSTANT_STEPS), INSTANT_STEPS)
            case _:
                return self.paint(value)
