"""P ranks for `wavepp bench admission`, over either transport.

    LocalFleet    all ranks here, one after another, over `rounds_local`: what the work costs
    SocketFleet   rank 0 here, a process per follower, over `rounds_zmq`: what a request waits

Messages are encoded and decoded in both.  A LocalFleet jumps to the next round's time, so pauses
between rounds are left out; a SocketFleet waits for it as the WAVE process does.

Run as a module it is one follower: its task on standard input, its times on standard output.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from msgspec import Struct

from wavepp_worker.admission.events import ShutdownRequested
from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.types import LEADER, Instant
from wavepp_worker.bench.admission_load import AdmissionLoad, BenchPrompt
from wavepp_worker.bench.rank_driver import EPOCH, RankDriver, now
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.transport.rounds_local import local_star
from wavepp_worker.transport.rounds_zmq import ZmqFollowerRounds, ZmqLeaderRounds

ROUNDS_MAX = 100_000  # of one wait in a LocalFleet: beyond it, something is stuck
WAIT_S = 60.0  # of one wait in a SocketFleet
HOST = "127.0.0.1"


class RoundCost(Struct, frozen=True):
    """Processor time of one round, nanoseconds."""

    leader_ns: int
    follower_ns: int  # the busiest one


class LocalFleet:
    """All ranks in this process."""

    def __init__(self, load: AdmissionLoad) -> None:
        self._links = local_star(load.ranks)
        self._at = Instant(0.0)
        self.load = load
        self.ranks = [RankDriver(load, rank, link) for rank, link in enumerate(self._links)]
        self.until(lambda: self.ranks[LEADER].is_ready)

    def close(self) -> None:
        """Give the links' descriptors back."""
        for link in self._links:
            link.close()

    def prepare(self, families: Sequence[BenchPrompt]) -> None:
        """Let every rank hold its part of the families."""
        self.admit(families)
        for rank in self.ranks:
            _hold(rank, [prompt.rid for prompt in families])
        if not self.load.is_crowded:
            self.end([prompt.rid for prompt in families])

    def admit(self, prompts: Sequence[BenchPrompt]) -> None:
        """Announce all at once, and run rounds until every rank has installed them."""
        for prompt in prompts:
            self.ranks[LEADER].announce(prompt)
        rids = {prompt.rid for prompt in prompts}
        self.until(lambda: all(rids <= rank.installs.keys() for rank in self.ranks))

    def end(self, rids: Sequence[int]) -> None:
        """Free the requests everywhere, and run rounds until nobody remembers them."""
        for rank in self.ranks:
            for rid in rids:
                rank.free(rid)
        self.until(lambda: self.ranks[LEADER].gone >= set(rids))

    def until(self, is_done: Callable[[], bool]) -> None:
        """Run rounds until `is_done`."""
        for _ in range(ROUNDS_MAX):
            if is_done():
                return
            self.round()
        raise PeerError(f"not done after {ROUNDS_MAX} rounds")

    def round(self) -> RoundCost:
        """Run one round at its time; return what it cost."""
        leader, *followers = self.ranks
        deadline = leader.deadline()
        check(deadline is not None, "no round is open between rounds")
        self._at = max(self._at, now(), deadline or self._at)
        clock = time.perf_counter_ns
        started = clock()
        leader.tick(self._at)
        leader_ns = clock() - started
        spent = [0] * len(followers)
        for is_merge in (False, True):
            for index, follower in enumerate(followers):
                started = clock()
                follower.take_frames(self._at)
                spent[index] += clock() - started
            if not is_merge:
                started = clock()
                leader.take_frames(self._at)
                leader_ns += clock() - started
        return RoundCost(leader_ns, max(spent, default=0))


class FollowerTask(Struct, frozen=True):
    """What a follower's process is told."""

    load: AdmissionLoad
    rank: int
    address: str


