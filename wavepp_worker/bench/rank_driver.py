"""One rank of `wavepp bench admission`: production admission, cache and messages, without a GPU.

    announce ─▶ InlineRank ─ frames ─▶ a RoundsLink of any kind ─▶ the other ranks
                    │
                    └─ candidates, Installs, ends: noted, candidates with their time

The caller plays LOOP: `publish` and `free` for what was installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar, assert_never

from wavepp_worker.admission.commands import (
    Outward,
    ReportGone,
    ReportReady,
    SendBroadcast,
    SendGathered,
    SendInstall,
    SendVote,
    ShutDown,
    Transition,
)
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    Tick,
    VoteReceived,
)
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.base.types import LEADER, Instant
from wavepp_worker.bench.admission_load import AdmissionLoad, BenchPrompt
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.wire.mailbox import Announce, Freed, Install, WaveDone
from wavepp_worker.wire.rounds import (
    ROUNDS,
    RoundBcast,
    RoundGathered,
    RoundMessage,
    RoundVote,
)

SECTIONS = (
    "learn", "hint", "acquire", "prepare", "commit", "materialize", "publish", "free",
)  # fmt: skip
EPOCH = 1

P = ParamSpec("P")
R = TypeVar("R")


class TimedCache(RankCache):
    """A RankCache that notes how long its sections take.

    Attributes:
        is_noting: off while the world is prepared.
        samples_ns: section -> durations.
    """

    def __init__(self, load: AdmissionLoad, rank: int) -> None:
        settings = load.settings(rank, EPOCH)
        super().__init__(
            load.windows(),
            load.block_tokens,
            settings.floor_fraction,
            settings.floor_headroom_blocks,
        )
        self.is_noting = False
        self.samples_ns: dict[str, list[int]] = {}
        for name in SECTIONS:
            samples = self.samples_ns[name] = []
            setattr(self, name, self._timed(getattr(self, name), samples))

    def _timed(self, section: Callable[P, R], samples: list[int]) -> Callable[P, R]:
        clock = time.perf_counter_ns

        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            started = clock()
            result = section(*args, **kwargs)
            if self.is_noting:
                samples.append(clock() - started)
            return result

        return run


class RankDriver:
    """Moves messages between one rank and its link.

    Attributes:
        hinted_ns: rid -> when this rank knew the candidate.
        installs: what this rank has admitted and not freed, by rid.
        gone: rank 0: requests that hold nothing on any rank any more.
    """

    def __init__(self, load: AdmissionLoad, rank: int, link: RoundsLink) -> None:
        self.load = load
        self.rank = rank
        self.link = link
        self.cache = TimedCache(load, rank)
        self.hinted_ns: dict[int, int] = {}
        self.installs: dict[int, Install] = {}
        self.gone: set[int] = set()
        self.is_ready = False
        self.is_over = False
        self._inline = InlineRank(load.settings(rank, EPOCH), self.cache)

    # ── what serving and LOOP do ─────────────────────────────────────────────────────────────

    def announce(self, prompt: BenchPrompt) -> None:
        """Rank 0: hand a request in."""
        self.feed(Announced(Announce(prompt.rid, prompt.tokens, prompt.keys, b"")), now())

    def cancel(self, rid: int) -> None:
        """Rank 0: nobody waits for it any more."""
        self.feed(CancelRequested(rid), now())

    def publish(self, rid: int, end: int) -> None:
        """Play a wave's fence: the prompt is computed up to `end` on this rank."""
        points = [
            (rid, point)
            for states in self.installs[rid].states
            for point, _slot in states.snapshots
            if point <= end
        ]
        self._inline.wave_done(WaveDone(0, ((rid, end),), tuple(points)))
        self.cache.drain_changes()

    def free(self, rid: int) -> None:
        """Play the end of a transfer."""
        del self.installs[rid]
        for command in self._inline.freed(Freed(rid), now()):
            self._perform(command)
        self.cache.drain_changes()

    # ── rounds ───────────────────────────────────────────────────────────────────────────────

    def deadline(self) -> Instant | None:
        """Return when `tick` has something to do; None: only frames have."""
        return self._inline.next_deadline()

    def tick(self, at: Instant) -> None:
        """Begin a round if one is due at `at`."""
        self.feed(Tick(), at)

    def take_frames(self, at: Instant) -> bool:
        """Handle what has arrived; return whether there was anything."""
        frames = self.link.receive()
        for _rank, frame in frames:
            self.feed(_event_of(ROUNDS.decode(frame)), at)
        return bool(frames)

    def feed(self, event: OutsideEvent, at: Instant) -> None:
        """Handle one event, and send what follows."""
        for command in self._inline.steps(event, at):
            self._perform(command)

    def _perform(self, command: Outward) -> None:
        match command:
            case SendVote(vote=vote):
                self.link.send(LEADER, ROUNDS.encode(vote))
            case SendBroadcast(bcast=bcast):
                self._send_followers(bcast)
            case SendGathered(gathered=gathered):
                self._send_followers(gathered)
            case SendInstall(install=install):
                self.installs[install.rid] = install
            case Transition(rid=rid, old=Phase.ANNOUNCED, new=Phase.HINTED):
                self.hinted_ns[rid] = time.perf_counter_ns()
            case ReportGone(rid=rid):
                self.gone.add(rid)
            case ReportReady():
                self.is_ready = True
            case ShutDown():
                self.is_over = True
            case _:
                pass  # stories, and what only serving and LOOP want to know

    def _send_followers(self, message: RoundBcast | RoundGathered) -> None:
        frame = ROUNDS.encode(message)
        for rank in range(1, self.load.ranks):
            self.link.send(rank, frame)


def now() -> Instant:
    """Return the clock of all ranks: Linux gives every process of a host the same one."""
    return Instant(time.perf_counter())


def _event_of(message: RoundMessage) -> OutsideEvent:
    match message:
        case RoundBcast():
            return BroadcastReceived(message)
        case RoundVote():
            return VoteReceived(message)
        case RoundGathered():
            return GatheredReceived(message)
        case _:
            assert_never(message)
