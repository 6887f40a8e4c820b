"""Scripts for one LoopMachine: events in, exactly these commands out."""

from __future__ import annotations

import struct

import msgspec
import pytest

from wavepp_worker.base.errors import DeviceError, InvariantError, PeerError
from wavepp_worker.base.marks import hits
from wavepp_worker.base.types import Epoch, Instant, Rank
from wavepp_worker.executor.commands import (
    DropHold,
    LoopCommand,
    OpenHold,
    RunCopies,
    RunWave,
    SendResult,
    SendToFollowers,
    ToServing,
    ToWave,
)
from wavepp_worker.executor.events import HoldEnded, LoopEvent, Tick
from wavepp_worker.executor.loop import LoopMachine, LoopSettings
from wavepp_worker.executor.ports import WaveChunk, WaveFenced
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.wire.mailbox import (
    Admitting,
    Copy,
    Drop,
    Finished,
    Freed,
    Install,
    Sampling,
    Timeline,
    WaveDone,
)
from wavepp_worker.wire.waves import (
    SPAN_FIRST,
    SPAN_LAST,
    FirstToken,
    Release,
    SpanEntry,
    WaveHeader,
    WaveResult,
)

B = 4
COPIES = (Copy("onboard", 0, 9, 5),)
ONLY = SPAN_FIRST | SPAN_LAST


class Rig:
    """A machine with a clock that stands still unless told otherwise."""

    def __init__(self, rank: int = 0, stages: int = 1, *, budget: int = 16) -> None:
        settings = LoopSettings(
            rank=Rank(rank),
            stages=stages,
            epoch=Epoch(1),
            block_tokens=B,
            ring_waves=2 * stages,
            admit_timeout_s=5.0,
            stall_timeout_s=60.0,
        )
        planner = GreedyPlanner(budget, 4, B) if rank == 0 else None
        self.machine = LoopMachine(settings, planner)
        self.now = 100.0

    def send(self, *events: LoopEvent) -> list[LoopCommand]:
        commands: list[LoopCommand] = []
        for event in events:
            commands += self.machine.handle(event, Instant(self.now))
            self.machine.check_invariants()
        return commands

    def tick(self) -> list[LoopCommand]:
        return self.send(Tick())


