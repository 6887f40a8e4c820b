"""`wavepp sim` as its user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.simulation.test_worlds import one_copy_skipped, youngest_first
from wavepp_worker.base.marks import MARKS
from wavepp_worker.cli import main
from wavepp_worker.sim import campaign, command
from wavepp_worker.sim.coverage import exempt
from wavepp_worker.sim.knobs import SimOptions


def test_a_campaign_ends_with_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["sim", "--ranks", "2", "--seeds", "10", "--jobs", "1", "--json"]
    assert main(options) == 0
    first = capsys.readouterr().out
    assert main(options) == 0
    second = capsys.readouterr().out
    document, again = json.loads(first.splitlines()[-1]), json.loads(second.splitlines()[-1])
    assert document["seeds"] == 10
    assert document["violations"] == 0
    assert set(document["marks"]) == set(MARKS)
    for text in (document, again):
        del text["wall_s"], text["requests_per_s"]
    assert document == again


def test_one_seed_tells_its_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seed", "7", "--ranks", "2", "--requests", "3", "--story", "all"]) == 0
    out = capsys.readouterr().out
    assert "request 1\n" in out
    assert "serving   announced" in out


def test_a_violation_is_printed_with_what_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_copy_skipped(monkeypatch)
    assert main(["sim", "--ranks", "2", "--hybrid", "--seeds", "8", "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "VIOLATION seed=" in out
    assert "shortest:  wavepp sim --seed" in out
    assert "announced" in out


def test_a_recorded_trace_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 900 * n, "input_length": 512 * 3 - 9, "hash_ids": [0, 1 + n // 2, 50 + n]}
        for n in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    options = ["sim", "--ranks", "3", "--requests", "15", "--trace", str(trace), "--json"]
    assert main([*options, "--hybrid"]) == 0
    assert main([*options, "--trace-block-tokens", "512"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["ends"] == {"gone": 15}
    assert document["ranks"] == 3
    assert document["reused_tokens"] > 0
    assert document["requests_per_s"] > 0
    assert document["violations"] == 0


def test_a_violation_in_a_trace_is_shown_with_no_more_requests_than_had_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n + 900_000 * (n >= 60), "input_length": 900, "hash_ids": [n, n + 1]}
        for n in range(70)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    youngest_first(monkeypatch)
    options = ["sim", "--ranks", "2", "--trace", str(trace), "--time-scale", "0.01", "--json"]
    assert main(options) == 1
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["violations"] == 1
    (shortest,) = [line for line in out.splitlines() if line.startswith("shortest:")]
    words = shortest.removeprefix("shortest:  wavepp ").split()
    assert words[words.index("--requests") + 1] == "60"
    assert "announced" in out
    assert main(words) == 1


def test_what_nobody_reached_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CAMPAIGN_COVERAGE_SEEDS", 2)
    assert main(["sim", "--ranks", "2", "--seeds", "2", "--jobs", "1", "--json"]) == 1
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert "VIOLATION never reached: admission.last_resort" in out
    assert document["violations"] == len(document["never_reached"]) > 0


def test_every_finding_has_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "EXPLAINED_MAX", 1)
    monkeypatch.setattr(campaign, "SHRINK_RUNS_MAX", 4)
    youngest_first(monkeypatch)
    options = ["sim", "--ranks", "2", "--seeds", "4", "--jobs", "1", "--faults", "none", "--json"]
    assert main(options) == 1
    findings = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert len(findings) > 1
    assert all(f"--seed {finding['seed']} " in finding["command"] for finding in findings)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ranks", "0"], "--ranks lies between"),
        (["--faults", "delay,gremlins"], "no such fault: gremlins"),
        (["--seeds", "0"], "at least 1"),
        (["--requests", "0"], "at least 1"),
        (["--story", "all"], "--story goes with --seed"),
        (["--trace", "absent.jsonl", "--trace-block-tokens", "700"], "multiple of 512"),
        (["--trace", "absent.jsonl", "--time-scale", "0"], "above 0"),
        (["--seed", "1", "--requests", "2", "--story", "x"], "request numbers or all"),
        (["--trace", "absent.jsonl"], "No such file"),
    ],
)
def test_nonsense_is_refused(
    options: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", *options]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("is_hybrid", [False, True])
@pytest.mark.parametrize("has_host", [False, True])
def test_what_a_campaign_may_miss_is_named_with_a_reason(is_hybrid: bool, has_host: bool) -> None:
    excused = exempt(SimOptions(is_hybrid=is_hybrid, has_host=has_host))
    assert all(reason for reason in excused.values())
    assert {name for name in excused if not name.startswith("verdict ")} <= set(MARKS)


@pytest.mark.parametrize("wait_s", [1.0, 2.5])
def test_an_interrupted_campaign_leaves_nothing_and_says_nothing_more(wait_s: float) -> None:
    """Ctrl-C on a terminal reaches every process of the group; a supervisor's signal only one."""
    command_line = [sys.executable, "-m", "wavepp_worker", "sim", "--seeds", "4000", "--jobs", "2"]
    for send in (os.kill, os.killpg):
        with subprocess.Popen(
            command_line, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
        ) as process:
            time.sleep(wait_s)
            send(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "Traceback" not in errors
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
