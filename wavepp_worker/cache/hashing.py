"""Chained block keys: a key names one full block and everything before it.  [algorithms E5]

    H_-1 = hash(scope),   H_i = hash(H_{i-1} || tokens of block i as little-endian u32)

Computed once per prompt in the serving process; the ranks only compare full digests, so two
different prefixes never meet in a tree.  No tokens are compared on a hit: the 256 bits of SHA-256
are the only defence, and nobody is known to find two inputs with one digest.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import chain
from struct import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import KEY_BYTES, SequenceHash

TOKEN_BYTES = 4
ONE_KEY, MANY_KEYS = Struct(f"{KEY_BYTES}s"), Struct(f"{KEY_BYTES}s" * 64)


def scope_key(fingerprint: str, lora: str = "", salt: str = "") -> bytes:
    """Return H_-1: blocks are shared only within one scope.

    Args:
        fingerprint: names the weights and the cache format.
        lora: adapter name; empty for the base model.
        salt: tenant salt; empty for the shared cache.
    """
    digest = sha256(b"wavepp block keys 1")
    for part in (fingerprint, lora, salt):
        text = part.encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.digest()


def sequence_keys(tokens: bytes, block_tokens: int, scope: bytes) -> bytes:
    """Return the keys of all full blocks, KEY_BYTES each, concatenated.

    Args:
        tokens: u32 little-endian; a trailing partial block gets no key.
        block_tokens: B.
        scope: result of `scope_key`.

    Cost: one SHA-256 over the prompt; 1.4 ms measured for 200,000 tokens at B = 64.
    """
    check(len(tokens) % TOKEN_BYTES == 0, "tokens are whole u32 numbers", size_bytes=len(tokens))
    check(block_tokens > 0, "a block holds tokens", block_tokens=block_tokens)
    check(len(scope) == KEY_BYTES, "scope is a digest", size_bytes=len(scope))
    stride = block_tokens * TOKEN_BYTES
    keys, previous = [], scope
    for start in range(0, len(tokens) - stride + 1, stride):
        previous = sha256(previous + tokens[start : start + stride]).digest()
        keys.append(previous)
    return b"".join(keys)


def split_keys(keys: bytes) -> list[SequenceHash]:
    """Return the single keys of a concatenation, block 0 first.

    Cost: 0.06 ms measured for 3,125 keys; slicing them one by one takes six times as long.
    """
    check(len(keys) % KEY_BYTES == 0, "keys are whole digests", size_bytes=len(keys))
    whole = len(keys) - len(keys) % MANY_KEYS.size
    view = memoryview(keys)
    return [
        *chain.from_iterable(MANY_KEYS.iter_unpack(view[:whole])),
        *chain.from_iterable(ONE_KEY.iter_unpack(view[whole:])),
    ]


def router_hash(key: bytes) -> int:
    """Return the u64 by which Dynamo's router knows a block: the key's first 8 bytes."""
    return int.from_bytes(key[:8], "little")