def make_install(
    ino: int, rid: int, n: int, endpoint: int = 0, *, with_tokens: bool = False, **more: object
) -> Install:
    table = tuple(range(10 * rid, 10 * rid + -(-n // B)))
    tokens = struct.pack(f"<{n}I", *range(n)) if with_tokens else b""
    return Install(ino, rid, n, endpoint, (table,), tokens=tokens, **more)  # type: ignore[arg-type]


def make_header(wave: int, *spans: SpanEntry, budget: int = 16, epoch: int = 1) -> WaveHeader:
    return WaveHeader(epoch, wave, sum(span.length for span in spans), budget, spans)


def chunk(install: Install, start: int, length: int, **more: object) -> WaveChunk:
    tokens = install.tokens[4 * start : 4 * (start + length)]
    return WaveChunk(install.rid, start, length, install.tables, tokens, **more)  # type: ignore[arg-type]


def follower(rank: int = 1, stages: int = 2) -> Rig:
    return Rig(rank, stages)


# ── rank 0 and the whole life with P = 1 ────────────────────────────────────────────────────


def test_life_of_a_request_with_one_stage() -> None:
    rig = Rig()
    sampling = Sampling(temperature=0.5, seed=3)
    install = msgspec.structs.replace(
        make_install(1, 7, 10, 4, with_tokens=True, sampling=sampling),
        announced_at=97.0,
        admitted_at=98.0,
    )
    assert rig.send(install) == []
    run = RunWave(1, (chunk(install, 4, 6, wants_token=True, sampling=sampling),), 16)
    assert rig.tick() == [run]
    assert run.chunks[0].tokens == struct.pack("<6I", 4, 5, 6, 7, 8, 9)
    rig.now = 101.0
    assert rig.send(WaveFenced(1, ((7, 42, -0.5),))) == [
        ToWave(WaveDone(1, ((7, 10),))),
        OpenHold(7, install.tables, 10),
        ToServing(Finished(7, 4, 42, -0.5, Timeline(97.0, 98.0, 100.0, 101.0))),
    ]
    assert not rig.machine.is_idle
    assert rig.send(HoldEnded(7)) == [ToWave(Freed(7))]
    assert rig.machine.is_idle
    assert rig.tick() == []


def test_requests_that_arrive_together_share_a_wave() -> None:
    rig = Rig()
    first, second = make_install(1, 1, 5), make_install(2, 2, 6)
    rig.send(first, second)
    assert rig.tick() == [
        RunWave(
            1, (chunk(first, 0, 5, wants_token=True), chunk(second, 0, 6, wants_token=True)), 16
        )
    ]


def test_the_ring_holds_2p_waves_and_several_chunks_of_one_request() -> None:
    rig = Rig(0, 2, budget=4)
    rig.send(make_install(1, 1, 40))
    commands = rig.tick()
    headers = [each.message for each in commands if isinstance(each, SendToFollowers)]
    assert [type(each) for each in commands] == [SendToFollowers, RunWave] * 4
    assert [header.spans[0].start for header in headers] == [0, 4, 8, 12]
    assert [header.spans[0].flags for header in headers] == [SPAN_FIRST, 0, 0, 0]
    assert rig.tick() == []
    rig.send(WaveFenced(1), WaveFenced(2))  # own fences free no slot of the ring
    assert rig.tick() == []
    assert rig.send(WaveResult(1, 1)) == []
    assert len(rig.tick()) == 2
    with pytest.raises(InvariantError, match="retire in order"):
        rig.send(WaveResult(1, 3))


def test_the_last_chunk_is_flagged_and_may_end_inside_a_block() -> None:
    rig = Rig(0, 2, budget=4)
    rig.send(make_install(1, 1, 6))
    headers = [c.message for c in rig.tick() if isinstance(c, SendToFollowers)]
    assert headers == [
        make_header(1, SpanEntry(1, 1, 0, 4, SPAN_FIRST), budget=4),
        make_header(2, SpanEntry(1, 1, 4, 2, SPAN_LAST), budget=4),
    ]


def test_own_hold_may_end_before_the_answer_is_known() -> None:
    rig = Rig(0, 2)
    rig.send(make_install(1, 7, 8))
    rig.tick()
    rig.send(WaveFenced(1))
    assert rig.send(HoldEnded(7)) == [ToWave(Freed(7))]
    answer = WaveResult(1, 1, (FirstToken(7, 5, -1.0),))
    timeline = Timeline(scheduled_at=100.0, answered_at=100.0)
    assert rig.send(answer) == [ToServing(Finished(7, 0, 5, -1.0, timeline))]
    assert rig.machine.is_idle


def test_admitting_count_is_rank_0s_alone() -> None:
    assert Rig().send(Admitting(3)) == []
    with pytest.raises(InvariantError):
        follower().send(Admitting(3))
    with pytest.raises(InvariantError):
        Rig(0, 2).send(make_header(1, SpanEntry(1, 1, 0, 4, ONLY)))


# ── cancellation ────────────────────────────────────────────────────────────────────────────


def test_drop_before_any_wave_frees_at_once_and_tells_everyone() -> None:
    rig = Rig(0, 2)
    install = make_install(1, 7, 8, copies=COPIES)
    assert rig.send(install) == [RunCopies(COPIES)]  # copies belong to the cache  [S4]
    assert rig.send(Drop(7, 1)) == [SendToFollowers(Release(1, 7, 1)), ToWave(Freed(7))]
    assert rig.tick() == []
    assert rig.machine.is_idle


def test_drop_with_a_full_ring_needs_no_slot() -> None:  # S17
    rig = Rig(0, 2, budget=4)
    rig.send(make_install(1, 1, 40))
    rig.tick()
    assert rig.send(Drop(1, 1)) == [SendToFollowers(Release(1, 1, 1))]
    commands = rig.send(*(WaveFenced(wave) for wave in (1, 2, 3, 4)))
    assert commands == [
        *(ToWave(WaveDone(wave, ((1, 4 * wave),))) for wave in (1, 2, 3, 4)),
        ToWave(Freed(1)),
    ]
    assert rig.send(*(WaveResult(1, wave) for wave in (1, 2, 3, 4))) == []
    assert rig.tick() == []
    assert rig.machine.is_idle


def test_drop_after_the_last_span_drops_the_answer() -> None:
    before = hits["executor.answer_dropped"]
    rig = Rig(0, 2)
    rig.send(make_install(1, 7, 8))
    rig.tick()
    assert rig.send(Drop(7, 1)) == [SendToFollowers(Release(1, 7, 1))]
    assert rig.send(WaveFenced(1)) == [ToWave(WaveDone(1, ((7, 8),))), ToWave(Freed(7))]
    assert rig.send(WaveResult(1, 1, (FirstToken(7, 5, -1.0),))) == []
    assert hits["executor.answer_dropped"] == before + 1
    assert rig.machine.is_idle


def test_drop_after_own_freed_still_tells_the_others() -> None:
    rig = Rig(0, 2)
    rig.send(make_install(1, 7, 8))
    rig.tick()
    rig.send(WaveFenced(1), HoldEnded(7))
    assert rig.send(Drop(7, 1)) == [SendToFollowers(Release(1, 7, 1))]
    assert rig.send(WaveResult(1, 1, (FirstToken(7, 5, -1.0),))) == []


def test_drop_during_a_hold_ends_the_hold_and_then_frees() -> None:
    rig = Rig()
    rig.send(make_install(1, 7, 8))
    rig.tick()
    rig.send(WaveFenced(1, ((7, 5, -1.0),)))
    assert rig.send(Drop(7, 1)) == [DropHold(7)]
    assert rig.send(HoldEnded(7)) == [ToWave(Freed(7))]


# ── followers: crossing messages ────────────────────────────────────────────────────────────


def test_a_header_waits_for_the_install_and_what_follows_waits_behind_it() -> None:
    rig = follower()
    assert rig.send(make_header(1, SpanEntry(7, 1, 0, 8, ONLY))) == []
    assert rig.send(Release(1, 7, 1)) == []
    rig.now += 2.0
    install = make_install(1, 7, 8, copies=COPIES)
    assert rig.send(install) == [
        RunCopies(COPIES),
        RunWave(1, (chunk(install, 0, 8, wants_token=True),), 16, copies_before=1),
    ]
    assert rig.machine.stats()["wavepp_install_wait_seconds_total"] == 2.0
    assert rig.send(WaveFenced(1, ((7, 5, -1.0),))) == [
        ToWave(WaveDone(1, ((7, 8),))),
        ToWave(Freed(7)),
        SendResult(WaveResult(1, 1, (FirstToken(7, 5, -1.0),))),
    ]
    assert rig.machine.is_idle


def test_a_wave_waits_for_every_install_up_to_its_largest_ino() -> None:
    rig = follower()
    first, second = make_install(1, 7, 8), make_install(2, 8, 4)
    header = make_header(1, SpanEntry(7, 1, 0, 8, ONLY), SpanEntry(8, 2, 0, 4, ONLY))
    assert rig.send(header, first) == []
    assert [type(each) for each in rig.send(second)] == [RunWave]


def test_a_wave_names_the_copies_up_to_its_largest_ino() -> None:
    """Those of requests without a wave count as well; those of later Installs do not.  [FS-03]"""
    rig = follower()
    rig.send(
        make_install(1, 1, 8),
        make_install(2, 2, 8, copies=COPIES),
        make_install(3, 3, 4),
        Release(1, 4, 4),
        make_install(4, 4, 4, copies=COPIES),  # released before it came
        make_install(5, 5, 4, copies=COPIES),
        make_install(6, 6, 4, copies=COPIES),
    )
    waves = (
        make_header(1, SpanEntry(1, 1, 0, 4, SPAN_FIRST)),
        make_header(2, SpanEntry(5, 5, 0, 4, ONLY), SpanEntry(3, 3, 0, 4, ONLY)),
        make_header(3, SpanEntry(1, 1, 4, 4, SPAN_LAST)),
        make_header(4, SpanEntry(2, 2, 0, 8, ONLY), SpanEntry(6, 6, 0, 4, ONLY)),
    )
    runs = [each for each in rig.send(*waves) if isinstance(each, RunWave)]
    assert [(run.wave, run.copies_before) for run in runs] == [(1, 0), (2, 3), (3, 0), (4, 4)]


def test_release_before_install_is_kept() -> None:
    """S3, I48: the copies run, and the slots are freed as soon as they are known."""
    before = hits["executor.release_before_install"]
    rig = Rig(1, 3)
    assert rig.send(Release(1, 7, 1)) == []
    assert not rig.machine.is_idle
    install = make_install(1, 7, 8, copies=COPIES)
    assert rig.send(install) == [RunCopies(COPIES), ToWave(Freed(7))]
    assert hits["executor.release_before_install"] == before + 1
    assert rig.machine.is_idle


def test_release_after_freed_is_ignored() -> None:
    rig = Rig(1, 3)
    rig.send(make_install(1, 7, 8), make_header(1, SpanEntry(7, 1, 0, 8, ONLY)), WaveFenced(1))
    assert rig.send(HoldEnded(7)) == [ToWave(Freed(7))]
    assert rig.send(Release(1, 7, 1)) == []
    assert rig.machine.is_idle


def test_a_cancelled_wave_in_flight_still_runs_before_freed() -> None:  # S2
    rig = Rig(1, 3)
    install = make_install(1, 7, 8)
    rig.send(install)
    run = rig.send(make_header(1, SpanEntry(7, 1, 0, 4, SPAN_FIRST)))
    assert run == [RunWave(1, (chunk(install, 0, 4),), 16)]
    assert rig.send(Release(1, 7, 1)) == []
    assert rig.send(WaveFenced(1)) == [ToWave(WaveDone(1, ((7, 4),))), ToWave(Freed(7))]


def test_the_middle_stage_holds_but_neither_samples_nor_answers() -> None:
    rig = Rig(1, 3)
    install = make_install(1, 7, 8)
    assert rig.send(install, make_header(1, SpanEntry(7, 1, 0, 8, ONLY))) == [
        RunWave(1, (chunk(install, 0, 8),), 16)
    ]
    assert rig.send(WaveFenced(1)) == [
        ToWave(WaveDone(1, ((7, 8),))),
        OpenHold(7, install.tables, 8),
    ]


# ── what must stop the worker ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "span",
    [
        SpanEntry(7, 1, 4, 4, SPAN_LAST),  # gap
        SpanEntry(7, 1, 0, 12, SPAN_FIRST),  # beyond the prompt
        SpanEntry(7, 1, 0, 0, SPAN_FIRST),  # empty
        SpanEntry(7, 1, 0, 3, SPAN_FIRST),  # not the last, not a block's end
        SpanEntry(7, 1, 0, 8, SPAN_FIRST),  # the last, not flagged
        SpanEntry(7, 1, 0, 4, SPAN_LAST),  # flagged, not the last
        SpanEntry(8, 1, 0, 4, SPAN_FIRST),  # unknown rid of an installed ino
    ],
)
def test_a_span_that_does_not_fit_the_position_is_fatal(span: SpanEntry) -> None:
    rig = follower()
    rig.send(make_install(1, 7, 8))
    with pytest.raises(InvariantError):
        rig.send(make_header(1, span))


def test_a_span_after_a_release_is_fatal() -> None:
    rig = follower()
    rig.send(make_install(1, 7, 8), make_header(1, SpanEntry(7, 1, 0, 4, SPAN_FIRST)))
    rig.send(Release(1, 7, 1))
    with pytest.raises(InvariantError, match="position mismatch"):
        rig.send(make_header(2, SpanEntry(7, 1, 4, 4, SPAN_LAST)))


def test_lost_or_repeated_waves_and_installs_are_fatal() -> None:
    rig = follower()
    with pytest.raises(InvariantError, match="in order"):
        rig.send(make_install(2, 7, 8))
    rig = follower()
    rig.send(make_install(1, 7, 8))
    with pytest.raises(InvariantError, match="in order"):
        rig.send(make_header(2, SpanEntry(7, 1, 0, 8, ONLY)))


def test_wrong_answers_are_fatal() -> None:
    rig = follower()
    rig.send(make_install(1, 7, 8), make_header(1, SpanEntry(7, 1, 0, 8, ONLY)))
    with pytest.raises(InvariantError, match="one token per last span"):
        rig.send(WaveFenced(1))


def test_a_failed_forward_is_a_device_error_here_and_on_rank_0() -> None:
    rig = follower()
    rig.send(make_install(1, 7, 8), make_header(1, SpanEntry(7, 1, 0, 8, ONLY)))
    with pytest.raises(DeviceError, match="wave 1: it broke"):
        rig.send(WaveFenced(1, error="it broke"))
    leader = Rig(0, 2)
    with pytest.raises(DeviceError, match="wave 1: it broke"):
        leader.send(WaveResult(1, 1, error="it broke"))


def test_an_install_that_never_comes_is_fatal_after_t_admit() -> None:
    rig = follower()
    assert rig.machine.next_deadline() is None
    rig.send(make_header(1, SpanEntry(7, 1, 0, 8, ONLY)))
    assert rig.machine.next_deadline() == 105.0
    rig.now = 104.9
    assert rig.tick() == []
    rig.now = 105.0
    with pytest.raises(PeerError, match=r"wave 1 .*admit_timeout_s.*=\[\(7, 1\)\] last_ino=0"):
        rig.tick()


def test_a_stalled_ring_is_fatal_after_t_stall() -> None:
    rig = Rig(0, 2, budget=4)
    rig.send(make_install(1, 1, 40))
    rig.tick()
    rig.now = 150.0
    rig.send(WaveResult(1, 1))
    rig.tick()
    assert rig.machine.next_deadline() == 210.0
    rig.now = 210.0
    with pytest.raises(PeerError, match="stall_timeout_s"):
        rig.tick()


def test_an_idle_ring_never_stalls() -> None:
    rig = Rig(0, 2)
    rig.now = 1e6
    assert rig.tick() == []
    rig.send(make_install(1, 1, 4))
    rig.tick()
    assert rig.machine.next_deadline() == 1e6 + 60.0


def test_a_message_of_another_epoch_is_fatal() -> None:
    with pytest.raises(PeerError, match="epoch"):
        follower().send(make_header(1, SpanEntry(7, 1, 0, 8, ONLY), epoch=2))


def test_counters() -> None:
    rig = Rig(0, 1, budget=8)
    rig.send(make_install(1, 1, 10))
    rig.tick()
    stats = rig.machine.stats()
    assert stats["wavepp_ring_waves"] == 2
    assert stats["wavepp_tokens_computed_total"] == 0
    rig.send(WaveFenced(1), WaveFenced(2, ((1, 5, -1.0),)))
    stats = rig.machine.stats()
    assert stats["wavepp_tokens_computed_total"] == 10
    assert stats["wavepp_waves_total"] == 2
    assert stats["wavepp_ring_waves"] == 0
    assert stats["wavepp_installed_requests"] == 1


def test_occupancy_and_fill_can_be_derived() -> None:
    """Two waves under way for 3 s and one for 2 s more; 10 of 16 budgeted tokens."""
    rig = Rig(0, 1, budget=8)
    rig.send(make_install(1, 1, 10))
    rig.tick()
    rig.now += 3.0
    rig.send(WaveFenced(1))
    rig.now += 2.0
    rig.send(WaveFenced(2, ((1, 5, -1.0),)))
    rig.now += 50.0  # empty
    rig.send(make_install(2, 2, 8))
    rig.tick()
    stats = rig.machine.stats()
    assert stats["wavepp_ring_wave_seconds_total"] == 8.0
    assert stats["wavepp_ring_waves_max"] == 2
    assert stats["wavepp_wave_tokens_total"] == 18
    assert stats["wavepp_wave_budget_tokens_total"] == 24
