"""Prompts of a serving benchmark: cold, reused or mixed, or a recorded trace.

    cold     fresh tokens
    reuse    `reuse_share` of the prompt is a shared prefix, sent once before the clock starts
    mixed    every second prompt of either kind
    trace    Mooncake JSONL: lengths, arrival times and block ids; equal ids give equal tokens

Prompts are token ids, seeded: two runs send the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import align_down

TRACE_BLOCK_TOKENS = 512  # of the recorded format


class BenchPrompt(Struct, frozen=True):
    """One request to send.

    Attributes:
        at_s: arrival after the start, in seconds; None: as soon as a client is free.
        expected_reuse: leading tokens that an endless cache would hold, in whole blocks.
    """

    number: int
    tokens: list[int]
    expected_reuse: int = 0
    at_s: float | None = None


class Workload(Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        kind: cold, reuse or mixed.
        families: distinct shared prefixes.
        block_tokens: cache block of the server; a shorter common prefix cannot be reused.
        token_low, token_high: ids are drawn from [low, high).
    """

    kind: str
    prompt_tokens: int
    requests: int
    reuse_share: float = 0.9
    families: int = 4
    block_tokens: int = 64
    seed: int = 1
    token_low: int = 100
    token_high: int = 20_000

    def __post_init__(self) -> None:
        if self.kind not in {"cold", "reuse", "mixed"}:
            raise ConfigError(f"no such workload: {self.kind!r}; cold, reuse or mixed")
        if self.prompt_tokens < 1 or self.requests < 1 or self.families < 1:
            raise ConfigError("prompt tokens, requests and families are at least 1")
        if not 0 < self.reuse_share < 1:
            raise ConfigError(f"the reused share lies between 0 and 1, not {self.reuse_share}")
        _check_tokens(self.token_low, self.token_high)

    @property
    def prefix_tokens(self) -> int:
        """Length of a shared prefix."""
        return int(self.prompt_tokens * self.reuse_share)

    def warm_up(self) -> list[BenchPrompt]:
        """Return the prompts that put every shared prefix into the cache, negative numbers."""
        if self.kind == "cold":
            return []
        return [
            BenchPrompt(-1 - family, [*self._prefix(family), self.token_low])
            for family in range(self.families)
        ]

    def prompts(self) -> Iterator[BenchPrompt]:
        """Yield the measured prompts."""
        for number in range(self.requests):
            is_reused = self.kind == "reuse" or (self.kind == "mixed" and number % 2 == 1)
            if not is_reused:
                yield BenchPrompt(number, self._draw(self.prompt_tokens, 0, number))
                continue
            prefix = self._prefix((number // (2 if self.kind == "mixed" else 1)) % self.families)
            fresh = self._draw(self.prompt_tokens - len(prefix), 0, number)
            reuse = align_down(len(prefix), self.block_tokens)
            yield BenchPrompt(number, [*prefix, *fresh], expected_reuse=reuse)

    def _prefix(self, family: int) -> list[int]:
        return self._draw(self.prefix_tokens, 1, family)

    def _draw(self, count: int, stream: int, number: int) -> list[int]:
        return draw_tokens(count, (self.seed, stream, number), self.token_low, self.token_high)


class TraceLine(Struct):
    """One line of a Mooncake trace."""

    timestamp: float  # milliseconds
    input_length: int
    hash_ids: list[int]
    output_length: int = 1


def read_trace(path: Path, count: int) -> list[TraceLine]:
    """Return the first `count` requests.

    Raises:
        ConfigError: unreadable or malformed; names the line.
    """
    lines: list[TraceLine] = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(islice(file, count), 1):
                try:
                    lines.append(msgspec.json.decode(text, type=TraceLine))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not lines:
        raise ConfigError(f"{path}: no requests")
    return lines


def trace_prompts(
    lines: Sequence[TraceLine],
    *,
    trace_block_tokens: int,
    block_tokens: int,
    time_scale: float | None,
    seed: int,
    token_low: int,
    token_high: int,
) -> Iterator[BenchPrompt]:
    """Yield a trace's requests, lengths scaled by `trace_block_tokens` / 512.

    Args:
        block_tokens: cache block of the server.
        time_scale: factor on the recorded arrival times; None: no arrival times.
    """
    _check_tokens(token_low, token_high)
    seen: set[tuple[int, ...]] = set()
    blocks: dict[int, list[int]] = {}
    for number, line in enumerate(lines):
        length = max(1, line.input_length * trace_block_tokens // TRACE_BLOCK_TOKENS)
        tokens: list[int] = []
        for block in line.hash_ids:
            if block not in blocks:
                blocks[block] = draw_tokens(
                    trace_block_tokens, (seed, 2, block), token_low, token_high
                )
            tokens += blocks[block]
        reused = 0
        for depth in range(len(line.hash_ids), 0, -1):
            if tuple(line.hash_ids[:depth]) in seen:
                reused = depth
                break
        for depth in range(reused + 1, len(line.hash_ids) + 1):
            seen.add(tuple(line.hash_ids[:depth]))
        at_s = None if time_scale is None else line.timestamp / 1e3 * time_scale
        reuse = align_down(min(reused * trace_block_tokens, length - 1), block_tokens)
        yield BenchPrompt(number, tokens[:length], reuse, at_s)


def draw_tokens(count: int, seed: tuple[int, ...], low: int, high: int) -> list[int]:
    """Return `count` seeded token ids in [low, high)."""
    drawn: list[int] = np.random.default_rng(seed).integers(low, high, count).tolist()
    return drawn


def _check_tokens(low: int, high: int) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"token ids are drawn from [{low}, {high}), which is empty")
