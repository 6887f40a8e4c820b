"""AdmissionMachine: one rank's part in deciding which requests run, and from which endpoint.

    arrivals ──▶ Leader ── RoundBcast ──▶ Replica of every rank ── RoundVote ──▶ Leader
                   ▲                           │ merge(all votes)                   │
                   └──── verdicts ─────────────┴──▶ Install to LOOP ◀── RoundGathered

Pure: `handle(event, now)` returns commands and nothing happens elsewhere.  A section command is
the last of its list; its result must be the next event.  With one rank the same paths run, and
nothing is sent.  The WAVE process drives it through `sections.InlineRank`.  [P-ADMISSION]
"""

from __future__ import annotations

from typing import assert_never

from wavepp_worker.admission.commands import (
    Command,
    SendBroadcast,
    SendCacheView,
    SendGathered,
    SendVote,
    ShutDown,
)
from wavepp_worker.admission.events import (
    Announced,
    Asked,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    SectionResult,
    SequenceFreed,
    ShutdownRequested,
    Tick,
    ViewRequested,
    VoteReceived,
)
from wavepp_worker.admission.flow import Flow
from wavepp_worker.admission.leader import Leader
from wavepp_worker.admission.replica import Replica
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.errors import InvariantError, PeerError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered, RoundVote


