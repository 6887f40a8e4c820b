"""Who decides what a machine does next: Hypothesis, or a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Choose(Protocol):
    """Picks one of several equally good values; `random.Random.choice` is one."""

    def __call__(self, choices: Sequence[T], /) -> T: ...
