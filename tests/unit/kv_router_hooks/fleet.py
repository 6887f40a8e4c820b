"""Ranks' real caches behind one view, and a router that refuses what a real one would refuse.

One letter of a prompt is one token; requests run one after the other, from announce to freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from kv_router_hooks.router_view import BlockStored, RouterEvent, RouterView
from kv_router_hooks.window_rule import DENSE, WindowRule
from wavepp_worker.cache.hashing import scope_key, sequence_keys, split_keys
from wavepp_worker.cache.rank_cache import Committed, Prepared, RankCache
from wavepp_worker.cache.window import WindowSpec

BLOCK = 2


def packed(text: str) -> bytes:
    return b"".join(ord(letter).to_bytes(4, "little") for letter in text)


def keys_of(text: str, salt: str = "") -> list[bytes]:
    return list(split_keys(sequence_keys(packed(text), BLOCK, scope_key("model", salt=salt))))


def rule_of(spec: WindowSpec) -> WindowRule:
    if spec.is_dense:
        return DENSE
    return WindowRule(1 if spec.is_recurrent else spec.needed_blocks(BLOCK))


class Router:
    """An index fed with the event stream; it checks that every chain spells its tokens."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.events: list[RouterEvent] = []

    def follow(self, events: Sequence[RouterEvent]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, BlockStored):
                assert event.key not in self.parents, "stored twice"
                assert event.parent is None or event.parent in self.parents, "parent unknown"
                above = event.parent or scope_key("model", salt=event.salt)
                assert event.key == sha256(above + event.tokens).digest(), "chain broken"
                self.parents[event.key] = event.parent
            else:
                assert event.key not in self.parents.values(), "a child is left behind"
                del self.parents[event.key]

    def depth(self, text: str, salt: str = "") -> int:
        """Return the tokens that a router expects to be reused."""
        blocks = 0
        for key in keys_of(text, salt):
            if key not in self.parents:
                break
            blocks += 1
        return blocks * BLOCK

    def leaves(self) -> list[tuple[str, str]]:
        """Return (prompt, salt) of every stored block that no stored block follows."""
        texts: dict[bytes, tuple[str, str]] = {}
        for event in self.events:
            if isinstance(event, BlockStored):
                before = texts[event.parent][0] if event.parent else ""
                letters = "".join(map(chr, memoryview(event.tokens).cast("I")))
                texts[event.key] = (before + letters, event.salt)
        inner = set(self.parents.values())
        return [texts[key] for key in self.parents if key not in inner]


class Fleet:
    """One life of a worker's ranks."""

    def __init__(self, *ranks: Sequence[WindowSpec], router: Router | None = None) -> None:
        self.caches = [RankCache(specs, BLOCK, 0.0, 0, check_always=True) for specs in ranks]
        self.view = RouterView([[rule_of(spec) for spec in specs] for specs in ranks], BLOCK)
        self.router = router or Router()
        self.sequences = [0] * len(ranks)
        self.last_rid = 0
        self.points: dict[int, list[set[int]]] = {}  # rid → per rank, points that have a slot

    def open(
        self, text: str, salt: str = "", points: Sequence[int] = (), limit: int = 1 << 20
    ) -> int:
        """Announce and admit a request on all ranks; return its rid.

        Args:
            points: snapshot points.
            limit: cap of the endpoint.
        """
        rid = self._learn(text, salt, points)
        endpoint = self._lease(rid, limit)
        for cache in self.caches:
            assert cache.prepare(rid) == Prepared(endpoint)
            assert cache.commit(rid, endpoint) == Committed(endpoint)
        installs = [cache.materialize(rid, rid) for cache in self.caches]
        self.points[rid] = [
            {point for states in install.states for point, _ in states.snapshots}
            for install in installs
        ]
        return rid

    def publish(self, rid: int, end: int) -> None:
        """A wave that ends at `end` passed its fence on all ranks."""
        for cache, points in zip(self.caches, self.points[rid], strict=True):
            cache.publish(rid, end, [end] if end in points else [])
        self.deliver()

    def free(self, rid: int) -> None:
        del self.points[rid]
        for cache in self.caches:
            cache.free(rid)
            cache.forget(rid)
        self.deliver()
        self.view.close(rid)

    def serve(self, text: str, salt: str = "", points: Sequence[int] = ()) -> None:
        """Run a request from start to end, in one chunk per snapshot point."""
        rid = self.open(text, salt, points)
        for point in points:
            self.publish(rid, point)
        self.publish(rid, len(text))
        self.free(rid)

    def reuse(self, text: str, salt: str = "") -> int:
        """Return the tokens that a request would reuse now; changes nothing."""
        rid = self._learn(text, salt, ())
        endpoint = self._lease(rid, 1 << 20)
        for cache in self.caches:
            cache.release(rid)
            cache.forget(rid)
        self.view.close(rid)
        return endpoint

    def evict(self, rank: int, window: int, count: int) -> None:
        self.caches[rank].evict(window, count)
        self.deliver()

    def deltas(self) -> list[tuple[int, int, tuple[tuple[bool, int, bytes], ...]]]:
        """Return (rank, sequence, changes) of every rank that has news."""
        found = []
        for rank, cache in enumerate(self.caches):
            if changes := cache.drain_changes():
                self.sequences[rank] += 1
                found.append((rank, self.sequences[rank], changes))
        return found

    def deliver(self) -> None:
        for rank, sequence, changes in self.deltas():
            self.router.follow(self.view.apply(rank, sequence, changes))

    def _learn(self, text: str, salt: str, points: Sequence[int]) -> int:
        self.last_rid += 1
        keys = keys_of(text, salt)
        self.router.follow(self.view.open(self.last_rid, keys, packed(text), salt))
        for cache in self.caches:
            cache.learn(self.last_rid, len(text), b"".join(keys), points)
        return self.last_rid

    def _lease(self, rid: int, cap: int) -> int:
        """Lease on all ranks and trim to the endpoint that all have."""
        endpoints = [cache.acquire(rid, 1, cap) for cache in self.caches]
        while len(set(endpoints)) > 1:
            lowest = min(endpoints)
            endpoints = [cache.trim(rid, lowest) for cache in self.caches]
        return endpoints[0]
