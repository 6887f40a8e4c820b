"""Leases: one reference on every block that a reused prefix needs, in every window.  [P-LEASE]

A lease ends when it is released or when materialisation hands its references to the sequence;
never by time.  Blocks may be shared by any number of leases and sequences.  [algorithms 6]
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Tokens
from wavepp_worker.cache.parts import LeasePart, Vacate, Window
from wavepp_worker.cache.probe import Reach, common_depth
from wavepp_worker.cache.request import KnownRequest


class Lease:
    """The pinned prefix of one attempt: tokens [0, endpoint)."""

    __slots__ = ("_dense", "_sparse", "attempt", "endpoint", "matched", "parts", "request")

    def __init__(self, request: KnownRequest, attempt: int, windows: Sequence[Window]) -> None:
        self.request = request
        self.attempt = attempt
        self.parts: list[LeasePart] = [window.seek(request) for window in windows]
        """Per window."""
        self.endpoint = Tokens(0)
        self.matched = Tokens(0)
        """What the dense windows alone held when the lease was taken."""
        paired = list(zip(windows, self.parts, strict=True))
        self._dense: list[Reach] = [part.reach for window, part in paired if window.is_dense]
        self._sparse: list[Reach] = [part.reach for window, part in paired if not window.is_dense]

    def reach(self, cap: int) -> Tokens:
        """Return how deep `acquire` would look first; pins nothing."""
        block_tokens = self.request.block_tokens
        limit = min(self.request.endpoint_max, cap) // block_tokens
        return Tokens(common_depth(self._dense, self._sparse, limit) * block_tokens)

    def acquire(self, cap: int, vacate: Vacate) -> None:
        """Pin the longest prefix, at most `cap` tokens, that every window can resume."""
        check(cap >= 0, "an endpoint is not negative [I8]", cap=cap)
        block_tokens = self.request.block_tokens
        limit = min(self.request.endpoint_max, cap) // block_tokens
        limit = common_depth(self._dense, (), limit)
        self.matched = Tokens(limit * block_tokens)
        # What does not last was never used: it keeps its age.
        self._settle(limit, vacate, is_use=False)

    def trim(self, cap: int, vacate: Vacate) -> Tokens:
        """Lower the lease to at most `cap` tokens; return the endpoint left.  [algorithms 6.2]

        With dense windows only it is exactly the smaller of the two.  A sparse window pins only
        what its endpoint needs, so what an earlier one needs may be gone: then it falls further.
        """
        check(cap >= 0, "an endpoint is not negative [I10]", cap=cap)
        if self.endpoint > cap:
            self._settle(cap // self.request.block_tokens, vacate, is_use=True)
        return self.endpoint

    def release(self) -> None:
        """Give every block back, leaf first."""
        for part in self.parts:
            part.release()

    def _settle(self, limit: int, vacate: Vacate, *, is_use: bool) -> None:
        """Move to the deepest endpoint up to `limit` blocks that all windows can hold.

        What an endpoint needs is pinned in all windows before anything deeper is given back, so
        the lease holds a complete endpoint throughout.  [I10]  It ends: the limit falls each time,
        and 0 needs nothing.
        """
        while True:
            depth = common_depth(self._dense, self._sparse, limit)
            limit = min(part.hold(depth, vacate) for part in self.parts)
            if limit == depth:
                break
        for part in self.parts:
            part.settle(is_use=is_use)
        self.endpoint = Tokens(depth * self.request.block_tokens)
