"""Links are reused by one user at a time, and only while they are sound."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from wavepp_worker.transfer.desk_link import DESKS_MAX, IDLE_PER_DESK_MAX, LinkPool

DESK = "tcp://127.0.0.1:9"


@pytest.fixture
def pool() -> Iterator[LinkPool]:
    context = zmq.Context()
    pool = LinkPool(context)
    yield pool
    pool.close()
    pool.close()
    context.term()  # waits for ever if the pool lost a socket


def test_a_link_is_reused_but_never_shared(pool: LinkPool) -> None:
    first, second = pool.take(DESK), pool.take(DESK)
    assert first is not second
    pool.give(first)
    assert pool.take(DESK) is first
    other = pool.take("tcp://127.0.0.1:10")
    assert other not in (first, second)
    for link in (first, second, other):
        pool.give(link)


def test_idle_links_are_bounded_and_surplus_ones_closed(pool: LinkPool) -> None:
    links = [pool.take(DESK) for _ in range(IDLE_PER_DESK_MAX + 2)]
    for link in links:
        pool.give(link)
    assert [link._socket.closed for link in links] == [False] * IDLE_PER_DESK_MAX + [True] * 2
    desks = [pool.take(f"tcp://127.0.0.1:{10_000 + n}") for n in range(DESKS_MAX)]
    for link in desks:
        pool.give(link)
    assert all(link._socket.closed for link in links), "the desk used longest ago is forgotten"
    assert not any(link._socket.closed for link in desks)
