"""`wavepp bench idle` as its user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.deployment import REPOSITORY
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]


def test_idle_serves_both_ways_and_reports_parts_that_add_up(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "a-tiny-model", "qwen3", seed=1)
    report_file = tmp_path / "idle.json"
    run = subprocess.run(
        [
            sys.executable, "-m", "wavepp_worker", "bench", "idle", "--model", str(model),
            "--stages", "2", "--prompt-tokens", "37", "--requests", "4", "--json", str(report_file),
        ],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "whole WavePP path" in run.stdout
    report = json.loads(report_file.read_text())
    assert report["options"]["model"] == "a-tiny-model", "a report names no folder"
    smallest = {name: spread["p10"] for name, spread in report["parts"].items()}
    assert set(smallest) == {
        "hash", "announce", "rounds", "plan", "execution", "reply", "read",
    }  # fmt: skip
    # `announce` is what is left after hashing, which is timed on its own: noise may eat it.
    assert min(value for name, value in smallest.items() if name != "announce") > 0, smallest
    assert sum(smallest.values()) <= report["path"]["p10"] * 1.001
