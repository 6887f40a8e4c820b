"""The `cache_view` control: what the router was told beside what every rank really holds.

Each rank answers a `ViewRequest` on the same FIFO as its deltas, so when its view arrives all
earlier deltas are applied.

    router_blocks   what the router was told
    ranks[].blocks  what one rank alone can resume

With the ranks at rest and dense windows, `router_blocks` is the intersection of all `blocks`; with
snapshots it may be less, because the ranks' boundaries need not meet there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from kv_router_hooks.router_view import RouterView
from wavepp_worker.wire.mailbox import CacheView

OPEN_VIEWS_MAX = 16  # asked for and unanswered; a caller that hammers gets an error


class CacheViews:
    """Views that were asked for and are not complete.

    Args:
        router_hash: name of a block in the answer.
    """

    def __init__(self, view: RouterView, stages: int, router_hash: Callable[[bytes], int]) -> None:
        self._view = view
        self._stages = stages
        self._router_hash = router_hash
        self._last_number = 0
        self._open: dict[int, tuple[asyncio.Future[dict[str, Any]], dict[int, CacheView]]] = {}

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> dict[str, Any]:
        """Return the views of all ranks as JSON.

        Args:
            send: asks the ranks, given the number of the view.

        Raises:
            TimeoutError: a rank did not answer, or too many views are open.
        """
        if len(self._open) >= OPEN_VIEWS_MAX:
            raise TimeoutError("too many cache views are open")
        self._last_number += 1
        number = self._last_number
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._open[number] = (answer, {})
        try:
            send(number)
            return await asyncio.wait_for(answer, timeout_s)
        finally:
            del self._open[number]

    def take(self, view: CacheView) -> None:
        """Take one rank's view; late ones are ignored."""
        entry = self._open.get(view.number)
        if entry is None:
            return
        answer, views = entry
        views[view.rank] = view
        if len(views) == self._stages and not answer.done():
            answer.set_result(self._render([views[rank] for rank in sorted(views)]))

    def _render(self, views: Iterable[CacheView]) -> dict[str, Any]:
        return {
            "status": "ok",
            "router_blocks": self._names(self._view.published_keys()),
            "ranks": [
                {
                    "rank": view.rank,
                    "blocks": self._names(self._view.resumable_keys(view.rank, view.keys)),
                    "free": list(view.free),
                    "cached": list(view.cached),
                    "referenced": list(view.referenced),
                    "reserved": list(view.reserved),
                    "total": list(view.total),
                    "host": {
                        "free": list(view.host_free),
                        "cached": list(view.host_cached),
                        "referenced": list(view.host_referenced),
                        "reserved": list(view.host_reserved),
                        "total": list(view.host_total),
                    },
                    "leases": view.lease_count,
                    "escrows": view.escrow_count,
                    "sequences": view.sequence_count,
                }
                for view in views
            ],
        }

    def _names(self, keys: Iterable[bytes]) -> list[str]:
        return sorted(f"{self._router_hash(key):016x}" for key in keys)
