"""Short prompts for cache tests: one letter is one token."""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import Committed, Materialized, Prepared, RankCache
from wavepp_worker.cache.window import WindowSpec

SCOPE = scope_key("test model")


def keys_of(text: str, block_tokens: int = 1) -> bytes:
    tokens = b"".join(ord(letter).to_bytes(4, "little") for letter in text)
    return sequence_keys(tokens, block_tokens, SCOPE)


def key_at(text: str, block_tokens: int = 1) -> bytes:
    """Key of the last full block of `text`."""
    return keys_of(text, block_tokens)[-32:]


def make_cache(
    *windows: int | WindowSpec,
    block_tokens: int = 1,
    floor_fraction: float = 0.0,
    floor_blocks: int = 1000,
) -> RankCache:
    """A cache of the given windows; a number makes a dense window of that many slots."""
    specs = [spec if isinstance(spec, WindowSpec) else WindowSpec(slots=spec) for spec in windows]
    return RankCache(specs, block_tokens, floor_fraction, floor_blocks, check_always=True)


def dense(slots: int, host_slots: int = 0) -> WindowSpec:
    return WindowSpec(slots=slots, host_slots=host_slots)


def recurrent(slots: int, host_slots: int = 0) -> WindowSpec:
    return WindowSpec(kind="recurrent", slots=slots, host_slots=host_slots)


def sliding(slots: int, span: int, chunk: int, host_slots: int = 0) -> WindowSpec:
    return WindowSpec(span_tokens=span, slots=slots, chunk_tokens=chunk, host_slots=host_slots)


def learn(
    cache: RankCache, rid: int, text: str, block_tokens: int = 1, points: Sequence[int] = ()
) -> None:
    cache.learn(rid, len(text), keys_of(text, block_tokens), points)


def lease(
    cache: RankCache, rid: int, text: str, cap: int = 1000, points: Sequence[int] = ()
) -> int:
    learn(cache, rid, text, points=points)
    return cache.acquire(rid, 1, cap)


def commit(
    cache: RankCache, rid: int, text: str, cap: int = 1000, points: Sequence[int] = ()
) -> int:
    """Take a new request up to COMMITTED; return its endpoint."""
    endpoint = lease(cache, rid, text, cap, points)
    assert cache.prepare(rid) == Prepared(endpoint)
    assert cache.commit(rid, endpoint) == Committed(endpoint)
    return endpoint


def install(
    cache: RankCache, rid: int, text: str, cap: int = 1000, points: Sequence[int] = ()
) -> Materialized:
    """Take a new request up to a sequence; `rid` serves as its install number."""
    commit(cache, rid, text, cap, points)
    return cache.materialize(rid, rid)


def serve(
    cache: RankCache, rid: int, text: str, cap: int = 1000, points: Sequence[int] = ()
) -> Materialized:
    """Run a request from start to end: its full blocks stay cached, the rest is free."""
    made = install(cache, rid, text, cap, points)
    cache.publish(rid, len(text), stored_points(made))
    cache.free(rid)
    cache.forget(rid)
    return made


def stored_points(made: Materialized) -> list[int]:
    """The snapshot points for which some window has a slot."""
    return sorted({point for state in made.states for point, _ in state.snapshots})


def copies_of(made: Materialized) -> list[tuple[str, int, int, int]]:
    return [(copy.kind, copy.window, copy.source, copy.target) for copy in made.copies]


def cached(cache: RankCache, window: int = 0) -> set[bytes]:
    return set(cache.view().keys[window])


def books(cache: RankCache) -> tuple[object, ...]:
    """Everything a section may change in the books, for before/after comparisons."""
    pools = tuple(
        (
            tuple(
                (b.slot, b.is_host, b.refs, b.owner, b.key, b.age, b.is_evictable)
                for b in pool._blocks
            ),
            tuple(block.number for block in (*pool.device.free, *pool.host.free)),
            pool.counted,
        )
        for pool in cache._pools
    )
    escrows = tuple(
        (
            rid,
            escrow.endpoint,
            escrow.is_committed,
            tuple((p.count, tuple(b.number for b in p.owned())) for p in escrow.promises),
        )
        for rid, escrow in cache._escrows.items()
    )
    leases = tuple((rid, held.endpoint) for rid, held in cache._leases.items())
    return (pools, escrows, leases, cache.view(), cache.index_version)
