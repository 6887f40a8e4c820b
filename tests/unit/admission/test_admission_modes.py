"""The ladder's lower rungs: one request at a time, and only when the executor asks.  [22]"""

from __future__ import annotations

import pytest

from tests.unit.admission.rig import Fleet, ScriptedCache
from wavepp_worker.admission.commands import SendAdmitting, TellAsker
from wavepp_worker.admission.events import Asked
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.wire.mailbox import Refused, Waiting


class WalkingCache(ScriptedCache):
    """Answers walks, and no hints."""

    def walk(self, rid: int, cap: int | None = None) -> int:
        self._call("walk", rid)
        return super().hint(rid, cap)

    def hint(self, rid: int, cap: int | None = None) -> int:
        raise AssertionError("the naive rung walks the tree")


def naive(stages: int = 2) -> Fleet:
    fleet = Fleet(stages, [WalkingCache() for _ in range(stages)], mode="naive")
    fleet.round()
    return fleet


def told(fleet: Fleet) -> list[object]:
    """Return what LOOP0 was told, and forget it."""
    sent = [command.message for command in fleet.sent(TellAsker)]  # type: ignore[attr-defined]
    fleet.outward[0].clear()
    return sent


def test_waves_opens_one_attempt_at_a_time_and_does_not_wait_for_acknowledgements() -> None:
    fleet = Fleet(2, mode="waves")
    fleet.round()
    fleet.announce(1, 2, 3)
    fleet.round(4)
    assert [[r.rid for r in bcast.records] for bcast in fleet.bcasts[1:]] == [[], [1], [2], [3]]
    assert [c.count for c in fleet.sent(SendAdmitting)] == [1, 0]  # type: ignore[attr-defined]


def test_nothing_is_announced_before_it_is_asked_for() -> None:
    fleet = naive()
    fleet.announce(1, 2)
    assert told(fleet) == [Waiting(1), Waiting(2)]
    fleet.round(2)
    assert all(not bcast.announces for bcast in fleet.bcasts)
    fleet.feed(0, Asked(may_refuse=True))
    fleet.round()
    assert [entry.rid for entry in fleet.bcasts[-1].announces] == [1]
    assert fleet.installs[0] == {}
    fleet.round()
    assert list(fleet.installs[0]) == list(fleet.installs[1]) == [1]
    assert told(fleet) == [Waiting(1)]
    assert [cache.names(1) for cache in fleet.caches] == [
        ["learn", "walk", "acquire", "prepare", "commit", "materialize"]
    ] * 2
    fleet.round(3)
    assert list(fleet.installs[0]) == [1]  # one answer for one question


def test_rounds_follow_at_once_while_loop_waits() -> None:
    fleet = naive(1)
    fleet.announce(1)
    assert fleet.ranks[0].next_deadline() >= fleet.now + 0.04  # type: ignore[operator]
    fleet.feed(0, Asked(may_refuse=True))
    began = fleet.now
    fleet.round(2)
    assert list(fleet.installs[0]) == [1]
    assert fleet.now - began < 0.002


def test_asking_for_nothing_is_refused_at_once() -> None:
    fleet = naive()
    fleet.announce(1)
    fleet.cancel(1)
    told(fleet)
    fleet.feed(0, Asked(may_refuse=False))
    assert told(fleet) == [Refused()]


def test_the_next_request_answers_when_the_first_is_cancelled() -> None:
    fleet = naive()
    fleet.announce(1, 2)
    fleet.feed(0, Asked(may_refuse=True))
    fleet.round()
    fleet.cancel(1)
    told(fleet)
    fleet.round(4)
    assert list(fleet.installs[0]) == [2]
    assert Refused() not in told(fleet)


def test_a_request_without_room_is_refused_while_there_is_other_work() -> None:
    fleet = naive()
    fleet.announce(1)
    fleet.round()
    for cache in fleet.caches:
        cache.available = 8
    fleet.feed(0, Asked(may_refuse=True))
    fleet.round(2)
    assert told(fleet)[-1] == Refused()
    fleet.feed(0, Asked(may_refuse=False))
    fleet.round(3)
    assert told(fleet) == []
    for cache in fleet.caches:
        cache.available = 1_000
    fleet.round(3)
    assert list(fleet.installs[0]) == [1]


def test_a_shortfall_is_refused_and_tried_again_when_asked() -> None:
    fleet = naive()
    fleet.caches[1].failures = [("prepare", 1)]
    fleet.announce(1)
    fleet.feed(0, Asked(may_refuse=True))
    fleet.round(4)
    assert told(fleet)[-1] == Refused()
    fleet.round(3)
    assert fleet.installs[0] == {}
    fleet.feed(0, Asked(may_refuse=False))
    fleet.wait(1.0)
    fleet.round(4)
    assert list(fleet.installs[0]) == [1]


def test_asking_twice_and_asking_a_worker_that_admits_ahead_are_defects() -> None:
    fleet = naive()
    fleet.announce(1)
    fleet.feed(0, Asked(may_refuse=True))
    with pytest.raises(InvariantError, match="twice"):
        fleet.feed(0, Asked(may_refuse=True))
    with pytest.raises(InvariantError, match="ahead"):
        Fleet(1).feed(0, Asked(may_refuse=True))
