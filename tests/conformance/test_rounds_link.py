"""One suite for the rounds plane's port, run against every adapter."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from wavepp_worker.base.errors import InvariantError, PeerError
from wavepp_worker.runtime.membership import Membership
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.transport.rounds_dynamo import DynamoRounds
from wavepp_worker.transport.rounds_local import LocalRounds, local_star
from wavepp_worker.transport.rounds_zmq import ZmqFollowerRounds, ZmqLeaderRounds

DEADLINE_S = 10.0
EPOCH = 7

MakeStar = Callable[[int], list[RoundsLink]]


def zmq_star(ranks: int, stack: ExitStack) -> list[RoundsLink]:
    context = zmq.Context()
    stack.callback(context.destroy, linger=0)
    leader = ZmqLeaderRounds(context, "127.0.0.1", ranks, EPOCH)
    followers = [ZmqFollowerRounds(context, leader.address, r, EPOCH) for r in range(1, ranks)]
    return [leader, *followers]


def dynamo_star(ranks: int, stack: ExitStack) -> list[RoundsLink]:
    members = [Membership("test", "rounds", "127.0.0.1") for _ in range(ranks)]
    for member in members:
        stack.callback(member.close)
    instances = {rank: member.instance for rank, member in enumerate(members)}
    links: list[RoundsLink] = []
    for rank, member in enumerate(members):
        link = DynamoRounds(
            member.runtime,
            member.loop,
            member.component,
            rank=rank,
            epoch=EPOCH,
            instances=instances,
        )
        links.append(link)
    return links


@pytest.fixture(params=["local", "zmq", pytest.param("dynamo", marks=pytest.mark.dynamo)])
def make_star(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeStar]:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    monkeypatch.setenv("DYN_TCP_RPC_HOST", "127.0.0.1")
    monkeypatch.setenv("DYN_TCP_RESPONSE_STREAM_HOST", "127.0.0.1")
    with ExitStack() as stack:

        def make(ranks: int) -> list[RoundsLink]:
            links: list[RoundsLink]
            if request.param == "local":
                links = list(local_star(ranks))
            elif request.param == "zmq":
                links = zmq_star(ranks, stack)
            else:
                links = dynamo_star(ranks, stack)
            stack.callback(close_all, links)
            for link in links:
                wait_until(link, lambda link=link: not link.missing())
            return links

        yield make


def close_all(links: list[RoundsLink]) -> None:
    """Close the ends together, as the processes of a worker do; a local star has one thread."""
    if isinstance(links[0], LocalRounds):
        for link in links:
            link.close()
        return
    threads = [threading.Thread(target=link.close) for link in links[1:]]
    for thread in threads:
        thread.start()
    links[0].close()
    for thread in threads:
        thread.join()


def wait_until(link: RoundsLink, is_done: Callable[[], bool]) -> list[tuple[int, bytes]]:
    """Receive on `link` until `is_done`, waiting on its descriptor; return what came."""
    deadline = time.monotonic() + DEADLINE_S
    frames: list[tuple[int, bytes]] = []
    while True:
        batch = link.receive()
        frames += batch
        if is_done():
            return frames
        if not batch:
            remaining = deadline - time.monotonic()
            assert remaining > 0, "nothing came in time"
            select.select([link.fileno()], [], [], remaining)


def take(link: RoundsLink, count: int) -> list[tuple[int, bytes]]:
    """Return the next `count` frames of `link`; fails if there are more."""
    deadline = time.monotonic() + DEADLINE_S
    frames: list[tuple[int, bytes]] = []
    while len(frames) < count:
        batch = link.receive()
        frames += batch
        if not batch:
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"{len(frames)} of {count} frames came"
            select.select([link.fileno()], [], [], remaining)
    assert len(frames) == count
    return frames


def test_frames_reach_every_rank_and_come_back(make_star: MakeStar) -> None:
    links = make_star(3)
    for rank in (1, 2):
        links[0].send(rank, b"ask %d" % rank)
    for rank in (1, 2):
        assert take(links[rank], 1) == [(0, b"ask %d" % rank)]
        links[rank].send(0, b"answer %d" % rank)
    assert sorted(take(links[0], 2)) == [(1, b"answer 1"), (2, b"answer 2")]


def test_each_pair_is_a_fifo_in_both_directions(make_star: MakeStar) -> None:
    links = make_star(3)
    expected = [b"%d" % number for number in range(300)]
    for frame in expected:
        links[0].send(1, frame)
        links[0].send(2, frame)
        links[1].send(0, frame)
        links[2].send(0, frame)
    assert [frame for _, frame in take(links[1], 300)] == expected
    assert [frame for _, frame in take(links[2], 300)] == expected
    back = take(links[0], 600)
    assert [frame for rank, frame in back if rank == 1] == expected
    assert [frame for rank, frame in back if rank == 2] == expected


def test_large_frames_are_unchanged(make_star: MakeStar) -> None:
    links = make_star(2)
    frame = bytes(range(256)) * 16_384  # 4 MiB, the largest broadcast
    links[0].send(1, frame)
    assert take(links[1], 1) == [(0, frame)]
    links[1].send(0, frame)
    assert take(links[0], 1) == [(1, frame)]


def test_receive_does_not_block(make_star: MakeStar) -> None:
    links = make_star(2)
    started = time.monotonic()
    assert links[0].receive() == []
    assert links[1].receive() == []
    assert time.monotonic() - started < 0.1


def test_descriptor_is_quiet_without_frames(make_star: MakeStar) -> None:
    links = make_star(2)
    links[0].send(1, b"x")
    take(links[1], 1)
    for link in links:
        assert link.receive() == []
        assert select.select([link.fileno()], [], [], 0.05)[0] == []


def test_no_wake_up_is_lost_when_both_sides_send_at_once(make_star: MakeStar) -> None:
    links = make_star(2)
    for number in range(100):
        for link, peer in ((links[0], 1), (links[1], 0)):
            link.send(peer, b"%d" % number)
        assert take(links[0], 1) == [(1, b"%d" % number)]
        assert take(links[1], 1) == [(0, b"%d" % number)]


def test_followers_reach_only_the_leader(make_star: MakeStar) -> None:
    links = make_star(3)
    with pytest.raises(InvariantError):
        links[1].send(2, b"x")
    with pytest.raises(InvariantError):
        links[0].send(3, b"x")


def test_a_star_of_one_is_silent(make_star: MakeStar) -> None:
    (link,) = make_star(1)
    assert link.receive() == []
    assert not link.missing()


def test_close_is_idempotent(make_star: MakeStar) -> None:
    links = make_star(2)
    close_all(links)
    close_all(links)


@pytest.mark.parametrize("who", [0, 1])
def test_last_frames_arrive_before_the_loss_is_raised(make_star: MakeStar, who: int) -> None:
    links = make_star(2)
    closing, staying = links[who], links[1 - who]
    closing.send(1 - who, b"last")
    thread = threading.Thread(target=closing.close)
    thread.start()
    try:
        assert take(staying, 1) == [(who, b"last")]
        with pytest.raises(PeerError):
            fail_by(staying, who)
    finally:
        thread.join()


def fail_by(link: RoundsLink, peer: int) -> None:
    """Heartbeat over `link` until it raises; a loss must show within the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        link.receive()
        link.send(peer, b"heartbeat")
        select.select([link.fileno()], [], [], 0.02)


def test_zmq_refuses_strangers_and_earlier_epochs() -> None:
    context = zmq.Context()
    try:
        leader = ZmqLeaderRounds(context, "127.0.0.1", 2, EPOCH)
        stale = ZmqFollowerRounds(context, leader.address, 1, EPOCH - 1)
        stale.send(0, b"late vote")
        stranger = context.socket(zmq.DEALER)
        stranger.connect(leader.address)
        stranger.send(b"")
        real = ZmqFollowerRounds(context, leader.address, 1, EPOCH)
        real.send(0, b"vote")
        assert wait_until(leader, lambda: not leader.missing()) in ([], [(1, b"vote")])
        for link in (stale, real, leader):
            link.close()
    finally:
        context.destroy(linger=0)