class SocketFleet:
    """Rank 0 in this process, the others in theirs; crowded loads only."""

    def __init__(self, load: AdmissionLoad) -> None:
        check(load.is_crowded, "followers play LOOP for the families alone")
        self.load = load
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = ZmqLeaderRounds(self._context, HOST, load.ranks, EPOCH)
        self.leader = RankDriver(load, LEADER, link)
        self._followers = [
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name if __spec__ else __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(1, load.ranks)
        ]
        for rank, process in enumerate(self._followers, 1):
            if process.stdin is not None:
                process.stdin.write(msgspec.json.encode(FollowerTask(load, rank, link.address)))
                process.stdin.close()
                process.stdin = None  # `communicate` would flush it again
        deadline = time.monotonic() + WAIT_S
        while link.missing():  # no round may begin before all have joined
            check(time.monotonic() < deadline, "followers join in time", missing=link.missing())
            select.select([link.fileno()], [], [], 0.01)
            check(not link.receive(), "followers speak when they are asked")
        self.until(lambda: self.leader.is_ready)

    def prepare(self, families: Sequence[BenchPrompt]) -> None:
        """Let every rank hold its part of the families."""
        for prompt in families:
            self.leader.announce(prompt)
        self.until(lambda: len(self.leader.installs) == len(families))
        _hold(self.leader, [prompt.rid for prompt in families])
        # A follower installs when the votes of the last round reach it, and votes it in a later
        # one; idle rounds in between leave it the time to publish.
        self.run_for(0.5)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Drive rank 0 until `is_done`."""
        _drive(self.leader, is_done, now() + WAIT_S)
        check(is_done(), "ranks answer in time")

    def run_for(self, seconds: float) -> None:
        """Drive rank 0 for so long."""
        _drive(self.leader, lambda: False, now() + seconds)

    def close(self) -> list[dict[int, int]]:
        """End all ranks; return, per rank, rid -> when it knew the candidate."""
        self.leader.feed(ShutdownRequested("measured"), now())
        self.until(lambda: self.leader.is_over)
        times = [self.leader.hinted_ns]
        for process in self._followers:
            output, _ = process.communicate(timeout=WAIT_S)
            check(process.returncode == 0, "a follower ends well", status=process.returncode)
            times.append(msgspec.json.decode(output, type=dict[int, int]))
        self.leader.link.close()
        self._context.destroy(linger=0)
        return times

    def kill(self) -> None:
        """End the followers after a failure."""
        for process in self._followers:
            process.kill()


def _drive(
    rank: RankDriver,
    is_done: Callable[[], bool],
    stop_at: float | None,
    on_progress: Callable[[], None] = lambda: None,
) -> None:
    """Handle frames and rounds as they come, until `is_done` or `stop_at`."""
    while not is_done():
        at = now()
        if stop_at is not None and at >= stop_at:
            return
        is_busy = rank.take_frames(at)
        deadline = rank.deadline()
        if deadline is not None and deadline <= at:
            is_busy = True
            rank.tick(at)
        if is_busy:
            on_progress()
        else:
            wake_at = [at for at in (stop_at, deadline) if at is not None]
            timeout = max(0.0, min(wake_at) - now()) if wake_at else None
            select.select([rank.link.fileno()], [], [], timeout)


def _hold(rank: RankDriver, rids: Sequence[int]) -> None:
    """Publish a rank's part of some families."""
    for rid in rids:
        rank.publish(rid, rank.load.cached_tokens(rank.rank))


def follow(task: FollowerTask) -> dict[int, int]:
    """Be one follower until the leader shuts down; return rid -> when it knew the candidate."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link: RoundsLink = ZmqFollowerRounds(context, task.address, task.rank, EPOCH)
    rank = RankDriver(task.load, task.rank, link)
    held: set[int] = set()

    def play_loop() -> None:
        due = rank.installs.keys() - held
        _hold(rank, sorted(due))
        held.update(due)

    _drive(rank, lambda: rank.is_over, None, play_loop)
    link.close()
    context.destroy(linger=0)
    return rank.hinted_ns


if __name__ == "__main__":
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=FollowerTask)
    sys.stdout.buffer.write(msgspec.json.encode(follow(given)))
