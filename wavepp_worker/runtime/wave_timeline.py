"""Records what a WAVE process does, from the events and commands that pass through its loop.

    rounds    those that carried something, named by what the leader asked
    requests  installs
    request   every request's admission on this rank, phase by phase; they overlap

With one stage no round leaves the process, so none is seen.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from wavepp_worker.admission.commands import (
    Outward,
    SendBroadcast,
    SendGathered,
    SendInstall,
    Transition,
)
from wavepp_worker.admission.events import BroadcastReceived, GatheredReceived, OutsideEvent
from wavepp_worker.admission.phases import Phase
from wavepp_worker.obs.timeline import Recorder
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered


class _Round(Struct, frozen=True):
    bcast: RoundBcast
    began_at: float


class WaveTimeline:
    """One rank's WAVE."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._round: _Round | None = None  # at most one is open

    def took(self, event: OutsideEvent, began_at: float, ended_at: float) -> None:
        """Look at an event that was handled: on a follower a round begins and ends with one."""
        if isinstance(event, BroadcastReceived):
            self._round = _Round(event.bcast, began_at)
        elif isinstance(event, GatheredReceived):
            self._end_round(event.gathered, ended_at)

    def perform(self, command: Outward, now: float) -> None:
        """Look at a command, before it is performed."""
        match command:
            case SendBroadcast(bcast=bcast):
                self._round = _Round(bcast, now)
            case SendGathered(gathered=gathered):
                self._end_round(gathered, now)
            case SendInstall(install=install):
                self._recorder.instant(
                    "requests",
                    "install",
                    now,
                    rid=install.rid,
                    ino=install.ino,
                    prompt_tokens=install.prompt_tokens,
                    endpoint=install.endpoint,
                    copies=len(install.copies),
                )
            case Transition():
                self._enter(command)

    def flush_if_due(self, now: float) -> None:
        """Write to the file about once a second."""
        self._recorder.flush_if_due(now)

    def _end_round(self, gathered: RoundGathered, now: float) -> None:
        opened, self._round = self._round, None
        if opened is None or opened.bcast.round != gathered.round:
            return
        asked, told = _asked(opened.bcast), _told(gathered)
        if name := ", ".join(asked or told):
            self._recorder.ran(
                "rounds", name, opened.began_at, now, round=gathered.round, **asked, **told
            )

    def _enter(self, step: Transition) -> None:
        recorder, rid = self._recorder, step.rid
        if step.old is None:
            recorder.begin("request", f"request {rid}", rid, step.at, rid=rid)
        else:
            recorder.end("request", step.old, rid, step.at, cause=step.cause)
        if step.new is Phase.DONE:
            recorder.end("request", f"request {rid}", rid, step.at)
        else:
            recorder.begin("request", step.new, rid, step.at)


def _asked(bcast: RoundBcast) -> dict[str, list[Any]]:
    """Return what the leader asked for, by kind; nothing in a heartbeat."""
    facts: dict[str, list[Any]] = {}
    if bcast.announces:
        facts["announce"] = [entry.rid for entry in bcast.announces]
    for record in bcast.records:
        told = f"rid {record.rid} attempt {record.attempt} at {record.endpoint}"
        facts.setdefault(record.phase.name.lower(), []).append(told)
    if bcast.cancels:
        facts["cancel"] = list(bcast.cancels)
    return facts


def _told(gathered: RoundGathered) -> dict[str, int]:
    """Return how much all votes together say, by kind."""
    votes = gathered.votes
    counts = {
        "hints": sum(len(vote.hints) for vote in votes),
        "votes": sum(len(vote.votes) for vote in votes),
        "installed": sum(len(vote.installed) for vote in votes),
        "gone": sum(len(vote.gone) for vote in votes),
    }
    return {kind: count for kind, count in counts.items() if count}
