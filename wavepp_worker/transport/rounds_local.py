"""The rounds plane inside one process, for tests."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Set

from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.limits import MAILBOX_FRAMES_MAX
from wavepp_worker.base.types import LEADER


class LocalRounds:
    """One rank's end; `local_star` makes a connected set of them."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._peers: dict[int, LocalRounds] = {}
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lost: set[int] = set()
        self._is_closed = False

    def missing(self) -> Set[int]:
        return frozenset()

    def send(self, rank: int, frame: bytes) -> None:
        check(rank in self._peers, "not a neighbour in the star", rank=rank, own_rank=self.rank)
        peer = self._peers[rank]
        if rank in self._lost or peer._is_closed:
            raise PeerError(f"rank {rank} closed its rounds link")
        if len(peer._inbox) >= MAILBOX_FRAMES_MAX:
            raise PeerError(f"rounds queue to rank {rank} overflowed")
        peer._inbox.append((self.rank, frame))
        os.eventfd_write(peer._wake, 1)

    def receive(self) -> list[tuple[int, bytes]]:
        frames = list(self._inbox)
        self._inbox.clear()
        if not frames and self._lost:
            raise PeerError(f"rank {min(self._lost)} closed its rounds link")
        if not self._lost:  # a lost link keeps the descriptor readable
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return frames

    def fileno(self) -> int:
        return self._wake

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._wake)
        for peer in self._peers.values():
            if not peer._is_closed:
                peer._lost.add(self.rank)
                os.eventfd_write(peer._wake, 1)


def local_star(ranks: int) -> list[LocalRounds]:
    """Return the connected ends of ranks 0 .. ranks - 1."""
    links = [LocalRounds(rank) for rank in range(ranks)]
    for follower in links[1:]:
        follower._peers[LEADER] = links[LEADER]
        links[LEADER]._peers[follower.rank] = follower
    return links
