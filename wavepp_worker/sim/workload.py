"""Requests of a simulated world: families of prompts that share prefixes, or a recorded trace."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.sim.digest import TOKEN_BYTES

SCOPE = scope_key("sim")
RECORDED_BLOCK_TOKENS = 512  # of the recorded format


class SimPrompt(Struct, frozen=True):
    """One prompt and when its client sends it."""

    tokens: bytes  # u32 little-endian
    keys: bytes
    at_s: float

    @property
    def prompt_tokens(self) -> int:
        """Length in tokens."""
        return len(self.tokens) // TOKEN_BYTES


def family_prompts(
    rng: random.Random,
    count: int,
    *,
    families: int,
    spread_s: float,
    block_tokens: int,
    longest_tokens: int,
) -> list[SimPrompt]:
    """Return prompts that are cut from a few long texts at any length, some with own endings."""
    longest = longest_tokens
    texts = [[rng.randrange(1 << 16) for _ in range(longest)] for _ in range(families)]
    prompts = []
    for _ in range(count):
        text = rng.choice(texts)
        kind = rng.random()
        if kind < 0.3:  # at, before or after a block boundary
            length = block_tokens * rng.randint(1, longest // block_tokens) + rng.choice([-1, 0, 1])
        else:
            length = rng.randint(1, longest)
        tokens = text[: min(length, longest)]
        if kind > 0.6:
            cut = rng.randrange(len(tokens))
            tokens = tokens[:cut] + [rng.randrange(1 << 16) for _ in range(len(tokens) - cut)]
        prompts.append(make_prompt(tokens, rng.random() * spread_s, block_tokens))
    return sorted(prompts, key=lambda prompt: prompt.at_s)


def make_prompt(tokens: list[int], at_s: float, block_tokens: int) -> SimPrompt:
    """Return a prompt with its keys."""
    raw = struct.pack(f"<{len(tokens)}I", *tokens)
    return SimPrompt(raw, sequence_keys(raw, block_tokens, SCOPE), at_s)


def trace_length(path: Path) -> int:
    """Return how many requests a trace holds.

    Raises:
        ConfigError: unreadable.
    """
    try:
        return max(1, len(path.read_bytes().splitlines()))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def trace_prompts(
    path: Path, count: int, *, block_tokens: int, trace_block_tokens: int, time_scale: float
) -> Iterator[SimPrompt]:
    """Yield `count` requests of a Mooncake trace, from its start again when it ends.

    A second time round all blocks are new, as if other users said other things.

    Args:
        block_tokens: of a simulated cache block.
        trace_block_tokens: how many recorded tokens become one of those; a multiple of 512.
        time_scale: factor on arrival times.

    Raises:
        ConfigError: unreadable or malformed; names the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"{path}: no requests")
    ids_per_block = trace_block_tokens // RECORDED_BLOCK_TOKENS
    span_s = 0.0
    for number in range(count):
        turn, index = divmod(number, len(lines))
        try:
            line = json.loads(lines[index])
            ids, length, at_ms = line["hash_ids"], line["input_length"], line["timestamp"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {index + 1}: {error!r}") from error
        tokens: list[int] = []
        for at in range(0, len(ids), ids_per_block):
            tokens += _block_of(turn, ids[at : at + ids_per_block], block_tokens)
        kept = max(1, length * block_tokens // trace_block_tokens)
        span_s = max(span_s, at_ms / 1e3) if turn == 0 else span_s
        yield make_prompt(tokens[:kept], (at_ms / 1e3 + turn * span_s) * time_scale, block_tokens)


def _block_of(turn: int, ids: list[int], block_tokens: int) -> list[int]:
    """Return the tokens that stand for some recorded blocks: the same for the same ids."""
    raw = blake2b(f"{turn} {ids}".encode(), digest_size=4 * block_tokens).digest()
    return list(struct.unpack(f"<{block_tokens}I", raw))
