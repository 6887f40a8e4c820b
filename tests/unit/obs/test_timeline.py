"""Parts of a timeline: bounded in memory and on disk, and one trace of all that is there."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.obs.timeline import FLUSH_INTERVAL_S, Recorder, open_recorder
from wavepp_worker.obs.trace_file import Merged, merge_parts

WORKER = 77


def recorder(folder: Path, role: str = "loop", rank: int = 0, **bounds: int) -> Recorder:
    own = folder / f"worker-{WORKER}"
    own.mkdir(exist_ok=True)
    return Recorder(own, worker=WORKER, role=role, rank=rank, **bounds)


def merged(folder: Path) -> tuple[Merged, list[dict[str, Any]]]:
    found = merge_parts(folder, folder / "trace.json")
    trace = json.loads((folder / "trace.json").read_text())
    return found, [event for event in trace["traceEvents"] if event["ph"] != "M"]


def test_it_is_off_without_a_folder() -> None:
    assert open_recorder("", worker=WORKER, role="loop") is None


def test_a_folder_that_cannot_be_written_is_refused_by_its_knob(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"obs\.trace_folder"):
        open_recorder(str(tmp_path / "file"), worker=WORKER, role="loop")


def test_every_kind_of_event_reaches_the_trace(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    zero = json.loads(next(tmp_path.glob("*/loop0.jsonl")).read_text())["opened_at"]
    made.ran("device", "wave 1", zero + 1.0, zero + 1.25, tokens=7)
    made.instant("requests", "install", zero + 0.5, rid=3)
    made.begin("hold", "hold", 26, zero + 2.0)
    made.end("hold", "hold", 26, zero + 3.0)
    made.close()
    made.close()
    found, events = merged(tmp_path)
    assert found == Merged(processes=1, events=4, dropped=0)
    assert events == [
        {"ph": "X", "pid": 3, "tid": 1, "name": "wave 1", "ts": 1e6, "dur": 250_000.0,
         "args": {"tokens": 7}},
        {"ph": "i", "pid": 3, "tid": 3, "name": "install", "ts": 500_000.0, "s": "t",
         "args": {"rid": 3}},
        {"ph": "b", "pid": 3, "tid": 0, "name": "hold", "ts": 2e6, "cat": "hold",
         "id2": {"local": "0x1a"}},
        {"ph": "e", "pid": 3, "tid": 0, "name": "hold", "ts": 3e6, "cat": "hold",
         "id2": {"local": "0x1a"}},
    ]  # fmt: skip


def test_processes_are_named_by_role_and_rank_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    for role, rank in (("loop", 1), ("serving", 0), ("wave", 1), ("loop", 0), ("wave", 0)):
        recorder(tmp_path, role, rank).close()
    merge_parts(tmp_path, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[pid] for pid in sorted(names)] == [
        "serving", "WAVE_0", "LOOP_0", "WAVE_1", "LOOP_1",
    ]  # fmt: skip


def test_several_workers_are_kept_apart(tmp_path: Path) -> None:
    for worker in (9, 5):
        made = open_recorder(str(tmp_path), worker=worker, role="wave", rank=1)
        assert made is not None
        made.close()
    merge_parts(tmp_path, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {4: "WAVE_1 of worker 1", 1004: "WAVE_1 of worker 2"}


def test_a_full_buffer_drops_the_oldest_and_says_how_many(tmp_path: Path) -> None:
    made = recorder(tmp_path, events_max=3)
    for number in range(5):
        made.instant("requests", f"n{number}", 1.0)
    made.flush()
    made.instant("requests", "n5", 1.0)
    made.close()
    found, events = merged(tmp_path)
    assert [event["name"] for event in events] == ["n2", "n3", "n4", "n5"]
    assert found.dropped == 2


def test_the_files_of_a_process_are_bounded_and_hold_the_newest(tmp_path: Path) -> None:
    made = recorder(tmp_path, part_bytes_max=2_000)
    for number in range(200):
        made.instant("requests", f"n{number}", 1.0)
        made.flush()
    made.close()
    sizes = [path.stat().st_size for path in tmp_path.glob("*/*")]
    assert len(sizes) == 2
    assert max(sizes) < 1_200  # a half, and the event that exceeds it
    found, events = merged(tmp_path)
    numbers = [int(event["name"].removeprefix("n")) for event in events]
    assert numbers == list(range(200 - len(numbers), 200))
    assert found.dropped == 200 - len(numbers)


def test_what_a_killed_process_left_is_used(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.instant("requests", "whole", 1.0)
    made.close()
    with next(tmp_path.glob("*/loop0.jsonl")).open("ab") as part:
        part.write(b'["i","requests","tor')
    (tmp_path / f"worker-{WORKER}" / "wave0.jsonl").touch()  # killed before its first line
    found, events = merged(tmp_path)
    assert [event["name"] for event in events] == ["whole"]
    assert found == Merged(processes=1, events=1, dropped=1)


def test_it_writes_about_once_a_second(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    path = next(tmp_path.glob("*/loop0.jsonl"))
    made.flush()
    empty = path.stat().st_size
    made.instant("requests", "install", 1.0)
    made.flush_if_due(0.0)
    assert path.stat().st_size == empty
    made.flush_if_due(made.flush_due_at)
    assert path.stat().st_size > empty
    assert FLUSH_INTERVAL_S <= 1
    made.close()


def test_a_full_disk_ends_the_timeline_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Tools that run in the same process may have disabled the loggers they found.
    monkeypatch.setattr(logging.getLogger("wavepp_worker.obs.timeline"), "disabled", False)
    made = recorder(tmp_path)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    made.instant("requests", "install", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        made.flush()
    made.instant("requests", "install", 1.0)
    made.close()
    assert caplog.text.count("No space left on device") == 1


def test_parts_are_private(tmp_path: Path) -> None:
    made = open_recorder(str(tmp_path / "new"), worker=WORKER, role="loop")
    assert made is not None
    made.close()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*")]
    assert sorted(modes) == [0o600, 0o700]


def test_no_parts_make_an_empty_trace(tmp_path: Path) -> None:
    assert merged(tmp_path) == (Merged(0, 0, 0), [])
