"""What a digest worker is made of: block size, windows, configuration, and prompts for it."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from wavepp_worker.config.derive import ModelFacts
from wavepp_worker.config.schema import Config
from wavepp_worker.wire.mailbox import WindowReport

STAGES = 2
BLOCK = 8  # tokens
WAVE_TOKENS = 4 * BLOCK
FACTS = ModelFacts(
    family="toy",
    layers=STAGES,
    hidden=1,
    vocab=1 << 32,
    context_tokens=4096,
    kv_heads=1,
    head_dim=1,
    dtype="float32",
    dtype_bytes=4,
    fingerprint="toy",
)


def attention(slots: int, host_slots: int = 0) -> WindowReport:
    return WindowReport("attention", slots, host_slots)


def recurrent(slots: int, host_slots: int = 0) -> WindowReport:
    return WindowReport("recurrent", slots, host_slots)


def sliding(slots: int, host_slots: int, span_tokens: int) -> WindowReport:
    return WindowReport("attention", slots, host_slots, span_tokens, WAVE_TOKENS)


def toy_config(**sections: dict[str, Any]) -> Config:
    """Return a small worker's configuration; keyword sections are merged in."""
    tree: dict[str, Any] = {
        "model": {"path": "unused"},
        "cluster": {"stages": STAGES, "start_timeout_s": 60},
        "cache": {"block_tokens": BLOCK},
        "admission": {"headroom_factor": 0.25},
        "planner": {"wave_tokens_max": WAVE_TOKENS},
        "transfer": {"hold_s": 120},
        "obs": {"stats_interval_s": 0.05, "log_level": "WARNING"},
        "debug": {"invariants": "always"},
    }
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return msgspec.convert(tree, Config)


def pack(prompt: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(prompt)}I", *prompt)


def family_prompts(seed: int, count: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts that share prefixes: each goes on from a cut of an earlier one, or is new."""
    draw = random.Random(seed)
    known: list[tuple[int, ...]] = []
    for _ in range(count):
        base: tuple[int, ...] = ()
        if known and draw.random() < 0.8:
            base = draw.choice(known[-12:])
            base = base[: draw.choice([len(base), draw.randrange(len(base) + 1)])]
        room = max(1, longest - len(base))
        tail = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, min(room, 60) + 1)))
        prompt = (*base[: longest - 1], *tail)
        known.append(prompt)
        yield prompt
