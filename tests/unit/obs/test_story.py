"""Stories: phases from two sources, in one line."""

from __future__ import annotations

import pytest

from wavepp_worker.obs.story import PHASES, Story
from wavepp_worker.wire.mailbox import Finished, Timeline


def told(timeline: Timeline) -> Story:
    story = Story("r1", 100.0)
    story.announced(7, 96, 64, 100.5)
    story.take(Finished(7, 32, 5, -0.1, timeline))
    story.end("served", 106.0)
    return story


def test_a_served_request_is_told_phase_by_phase() -> None:
    story = told(Timeline(100.6, 102.0, 103.0, 105.0, leased_at=101.0, attempts=2))
    story.reach("hold", 110.0)
    assert [phase.name for phase in story.phases] == list(PHASES)
    assert [phase.seconds for phase in story.phases] == [0.5, 0.5, 1.0, 1.0, 2.0, 1.0, 4.0]
    assert all(
        a.ended_at == b.began_at for a, b in zip(story.phases, story.phases[1:], strict=False)
    )
    assert story.seconds == 10.0
    assert str(told(Timeline(100.6, 102.0, 103.0, 105.0, leased_at=101.0, attempts=2))) == (
        "request=r1 seconds=6.000 prompt_tokens=96 expected=64 endpoint=32 computed=64 attempts=2"
        " hash_ms=500.0 queue_ms=500.0 lease_ms=1000.0 wait_ms=1000.0 execution_ms=2000.0"
        " handoff_ms=1000.0"
    )


def test_a_time_that_was_not_told_joins_its_neighbour() -> None:
    queued = told(Timeline(100.6, 102.0, 103.0, 105.0))
    assert {phase.name: phase.seconds for phase in queued.phases} == {
        "hash": 0.5, "queue": 1.5, "wait": 1.0, "execution": 2.0, "handoff": 1.0,
    }  # fmt: skip
    silent = told(Timeline())
    assert [phase.name for phase in silent.phases] == ["hash", "handoff"]
    assert silent.seconds == queued.seconds == 6.0


def test_no_phase_is_negative() -> None:
    story = told(Timeline(99.0, 90.0, 107.0, 80.0))
    assert min(phase.seconds for phase in story.phases) == 0.0
    assert story.seconds == 7.0


def test_an_unanswered_request_says_how_long_nothing_was_heard() -> None:
    story = Story("r1", 100.0)
    story.announced(7, 96, 64, 100.5)
    story.end("timeout", 103.0)
    assert str(story) == (
        "request=r1 seconds=3.000 prompt_tokens=96 expected=64 hash_ms=500.0 unanswered_ms=2500.0"
    )


def test_a_refused_request_has_no_size() -> None:
    story = Story("r1", 100.0)
    story.end("bad_tokens", 100.25)
    assert str(story) == "request=r1 seconds=0.250 hash_ms=250.0"


@pytest.mark.parametrize(
    ("given", "shown"), [("a\nb c\x1b[0m", "a?b?c?[0m"), ("x" * 1000, "x" * 64), ("", "")]
)
def test_a_clients_id_cannot_break_a_line(given: str, shown: str) -> None:
    assert Story(given, 0.0).request_id == shown
