"""Sequences: admitted requests that own real slots.  [algorithms 10, 13]

What each window's part holds and how it is published is in `dense`, `sliding` and `recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.outcomes import Materialized
from wavepp_worker.cache.parts import SequencePart, Window
from wavepp_worker.wire.mailbox import Copy


class Sequence:
    """The blocks of an admitted request, from Install until Freed."""

    __slots__ = ("endpoint", "parts", "request")

    def __init__(self, lease: Lease, parts: list[SequencePart]) -> None:
        self.request = lease.request
        self.endpoint = lease.endpoint
        self.parts = parts
        """Per window."""

    def publish(self, window: int, end: int, snapshots: Seq[int]) -> int:
        """Attach what a window completed before token `end`; return how many blocks."""
        return self.parts[window].publish(end, snapshots)

    def free(self) -> None:
        """Give every block back; private ones become free."""
        for part in self.parts:
            part.free()


def materialize(
    lease: Lease, escrow: Escrow, windows: Seq[Window]
) -> tuple[Sequence, Materialized]:
    """Turn a lease and a committed escrow into a sequence; empties both.  It cannot fail.  [I22]

    Copies are listed in the order in which the books changed, so that each reads what the one
    before it left.  The lease's references pass to the sequence: the prefix is never without one.
    """
    copies: list[Copy] = []
    parts = [
        window.install(lease.request, part, promise, copies)
        for window, part, promise in zip(windows, lease.parts, escrow.promises, strict=True)
    ]
    escrow.release()  # the escrow ends before its lease  [I21]
    lease.release()
    sequence = Sequence(lease, parts)
    states = [part.states() for part in parts]
    installed = Materialized(
        endpoint=lease.endpoint,
        tables=tuple([part.table() for part in parts]),
        copies=tuple(copies),
        states=tuple([state for state in states if state is not None]),
    )
    return sequence, installed
