"""`wavepp bench admission` in the small: all figures are there; the command refuses nonsense."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from wavepp_worker.bench.admission import AdmissionOptions, measure_admission, render
from wavepp_worker.cli import main

SMALL = AdmissionOptions(
    tokens=4_000,
    concurrency=6,
    ranks=2,
    block_tokens=(16,),
    growth_tokens=(2_000, 8_000),
    growth_waiting=(1, 20),
)


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_every_step_is_timed(is_hybrid: bool) -> None:
    report = measure_admission(
        msgspec.structs.replace(SMALL, is_hybrid=is_hybrid), lambda _line: None
    )
    (size,) = report.sizes
    assert set(size.ours) == {
        "probe", "lease", "prepare", "commit", "materialise", "publish", "free",
    }  # fmt: skip
    for spread in (*size.ours.values(), *size.two_walks.values(), size.discovery):
        assert 0 < spread.p10 <= spread.p50 <= spread.p99
        assert spread.count >= 6
    assert 32 < size.index_bytes_per_block < 500
    assert list(report.growth_tokens) == ["2000", "8000"]
    assert list(report.growth_waiting) == ["1", "20"]
    text = render(report)
    assert "discovery in a round" in text
    assert "20 waiting" in text


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    options = ["bench", "admission", "--tokens", "2000", "--concurrency", "4", "--ranks", "1"]
    options += ["--block-tokens", "16", "--no-growth"]
    assert main([*options, "--json", str(out)]) == 0
    assert msgspec.json.decode(out.read_bytes())["sizes"][0]["block_tokens"] == 16
    assert main([*options, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out.splitlines()[-1])["growth_tokens"] == {}
    for wrong in (["--block-tokens", "x"], ["--block-tokens", "0"], ["--tokens", "10"]):
        assert main([*options, *wrong]) == 2
