"""What one window of a rank is: a group of layers with one kind of state and one pool of slots.

dense       attention over the whole prompt; a prefix is every block of it
sliding     attention over `span_tokens`; a prefix is the last blocks before its endpoint
recurrent   one state per layer; a prefix is the snapshot at exactly its endpoint
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import ceil_div

Kind = Literal["attention", "recurrent"]


class WindowSpec(Struct, frozen=True, kw_only=True):
    """One window.

    Attributes:
        kind: state kind.
        span_tokens: w of sliding attention, in tokens, the query itself included; None: dense.
        slots: device slots of the pool.
        host_slots: slots of the host tier; 0: victims are dropped.
        chunk_tokens: sliding only: M, the longest chunk that one wave computes of a request.
    """

    kind: Kind = "attention"
    span_tokens: int | None = None
    slots: int
    host_slots: int = 0
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigError(f"cache window needs at least one slot, got {self.slots}")
        if self.host_slots < 0:
            raise ConfigError(f"cache window has host_slots={self.host_slots}")
        if self.span_tokens is None:
            return
        if self.kind == "recurrent":
            raise ConfigError("a recurrent cache window has no span_tokens")
        if self.span_tokens < 1 or self.chunk_tokens < 1:
            raise ConfigError(
                f"a sliding cache window needs span_tokens and chunk_tokens, got "
                f"span_tokens={self.span_tokens} chunk_tokens={self.chunk_tokens}"
            )

    @property
    def is_recurrent(self) -> bool:
        """Whether the window keeps snapshots instead of blocks."""
        return self.kind == "recurrent"

    @property
    def is_sliding(self) -> bool:
        """Whether an endpoint needs only the last blocks before it."""
        return self.span_tokens is not None

    @property
    def is_dense(self) -> bool:
        """Whether an endpoint needs every block before it."""
        return not self.is_recurrent and not self.is_sliding

    def needed_blocks(self, block_tokens: int) -> int:
        """Return how many blocks before an endpoint a sliding window needs.  [A6]"""
        return ceil_div((self.span_tokens or 1) - 1, block_tokens) + 1

    def ring_blocks(self, block_tokens: int) -> int:
        """Return how many slots a sliding window's sequence uses in turn for its suffix.

        The earliest query of a chunk still reads the span before it while the chunk is written.
        """
        return ceil_div(self.chunk_tokens, block_tokens) + self.needed_blocks(block_tokens)
