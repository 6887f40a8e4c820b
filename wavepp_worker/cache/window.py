"""What one window of a rank is: a group of layers with one kind of state and one pool of slots.

A dense attention window keeps every block of a prefix.  Windows that keep less (sliding
attention, recurrent state) need their own walk, demand and count reservations, so a spec that
asks for one is refused instead of served as if it were dense.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError


class WindowSpec(Struct, frozen=True, kw_only=True):
    """One window.

    Attributes:
        kind: state kind; "attention" is the one served.
        span_tokens: attention span; None: dense, the whole prompt.
        slots: device blocks in the window's pool.
    """

    kind: str = "attention"
    span_tokens: int | None = None
    slots: int

    def __post_init__(self) -> None:
        if self.kind != "attention" or self.span_tokens is not None:
            raise ConfigError(
                f"cache window kind={self.kind} span_tokens={self.span_tokens}: "
                "only dense attention windows are supported"
            )
        if self.slots < 1:
            raise ConfigError(f"cache window needs at least one slot, got {self.slots}")
