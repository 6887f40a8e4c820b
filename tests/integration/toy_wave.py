"""The production WAVE process with a finger on its rounds link, for tests of bad moments.

A `Touch` of the worker's `ToySpec` names a frame and what happens at it, so a test can stop a
rank between its commit and the vote that tells of it, without a guess about time.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from tests.integration.toy_wire import Touch, load_spec
from wavepp_worker.runtime import wave_process, wave_start
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.transport.rounds_zmq import ZmqFollowerRounds, ZmqLeaderRounds
from wavepp_worker.wire.rounds import (
    ROUNDS,
    RoundBcast,
    RoundGathered,
    RoundVote,
)


def facts_of(frame: bytes) -> set[tuple[str, int]]:
    """Return (kind of frame, rid) for everything that a rounds frame is about."""
    facts = {("any", 0)}
    match ROUNDS.decode(frame):
        case RoundBcast() as bcast:
            facts |= {("announce", entry.rid) for entry in bcast.announces}
            facts |= {(record.phase.name, record.rid) for record in bcast.records}
        case RoundVote() as vote:
            facts |= {(answer.status.name, answer.rid) for answer in vote.votes}
        case RoundGathered() as gathered:
            facts |= {("gathered", answer.rid) for vote in gathered.votes for answer in vote.votes}
            facts.add(("gathered", 0))
    return facts


class Finger:
    """Applies this rank's touches to the frames of one direction."""

    def __init__(self, rank: int, way: str) -> None:
        touches = [t for t in load_spec().touches if (t.rank, t.way) == (rank, way)]
        self._left = [[touch, touch.times or -1] for touch in touches]

    def apply(self, frame: bytes) -> list[bytes]:
        """Return the frames that pass in place of `frame`."""
        if not self._left or not frame:  # an empty frame joins the star
            return [frame]
        facts = facts_of(frame)
        frames = [frame]
        for entry in self._left:
            touch, left = entry
            named = {rid for kind, rid in facts if kind == touch.frame}
            if left and named and (touch.rid == 0 or touch.rid in named):
                entry[1] -= 1
                frames = self._do(touch, frames)
        return frames

    def _do(self, touch: Touch, frames: list[bytes]) -> list[bytes]:
        match touch.action:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(touch.delay_s)
            case "drop":
                return []
            case "repeat":
                return frames * 2
        return frames


def touched(kind: type[RoundsLink], rank: int) -> type[RoundsLink]:
    """Return the link class `kind` with this rank's fingers on it."""
    sends, receives = Finger(rank, "send"), Finger(rank, "receive")

    class TouchedLink(kind):  # type: ignore[misc, valid-type]
        def send(self, to_rank: int, frame: bytes) -> None:
            for passed in sends.apply(frame):
                super().send(to_rank, passed)

        def receive(self) -> list[tuple[int, bytes]]:
            arrived = super().receive()
            return [(peer, passed) for peer, frame in arrived for passed in receives.apply(frame)]

    return TouchedLink


def main(arguments: list[str]) -> int:
    rank = int(arguments[arguments.index("--rank") + 1])
    wave_start.ZmqLeaderRounds = touched(ZmqLeaderRounds, rank)  # type: ignore[misc, assignment]
    wave_start.ZmqFollowerRounds = touched(ZmqFollowerRounds, rank)  # type: ignore[misc, assignment]
    return wave_process.main(arguments)


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
