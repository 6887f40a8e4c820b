"""Escrows: slots promised to one request, so that what is committed cannot fail.  [P-ESCROW]

What is promised in each window, and how it moves when a lease claims it, is in `promises`; here is
what holds for all windows together: all or nothing.  [algorithms 7]
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.base.types import RequestId
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.parts import Promise, Window


class Escrow:
    """The reservation of one attempt."""

    __slots__ = ("_windows", "endpoint", "has_failed", "is_committed", "promises", "rid")

    def __init__(self, lease: Lease, windows: Sequence[Window]) -> None:
        self._windows = windows
        self.rid: RequestId = lease.request.rid
        self.endpoint = lease.endpoint
        """The endpoint that the reservation was made for."""
        self.is_committed = False
        self.has_failed = False
        """A commit failed: undoing this attempt is no news to other requests.  [algorithms 8.4]"""
        self.promises: list[Promise] = [window.promise(lease.request) for window in windows]
        """Per window."""

    def missing(self, lease: Lease, *, no_floor: bool) -> tuple[int, ...]:
        """Return, per window, how many slots are missing for the lease's endpoint."""
        return tuple(
            promise.missing(part, lease.endpoint, 0 if no_floor else window.floor)
            for window, promise, part in zip(self._windows, self.promises, lease.parts, strict=True)
        )

    def fill(self, lease: Lease) -> None:
        """Promise the demand at the lease's endpoint, which `missing` found to be there.

        A lease that fell since needs more [I25]; a shared block that another request onboarded
        since, less.
        """
        for promise, part in zip(self.promises, lease.parts, strict=True):
            promise.fill(part, lease.endpoint)
        self.endpoint = lease.endpoint

    def release(self) -> None:
        """Give everything back; victims fall back to their old age."""
        for promise in self.promises:
            promise.release()
