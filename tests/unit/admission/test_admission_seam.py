"""The seam between machine and cache: what sections, votes, Installs and WaveDone carry along."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest

from tests.unit.admission.real import RealFleet, dense, states
from tests.unit.admission.rig import B, Call, Fleet, make_settings
from wavepp_worker.admission import limits
from wavepp_worker.admission.commands import ReportReady, ReportRejected
from wavepp_worker.admission.decide import Action
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.base import marks
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.wire.mailbox import WaveDone
from wavepp_worker.wire.rounds import FLAG_NO_FLOOR


def test_votes_tell_what_kind_of_rank_this_is() -> None:
    fleet = RealFleet([dense(40)], [dense(30), states(9)], [states(9)])
    kinds = [(v.is_sparse, v.has_states) for v in fleet.leader._votes]
    assert kinds == [(False, False), (True, True), (True, True)]
    assert [v.total_tokens for v in fleet.leader._votes] == [40 * B, 30 * B, UNLIMITED_TOKENS]
    assert [v.available_tokens for v in fleet.votes] == [30 * B, UNLIMITED_TOKENS]
    assert fleet.sent(ReportReady) == [ReportReady(30 * B)]


def test_a_worker_of_states_only_has_no_limit_on_tokens() -> None:
    """A50: nothing is rejected for its length, nothing is oversized, no headroom is missing."""
    fleet = RealFleet(
        [states(9)], [states(9)], headroom_tokens=1 << 40, floor_fraction=0.1, block_tokens=64
    )
    fleet.ask_tokens(1, bytes(4 * 500_000))
    fleet.round(2)
    assert fleet.records[0].flags & FLAG_NO_FLOOR == 0
    assert fleet.is_admitted(1)
    assert not [c for c in fleet.outward[0] if isinstance(c, ReportRejected)]


def test_points_and_states_travel_with_the_request() -> None:
    """The leader asks for points iff some rank keeps states; only rank 0's LOOP gets them."""
    fleet = Fleet(2, snapshot_interval_tokens=4 * B)
    fleet.caches[1].has_states = True
    fleet.round()
    fleet.announce(1)
    fleet.round(2)
    points = (16, 32, 36)
    assert [cache.points[1] for cache in fleet.caches] == [points, points]
    installs = [installs[1].install for installs in fleet.installs]
    assert [install.snapshot_points for install in installs] == [points, ()]
    assert [len(install.states) for install in installs] == [0, 1]


def test_no_points_where_no_rank_keeps_states() -> None:
    fleet = Fleet(2, sparse=True)  # a sliding window is sparse and keeps none
    fleet.round()
    fleet.announce(1)
    fleet.round(2)
    assert [cache.points[1] for cache in fleet.caches] == [(), ()]


class TestWaveDone:
    def test_written_states_are_published_with_their_request(self) -> None:
        fleet = Fleet(1)
        fleet.ranks[0].wave_done(WaveDone(3, ((1, 8), (2, 20)), ((2, 16), (1, 8), (2, 20))))
        assert fleet.caches[0].calls == [
            Call("publish", 1, 8),
            Call("snapshot", 1, 8),
            Call("publish", 2, 20),
            Call("snapshot", 2, 16),
            Call("snapshot", 2, 20),
        ]

    def test_a_state_of_a_request_that_did_not_run_is_a_bug(self) -> None:
        with pytest.raises(InvariantError, match="did not run"):
            Fleet(1).ranks[0].wave_done(WaveDone(3, ((1, 8),), ((2, 8),)))


def test_declared_marks_are_those_that_the_package_sets() -> None:
    """A name that no line sets would make every campaign look incomplete."""
    folder = Path(limits.__file__).parent
    written = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r'"(admission\.[a-z_]+)"', path.read_text())
    }
    verdicts = {f"admission.{action}" for action in Action}
    granted = {f"admission.{name}" for name in ("solo", "last_resort", "oversized")}
    assert sorted(written | verdicts | granted) == list(marks.ADMISSION_MARKS)


def test_the_time_of_each_section_is_measured_by_the_lent_clock() -> None:
    """Every reading is a second later, so each run of a section takes one second."""
    fleet, clock = RealFleet([dense(40)]), count()
    fleet.ranks[0] = rank = InlineRank(
        make_settings(headroom_tokens=0), fleet.books[0], lambda: float(next(clock))
    )
    fleet.ask(1, range(3))
    fleet.round(3)
    install = fleet.installs[0][1].install
    rank.wave_done(WaveDone(1, ((1, install.prompt_tokens),)))
    fleet.free(1)
    stats = rank.stats()
    runs = dict.fromkeys(
        ("learn", "probe", "acquire", "prepare", "commit", "materialize", "publish", "free"), 1
    ) | {"forget": 1, "trim": 0, "release": 0, "capacity": 3}
    for name, number in runs.items():
        assert stats[f'wavepp_sections_total{{section="{name}"}}'] == number, name
        assert stats[f'wavepp_section_seconds_total{{section="{name}"}}'] == number, name
    assert sum(name.startswith("wavepp_sections_total") for name in stats) == len(runs)


def test_without_a_clock_no_section_is_measured() -> None:
    fleet = RealFleet([dense(40)])
    assert not [name for name in fleet.ranks[0].stats() if "section" in name]
