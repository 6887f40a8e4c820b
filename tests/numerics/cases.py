"""Models with a prompt and what the oracle says of it, made once per test module."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.numerics.pipeline import TOLERANCE, Oracle
from tests.numerics.tiny import VOCAB, make_tiny_model

torch.set_num_threads(1)  # of such small work, threads make only waiting

PROMPT_TOKENS = 193  # 12 blocks of 16 and one token
TABLE = tuple(random.Random(7).sample(range(64), 14))


@dataclass
class Case:
    """A model folder with a prompt and the oracle's logits for it."""

    folder: Path
    oracle: Oracle
    prompt: list[int]
    want: torch.Tensor


def case_maker(
    root: Path, variants: Mapping[str, tuple[str, dict[str, Any]]]
) -> Callable[[str], Case]:
    """Return a function that makes the case of a variant, or returns the one it made before.

    Args:
        variants: name -> (family, keys of config.json to add or replace).
    """

    @cache
    def make(variant: str) -> Case:
        family, config = variants[variant]
        folder = make_tiny_model(root / variant, family, seed=3, shards=2, config=config)
        oracle = Oracle(folder)
        rng = random.Random(11)
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
        return Case(folder, oracle, prompt, oracle.logits(prompt))

    return make


def assert_rows(got: torch.Tensor, case: Case, chunks: Sequence[int], start: int = 0) -> None:
    """Compare logits at the chunk ends with the oracle's."""
    ends, place = [], start
    for length in chunks:
        place += length
        ends.append(place - 1)
    want = case.want[ends]
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert torch.equal(got.argmax(-1), want.argmax(-1))
