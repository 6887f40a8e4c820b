"""The port of the rounds plane: a star of bounded FIFOs between one worker's ranks.  [P-ROUNDS]

The leader (rank 0) reaches every rank; a follower reaches only the leader.  A link moves bytes:
what they mean is `wire.rounds`, when they are sent is `admission`.  Three adapters pass one
conformance suite: `rounds_local` (tests), `rounds_zmq` (default), `rounds_dynamo`.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol


class RoundsLink(Protocol):
    """One rank's end of the star.  Single-threaded; no call blocks.

    Frames between one pair of ranks arrive complete, once and in order, or the link is lost.
    A lost link stays lost: there is no repair, the worker fails as a unit.
    """

    def missing(self) -> Set[int]:
        """Return the ranks that have not joined yet; nothing may be sent to these.

        Changes only inside `receive`.
        """

    def send(self, rank: int, frame: bytes) -> None:
        """Queue `frame` for `rank`.

        Raises:
            PeerError: the link to `rank` is lost or its queue is full.
        """

    def receive(self) -> list[tuple[int, bytes]]:
        """Return every frame that has arrived, as (sender's rank, frame).

        Frames that arrived before a link was lost are returned first; the next call raises.

        Raises:
            PeerError: a link is lost.
        """

    def fileno(self) -> int:
        """Return a descriptor that turns readable when `receive` may have something.

        Sending may swallow a wake-up: after its last `send` a caller receives until it gets
        nothing, and only then waits.
        """

    def close(self) -> None:
        """Flush what was sent, for one second at most, and end.  Idempotent."""


FLUSH_S = 1.0  # how long `close` may take to hand the last frames over