class AdmissionMachine:
    """Leader and follower logic of one rank; single owner, deterministic.

    Attributes:
        round_started_at: leader: when the round began that still lacks votes, else None.  The
            driver gives up on a rank that does not answer for the collective timeout.
        is_stopped: a shutdown broadcast was applied; everything else is ignored.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.round_started_at: Instant | None = None
        self.is_stopped = False
        self._out: list[Command] = []
        self._flow: Flow[None] | None = None  # suspended at a section
        self._replica = Replica(settings, self._out.append)
        self._leader = (
            Leader(settings, self._replica, self._out.append) if settings.is_leader else None
        )
        self._votes: dict[int, RoundVote] = {}  # leader: of the open round
        self._last_start: Instant | None = None
        self._stale_count = 0

    def handle(self, event: OutsideEvent | SectionResult, now: Instant) -> list[Command]:
        """Return what follows from `event`.

        Raises:
            InvariantError: the program is wrong, on this rank or on another one.
            PeerError: another rank failed, or the rounds plane lost a message.
        """
        if isinstance(event, SectionResult):
            check(self._flow is not None, "a section result came unasked", event=event)
            self._advance(event)
        else:
            check(self._flow is None, "a section was not answered", event=event)
            if not self.is_stopped:
                self._flow = self._begin(event, now)
                self._advance(None)
        commands = self._out.copy()
        self._out.clear()
        return commands

    def next_deadline(self) -> Instant | None:
        """Return when the leader's next round is due; None while one is open, and on followers."""
        if self._leader is None or self.is_stopped or self.round_started_at is not None:
            return None
        if self._last_start is None:
            return Instant(0.0)
        return Instant(self._last_start + self._leader.spacing_s())

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by their metric names."""
        counts = self._replica.counts
        stats = {
            "wavepp_rounds_total": float(self._replica.round),
            "wavepp_admitted_total": float(self._replica.ino),
            "wavepp_admitted_candidate_tokens_total": float(counts["candidate_tokens"]),
            "wavepp_admitted_attempts_total": float(counts["attempts"]),
            "wavepp_stale_messages_total": float(self._stale_count),
            "wavepp_requests": float(len(self._replica.requests)),
        }
        if self._leader is not None:
            stats["wavepp_queue_requests"] = float(len(self._leader.queue))
            stats["wavepp_pending_requests"] = float(len(self._leader.queue.pending))
            for name, count in self._leader.counts.items():
                stats[f"wavepp_admission_{name}_total"] = float(count)
            for spacing, count in self._leader.round_counts.items():
                stats[f'wavepp_spaced_rounds_total{{spacing="{spacing}"}}'] = float(count)
        return stats

    def oldest_wait_s(self, now: Instant) -> float:
        """Return how long the oldest request waits that is not admitted; 0 without one."""
        arrived_at = self._lead().oldest_arrival_at()
        return 0.0 if arrived_at is None else now - arrived_at

    def check_invariants(self) -> None:
        """Check what must hold between events.  [I26, I29]"""
        for request in self._replica.requests.values():
            request.check_invariants()
        if self._leader is not None:
            self._leader.check_invariants()

    # ── events ───────────────────────────────────────────────────────────────────────────────

    def _advance(self, result: SectionResult | None) -> None:
        flow = self._flow
        if flow is None:
            raise InvariantError("no flow to advance")
        try:
            section = next(flow) if result is None else flow.send(result)
        except StopIteration:
            self._flow = None
        else:
            self._out.append(section)

    def _begin(self, event: OutsideEvent, now: Instant) -> Flow[None]:
        match event:
            case Announced(announce=announce):
                self._lead().announce(announce, now)
            case CancelRequested(rid=rid):
                self._lead().cancel(rid)
            case Asked(may_refuse=may_refuse):
                self._lead().ask(may_refuse=may_refuse)
            case ViewRequested(number=number):
                self._lead().request_view(number)
            case ShutdownRequested(reason=reason):
                self._lead().request_shutdown(reason)
            case Tick():
                deadline = self.next_deadline()
                if deadline is not None and now >= deadline:
                    yield from self._start_round(now)
            case VoteReceived(vote=vote):
                yield from self._take_vote(vote, now)
            case BroadcastReceived(bcast=bcast):
                yield from self._follow(bcast, now)
            case GatheredReceived(gathered=gathered):
                yield from self._follow_merge(gathered, now)
            case SequenceFreed(rid=rid):
                yield from self._replica.freed(rid, now)
            case _:
                assert_never(event)

    def _lead(self) -> Leader:
        if self._leader is None:
            raise InvariantError(f"rank {self.settings.rank} was given an event for the leader")
        return self._leader

    # ── leader ───────────────────────────────────────────────────────────────────────────────

    def _start_round(self, now: Instant) -> Flow[None]:
        bcast = self._lead().build()
        self._last_start = now
        if self.settings.stages > 1:
            self._out.append(SendBroadcast(bcast))
        if bcast.shutdown:
            self._stop(bcast.reason)
            return
        self.round_started_at = now
        vote = yield from self._apply(bcast, now)
        yield from self._collect(vote, now)

    def _take_vote(self, vote: RoundVote, now: Instant) -> Flow[None]:
        self._lead()
        is_expected = (
            vote.epoch == self.settings.epoch
            and self.round_started_at is not None
            and vote.round == self._replica.round
            and 0 <= vote.rank < self.settings.stages
            and vote.rank not in self._votes
        )
        if not is_expected:
            self._note_stale("admission.stale_vote")
            return
        if vote.fatal:  # at once: the other ranks may never answer this round
            raise PeerError(f"rank {vote.rank} failed: {vote.fatal}")
        yield from self._collect(vote, now)

    def _collect(self, vote: RoundVote, now: Instant) -> Flow[None]:
        self._votes[vote.rank] = vote
        stages = self.settings.stages
        if len(self._votes) < stages:
            return
        votes = tuple(self._votes[rank] for rank in range(stages))
        self._votes.clear()
        self.round_started_at = None
        gathered = RoundGathered(self.settings.epoch, self._replica.round, votes)
        if stages > 1:
            self._out.append(SendGathered(gathered))
        verdicts = yield from self._replica.merge(gathered, now)
        self._lead().decide(votes, verdicts, now)

    # ── every rank ───────────────────────────────────────────────────────────────────────────

    def _follow(self, bcast: RoundBcast, now: Instant) -> Flow[None]:
        check(self._leader is None, "the leader was sent a broadcast", round=bcast.round)
        if bcast.epoch != self.settings.epoch or bcast.round <= self._replica.round:
            self._note_stale("admission.stale_broadcast")
            return
        if bcast.round != self._replica.round + 1:
            raise PeerError(f"round {bcast.round} came after round {self._replica.round}")
        if bcast.shutdown:
            self._stop(bcast.reason)
            return
        vote = yield from self._apply(bcast, now)
        self._out.append(SendVote(vote))

    def _follow_merge(self, gathered: RoundGathered, now: Instant) -> Flow[None]:
        check(self._leader is None, "the leader was sent its own votes", round=gathered.round)
        is_open = self._replica.open_bcast is not None
        is_expected = gathered.epoch == self.settings.epoch and is_open
        if not is_expected or gathered.round != self._replica.round:
            self._note_stale("admission.stale_gathered")
            return
        yield from self._replica.merge(gathered, now)

    def _apply(self, bcast: RoundBcast, now: Instant) -> Flow[RoundVote]:
        if bcast.view_request:
            self._out.append(SendCacheView(bcast.view_request))
        return (yield from self._replica.apply(bcast, now))

    def _note_stale(self, name: str) -> None:
        """A frame of the past, or of another epoch, changes nothing.  [I32]"""
        mark(name)
        self._stale_count += 1

    def _stop(self, reason: str) -> None:
        self.is_stopped = True
        self._out.append(ShutDown(reason))
