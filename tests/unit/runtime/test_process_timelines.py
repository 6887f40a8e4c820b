"""What a LOOP and a WAVE process tell a timeline of the events and commands they see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wavepp_worker.admission.commands import SendBroadcast, SendGathered, SendInstall, Transition
from wavepp_worker.admission.events import BroadcastReceived, GatheredReceived, OutsideEvent
from wavepp_worker.admission.phases import Phase
from wavepp_worker.base.types import Instant
from wavepp_worker.executor.commands import DropHold, OpenHold, RunWave
from wavepp_worker.executor.events import HoldEnded
from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.obs.timeline import Recorder
from wavepp_worker.obs.trace_file import merge_parts
from wavepp_worker.runtime.gaps import CopyMarks, WaveMarks
from wavepp_worker.runtime.loop_timeline import LoopTimeline, new_marks
from wavepp_worker.runtime.wave_timeline import WaveTimeline
from wavepp_worker.wire.mailbox import Install
from wavepp_worker.wire.rounds import (
    AnnounceEntry,
    HintVote,
    Record,
    RecordPhase,
    RoundBcast,
    RoundGathered,
    RoundVote,
)
from wavepp_worker.wire.waves import SpanEntry, WaveHeader


def recorder(folder: Path, role: str) -> Recorder:
    (folder / "worker-1").mkdir()
    return Recorder(folder / "worker-1", worker=1, role=role, rank=0)


def events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    merge_parts(folder, folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return [event for event in trace if event["ph"] in kinds]


# ── LOOP ─────────────────────────────────────────────────────────────────────────────────────


def run_wave(wave: int, rid: int, length: int) -> RunWave:
    return RunWave(wave, (WaveChunk(rid, 0, length, ((0,),)),), 64)


def ran(
    wave: int, began_at: float, ended_at: float, copying: tuple[tuple[float, float], ...] = ()
) -> WaveMarks:
    return WaveMarks(
        wave=wave, asked_at=began_at, received_at=began_at, began_at=began_at, ended_at=ended_at,
        sent_at=ended_at, copying=copying,
    )  # fmt: skip


def test_a_stage_tells_its_waves_and_the_gaps_between_them(tmp_path: Path) -> None:
    made, marks = recorder(tmp_path, "loop"), new_marks()
    timeline = LoopTimeline(made, marks)
    timeline.perform(run_wave(1, 7, 32), 1.0)
    marks.append(ran(1, 2.0, 3.0))
    timeline.take(WaveHeader(1, 2, 16, 64, (SpanEntry(8, 2, 0, 16),)), 4.0)
    timeline.look(4.5)
    timeline.perform(run_wave(2, 8, 16), 6.0)
    marks.append(CopyMarks(began_at=6.0, ended_at=6.5, offloads=1, onboards=2))
    marks.append(ran(2, 6.5, 7.0, ((6.0, 6.5),)))
    timeline.close(8.0)
    slices = events(tmp_path, "X")
    zero = slices[0]["ts"] / 1e6 - 2.0  # the trace begins with the recorder
    assert [
        (each["tid"], each["name"], round(each["ts"] / 1e6 - zero, 3), each["dur"] / 1e6)
        for each in slices
    ] == [
        (1, "wave 1", 2.0, 1.0),
        (2, "copies", 6.0, 0.5),
        (1, "no header", 3.0, 1.0),
        (1, "not installed", 4.0, 2.0),
        (1, "copy", 6.0, 0.5),
        (1, "wave 2", 6.5, 0.5),
    ]
    assert slices[0]["args"] == {
        "wave": 1, "tokens": 32, "budget": 64, "rids": [7], "spans": ["7: 0+32"],
    }  # fmt: skip
    assert slices[1]["args"] == {"offloads": 1, "onboards": 2}
    assert slices[2]["args"] == {"cause": "no header", "before_wave": 2}
    queued = [(e["ph"], e["id2"]["local"], round(e["ts"] / 1e6 - zero, 3)) for e in
              events(tmp_path, "b", "e")]  # fmt: skip
    # Rank 0 has a header when it makes it, other ranks when it comes.
    assert queued == [("b", "0x1", 1.0), ("e", "0x1", 2.0), ("b", "0x2", 4.0), ("e", "0x2", 6.5)]


def test_copies_on_a_stream_of_their_own_are_no_reason_to_wait(tmp_path: Path) -> None:
    made, marks = recorder(tmp_path, "loop"), new_marks()
    timeline = LoopTimeline(made, marks)
    timeline.perform(run_wave(1, 7, 32), 1.0)
    timeline.perform(run_wave(2, 7, 32), 1.0)
    marks.append(ran(1, 2.0, 3.0))
    marks.append(CopyMarks(began_at=3.0, ended_at=3.5, offloads=1, onboards=0, is_enqueued=True))
    marks.append(ran(2, 4.0, 5.0))
    timeline.close(8.0)
    names = [each["name"] for each in events(tmp_path, "X")]
    assert names == ["wave 1", "enqueue copies", "launch", "wave 2"]


def test_a_hold_says_whether_a_cancel_ended_it(tmp_path: Path) -> None:
    timeline = LoopTimeline(recorder(tmp_path, "loop"), None)
    for rid in (5, 6):
        timeline.perform(OpenHold(rid, ((0,),), 16), 1.0)
    timeline.perform(DropHold(6), 2.0)
    for rid in (5, 6):
        timeline.take(HoldEnded(rid), 3.0)
    timeline.close(4.0)
    ends = [(e["id2"]["local"], e["args"]) for e in events(tmp_path, "e")]
    assert ends == [("0x5", {"was_dropped": False}), ("0x6", {"was_dropped": True})]


# ── WAVE ─────────────────────────────────────────────────────────────────────────────────────

HEARTBEAT = RoundBcast(1, 1)
ASKING = RoundBcast(
    1,
    2,
    announces=(AnnounceEntry(7, 1, 32, b""),),
    records=(Record(5, 1, RecordPhase.LEASE, 16), Record(6, 2, RecordPhase.LEASE, 0)),
)


def gathered(number: int, *hints: HintVote) -> RoundGathered:
    return RoundGathered(1, number, (RoundVote(1, number, 0, hints=hints), RoundVote(1, number, 1)))


def test_the_leader_tells_rounds_that_carried_something(tmp_path: Path) -> None:
    made = recorder(tmp_path, "wave")
    timeline = WaveTimeline(made)
    timeline.perform(SendBroadcast(HEARTBEAT), 1.0)
    timeline.perform(SendGathered(gathered(1)), 2.0)
    timeline.perform(SendBroadcast(ASKING), 3.0)
    timeline.perform(SendGathered(gathered(2)), 4.0)
    timeline.perform(SendBroadcast(RoundBcast(1, 3)), 5.0)
    timeline.perform(SendGathered(gathered(3, HintVote(7, 16))), 6.0)
    made.close()
    slices = events(tmp_path, "X")
    assert [(each["name"], each["dur"], each["args"]) for each in slices] == [
        ("announce, lease", 1e6, {
            "round": 2, "announce": [7],
            "lease": ["rid 5 attempt 1 at 16", "rid 6 attempt 2 at 0"],
        }),
        ("hints", 1e6, {"round": 3, "hints": 1}),
    ]  # fmt: skip


def test_a_follower_tells_the_same_rounds(tmp_path: Path) -> None:
    made = recorder(tmp_path, "wave")
    timeline = WaveTimeline(made)
    came: list[OutsideEvent] = [
        BroadcastReceived(HEARTBEAT), GatheredReceived(gathered(1)),
        BroadcastReceived(ASKING), GatheredReceived(gathered(2)),
    ]  # fmt: skip
    for at, event in enumerate(came):
        timeline.took(event, float(at), at + 0.5)
    made.close()
    assert [(each["name"], each["dur"]) for each in events(tmp_path, "X")] == [
        ("announce, lease", 1.5e6)
    ]


def test_a_requests_phases_lie_within_it(tmp_path: Path) -> None:
    made = recorder(tmp_path, "wave")
    timeline = WaveTimeline(made)
    steps = [Phase.ANNOUNCED, Phase.HINTED, Phase.ADMITTED, Phase.DONE]
    for at, (old, new) in enumerate(zip([None, *steps], steps, strict=False), 1):
        timeline.perform(Transition(7, old, new, Instant(float(at)), "why"), 99.0)
    timeline.perform(SendInstall(Install(3, 7, 32, 16, ((0, 1),))), 3.0)
    made.close()
    told = [(e["ph"], e["name"]) for e in events(tmp_path, "b", "e")]
    assert told == [
        ("b", "request 7"), ("b", "announced"), ("e", "announced"), ("b", "hinted"),
        ("e", "hinted"), ("b", "admitted"), ("e", "admitted"), ("e", "request 7"),
    ]  # fmt: skip
    (install,) = events(tmp_path, "i")
    assert install["args"] == {
        "rid": 7, "ino": 3, "prompt_tokens": 32, "endpoint": 16, "copies": 0,
    }  # fmt: skip
