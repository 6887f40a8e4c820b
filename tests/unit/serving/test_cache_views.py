"""The `cache_view` control with snapshots and a host tier."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kv_router_hooks.router_view import RouterView
from kv_router_hooks.window_rule import DENSE, RECURRENT
from wavepp_worker.serving.cache_views import OPEN_VIEWS_MAX, CacheViews
from wavepp_worker.wire.mailbox import CacheView

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
COUNTS = ("free", "cached", "referenced", "reserved", "total")


def name(key: bytes) -> str:
    return f"{key[0]:016x}"


def make_report(rank: int, number: int, *keys: tuple[bytes, ...]) -> CacheView:
    """A rank's report; every count of every window is another number."""
    windows = range(len(keys))
    counts: dict[str, Any] = {
        f"{tier}{what}": tuple(100 * rank + 50 * at + 10 * bool(tier) + place for at in windows)
        for tier in ("", "host_")
        for place, what in enumerate(COUNTS)
    }
    return CacheView(
        rank=rank,
        number=number,
        keys=keys,
        lease_count=7,
        escrow_count=8,
        sequence_count=9,
        **counts,
    )


async def test_each_rank_shows_what_it_can_resume_and_both_tiers_of_its_windows() -> None:
    view = RouterView(((DENSE, RECURRENT), (RECURRENT,)), 1)
    view.open(1, [A, B, C], bytes(12))
    views = CacheViews(view, 2, lambda key: key[0])
    asked: list[int] = []
    answer = asyncio.ensure_future(views.ask(asked.append, 5))
    await asyncio.sleep(0)
    view.apply(0, 1, [(True, 0, A), (True, 0, B), (True, 0, C), (True, 1, A), (True, 1, C)])
    views.take(make_report(0, asked[0], (A, B, C), (A, C)))
    view.apply(1, 1, [(True, 0, A), (True, 0, B)])
    views.take(make_report(1, asked[0], (A, B)))
    shown = await answer
    assert shown["router_blocks"] == [name(A)]
    first, second = shown["ranks"]
    assert first == {
        "rank": 0, "blocks": [name(A), name(B), name(C)],
        "free": [0, 50], "cached": [1, 51], "referenced": [2, 52], "reserved": [3, 53],
        "total": [4, 54],
        "host": {
            "free": [10, 60], "cached": [11, 61], "referenced": [12, 62], "reserved": [13, 63],
            "total": [14, 64],
        },
        "leases": 7, "escrows": 8, "sequences": 9,
    }  # fmt: skip
    assert second["blocks"] == [name(A), name(B)]
    assert second["host"]["total"] == [114]


async def test_open_views_are_bounded() -> None:
    views = CacheViews(RouterView(((DENSE,),), 1), 1, lambda key: key[0])
    asked: list[int] = []
    waiting = [asyncio.ensure_future(views.ask(asked.append, 5)) for _ in range(OPEN_VIEWS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="too many"):
        await views.ask(asked.append, 5)
    for number in asked:
        views.take(make_report(0, number, ()))
    assert len(await asyncio.gather(*waiting)) == OPEN_VIEWS_MAX
    with pytest.raises(TimeoutError):
        await views.ask(asked.append, 0.01)
