"""Keys, windows and the hint search."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from tests.unit.cache.world import SCOPE, keys_of, learn, make_cache, serve
from wavepp_worker.base.errors import ConfigError, InvariantError
from wavepp_worker.cache.hashing import router_hash, scope_key, sequence_keys, split_keys
from wavepp_worker.cache.probe import dense_prefix
from wavepp_worker.cache.window import WindowSpec


def test_keys_are_the_chained_digests_of_full_blocks() -> None:
    tokens = b"".join(value.to_bytes(4, "little") for value in (7, 8, 9, 10, 11))
    first = sha256(SCOPE + tokens[:8]).digest()
    second = sha256(first + tokens[8:16]).digest()
    assert sequence_keys(tokens, 2, SCOPE) == first + second  # the fifth token gets no key


def test_keys_agree_up_to_the_first_difference_and_never_after() -> None:
    left, right = split_keys(keys_of("abXdef")), split_keys(keys_of("abYdef"))
    assert left[:2] == right[:2]
    assert set(left[2:]).isdisjoint(right[2:])


def test_scopes_do_not_share_blocks() -> None:
    scopes = [
        scope_key("m"),
        scope_key("n"),
        scope_key("m", lora="x"),
        scope_key("m", salt="x"),
        scope_key("mx"),
        scope_key("", lora="m"),
        scope_key("m", lora="xy"),
        scope_key("m", lora="x", salt="y"),
    ]
    assert len(set(scopes)) == len(scopes)
    tokens = bytes(16)
    assert len({sequence_keys(tokens, 4, scope) for scope in scopes}) == len(scopes)


def test_short_prompt_has_no_key() -> None:
    assert sequence_keys(bytes(12), 4, SCOPE) == b""
    assert split_keys(b"") == []


def test_broken_sizes_are_refused() -> None:
    with pytest.raises(InvariantError):
        sequence_keys(bytes(6), 1, SCOPE)
    with pytest.raises(InvariantError):
        sequence_keys(bytes(8), 1, b"short")
    with pytest.raises(InvariantError):
        split_keys(bytes(33))


def test_router_hash_is_the_first_eight_bytes_little_endian() -> None:
    assert router_hash(bytes([1, 2] + [0] * 6 + [9] * 24)) == 0x0201
    assert router_hash(bytes([255] * 32)) == 2**64 - 1


@pytest.mark.parametrize(
    "fields",
    [
        {"slots": 0},
        {"slots": 4, "host_slots": -1},
        {"slots": 4, "span_tokens": 4096},
        {"slots": 4, "span_tokens": 0, "chunk_tokens": 8},
        {"slots": 4, "span_tokens": 8, "chunk_tokens": 8, "kind": "recurrent"},
    ],
)
def test_broken_windows_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WindowSpec(**fields)


def test_dense_prefix_is_exact_within_its_probe_bound() -> None:
    """[I4], for every depth and limit up to 70."""
    keys = split_keys(keys_of("x" * 70))
    for limit in range(71):
        probes_max = 2 * limit.bit_length()  # 2 * ceil(log2(limit + 1))
        for depth in range(71):
            found, probes = dense_prefix(set(keys[:depth]), keys, limit)
            assert found == min(depth, limit)
            assert probes <= probes_max


@pytest.mark.parametrize(("depth", "probes"), [(3124, 13), (512, 20)])
def test_dense_prefix_of_the_surge_example(depth: int, probes: int) -> None:
    """Worked example X3: 13 lookups on the rich rank, 20 on the poor one."""
    keys = split_keys(keys_of("x" * 3124))
    assert dense_prefix(set(keys[:depth]), keys, 3124) == (depth, probes)


def test_hint_is_aligned_capped_and_leaves_the_last_token() -> None:
    cache = make_cache(16, block_tokens=2)
    cache.learn(1, 8, keys_of("abcdefgh", 2))
    cache.acquire(1, 1, 0)
    cache.prepare(1)
    cache.commit(1, 0)
    cache.materialize(1, 1)
    cache.publish(1, 8)
    learn(cache, 2, "abcdefgh", 2)
    learn(cache, 3, "abcdefghi", 2)
    learn(cache, 4, "abcdXf", 2)
    learn(cache, 5, "a", 2)
    assert cache.hint(2) == 6  # block 3 is cached, but the last token is always computed
    assert cache.hint(3) == 8
    assert cache.hint(3, cap=5) == 4
    assert cache.hint(3, cap=0) == 0
    assert cache.hint(4) == 4
    assert cache.hint(5) == 0


def test_hint_is_the_least_of_all_windows() -> None:
    cache = make_cache(8, 8)
    serve(cache, 1, "abcde")
    learn(cache, 2, "abcdef")
    cache.evict(1, 2)
    assert cache.hint(2) == 3
    assert cache.acquire(2, 1, 1000) == 3


def test_hint_takes_nothing() -> None:
    cache = make_cache(8)
    serve(cache, 1, "abcde")
    learn(cache, 2, "abcdef")
    before = (cache.view(), cache.index_version, cache.capacity_generation)
    cache.hint(2)
    assert (cache.view(), cache.index_version, cache.capacity_generation) == before
