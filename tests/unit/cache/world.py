"""Short prompts for cache tests: one letter is one token."""

from __future__ import annotations

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
    *slots: int, block_tokens: int = 1, floor_fraction: float = 0.0, floor_blocks: int = 1000
) -> RankCache:
    windows = [WindowSpec(slots=count) for count in slots]
    return RankCache(windows, block_tokens, floor_fraction, floor_blocks, check_always=True)


def learn(cache: RankCache, rid: int, text: str, block_tokens: int = 1) -> None:
    cache.learn(rid, len(text), keys_of(text, block_tokens))


def lease(cache: RankCache, rid: int, text: str, cap: int = 1000) -> int:
    learn(cache, rid, text)
    return cache.acquire(rid, 1, cap)


def commit(cache: RankCache, rid: int, text: str, cap: int = 1000) -> int:
    """Take a new request up to COMMITTED; return its endpoint."""
    endpoint = lease(cache, rid, text, cap)
    assert cache.prepare(rid) == Prepared(endpoint)
    assert cache.commit(rid, endpoint) == Committed(endpoint)
    return endpoint


def install(cache: RankCache, rid: int, text: str, cap: int = 1000) -> Materialized:
    """Take a new request up to a sequence; `rid` serves as its install number."""
    commit(cache, rid, text, cap)
    return cache.materialize(rid, rid)


def serve(cache: RankCache, rid: int, text: str, cap: int = 1000) -> None:
    """Run a request from start to end: its full blocks stay cached, the rest is free."""
    install(cache, rid, text, cap)
    cache.publish(rid, len(text))
    cache.free(rid)
    cache.forget(rid)


def cached(cache: RankCache, window: int = 0) -> set[bytes]:
    return set(cache.view().keys[window])


def books(cache: RankCache) -> tuple[object, ...]:
    """Everything a section may change in the books, for before/after comparisons."""
    pools = tuple(
        (
            tuple((b.refs, b.owner, b.key, b.age, b.is_evictable) for b in pool._blocks),
            tuple(block.slot for block in pool._free),
        )
        for pool in cache._pools
    )
    escrows = tuple(
        (rid, escrow.endpoint, escrow.is_committed, tuple(map(tuple, escrow.reserved)))
        for rid, escrow in cache._escrows.items()
    )
    leases = tuple((rid, held.endpoint) for rid, held in cache._leases.items())
    return (pools, escrows, leases, cache.view(), cache.index_version)
