"""What the sections of a `RankCache` answer."""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.mailbox import Copy, StateSlots


class Prepared(Struct, frozen=True):
    """The suffix has its slots, at the lease's endpoint."""

    endpoint: int


class Committed(Struct, frozen=True):
    """The promise is fixed at `endpoint`; materialisation cannot fail."""

    endpoint: int


class Shortfall(Struct, frozen=True):
    """Not enough slots above the floors; a normal outcome.

    Attributes:
        missing: blocks missing per window.
        generation: capacity_generation read in the failing section.  [algorithms 8.4]
    """

    missing: tuple[int, ...]
    generation: int


class Materialized(Struct, frozen=True):
    """What `Install` carries to the LOOP process."""

    endpoint: int
    tables: tuple[tuple[int, ...], ...]  # as in `Install`
    copies: tuple[Copy, ...] = ()
    states: tuple[StateSlots, ...] = ()


class RankView(Struct, frozen=True):
    """A picture of the books; field names are those of the `CacheView` message."""

    keys: tuple[tuple[bytes, ...], ...]  # per window, parents before children
    free: tuple[int, ...]
    cached: tuple[int, ...]
    referenced: tuple[int, ...]
    reserved: tuple[int, ...]
    total: tuple[int, ...]
    host_free: tuple[int, ...]
    host_cached: tuple[int, ...]
    host_referenced: tuple[int, ...]
    host_reserved: tuple[int, ...]
    host_total: tuple[int, ...]
    lease_count: int
    escrow_count: int
    sequence_count: int
