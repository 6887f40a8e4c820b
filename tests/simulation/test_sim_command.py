"""`wavepp sim` as its user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulation.test_worlds import one_copy_skipped
from wavepp_worker.base.marks import MARKS
from wavepp_worker.cli import main
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
        text.pop("wall_s")
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
    assert main(options) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["report"]["ends"] == {"gone": 15}
    assert document["report"]["reused_tokens"] > 0
    assert document["requests_per_s"] > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--ranks", "0"], "--ranks lies between"),
        (["--faults", "delay,gremlins"], "no such fault: gremlins"),
        (["--seeds", "0"], "at least 1"),
        (["--requests", "0"], "at least 1"),
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
