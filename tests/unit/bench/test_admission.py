"""`wavepp bench admission` in the small: figures that hang together, and a command that teaches."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from wavepp_worker.base.errors import ConfigError, PeerError
from wavepp_worker.bench.admission import (
    AdmissionOptions,
    AdmissionReport,
    check_options,
    measure_admission,
    quick,
    run_cell,
)
from wavepp_worker.bench.admission_cell import BURSTS, NAMES, CellTask, measure
from wavepp_worker.bench.admission_load import AdmissionLoad, PromptMaker
from wavepp_worker.bench.admission_tables import render
from wavepp_worker.bench.figures import growth_of, spread_us
from wavepp_worker.bench.two_walks import WalkFleet
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.cli import main

SMALL = AdmissionLoad(tokens=2_000, block_tokens=16, requests=6, ranks=3, families=2)
CROWDED = msgspec.structs.replace(SMALL, is_crowded=True)


class TestFigures:
    def test_a_spread_is_ordered_and_in_microseconds(self) -> None:
        spread = spread_us([1_000 * number for number in range(1, 101)])
        assert (spread.count, spread.p10, spread.p50, spread.p99, spread.max) == (
            100, 11.0, 50.5, 100.0, 100.0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("power", "values"), [(0, [7.0] * 3), (1, [5, 50, 500]), (2, [1, 100, 1e4])]
    )
    def test_the_exponent_of_a_power_law_is_found(self, power: int, values: list[float]) -> None:
        growth = growth_of([10, 100, 1_000], values)
        assert growth.exponent == pytest.approx(power)
        assert growth.ratio == pytest.approx(100**power)


class TestLoad:
    def test_prompts_of_a_family_share_its_prefix_and_nothing_else(self) -> None:
        maker = PromptMaker(SMALL)
        families = [split_keys(prompt.keys) for prompt in maker.new_families()]
        prompts = [split_keys(prompt.keys) for prompt in maker.fresh(4)]
        shared = SMALL.prefix_tokens // SMALL.block_tokens
        for number, keys in enumerate(prompts):
            assert len(keys) == SMALL.tokens // SMALL.block_tokens
            assert keys[:shared] == families[number % 2][:shared]
        assert prompts[0][shared:] != prompts[2][shared:]
        assert not set(prompts[0]) & set(prompts[1])

    def test_every_further_rank_holds_less(self) -> None:
        held = [SMALL.cached_tokens(rank) for rank in range(3)]
        assert held == sorted(held, reverse=True)
        assert held[0] == SMALL.prefix_tokens > held[2] > 0


def test_two_walks_reuse_what_all_ranks_hold() -> None:
    maker, fleet = PromptMaker(SMALL), WalkFleet(SMALL)
    fleet.prepare(maker.new_families())
    times = fleet.run(maker.fresh(SMALL.requests))
    assert all(len(samples) == 6 * 3 for samples in times.steps_ns.values())
    assert times.known_ns == sorted(times.known_ns), "later requests wait for earlier ones"
    (prompt,) = maker.fresh(1)
    keys = split_keys(prompt.keys)
    matches = [rank.match(keys, len(keys)) * SMALL.block_tokens for rank in fleet.ranks]
    # The batch was admitted at the smallest match, and what it computed was published since.
    assert matches == [SMALL.prefix_tokens] * 3


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_sections_are_timed_on_every_rank_and_reuse_the_smallest_hint(is_hybrid: bool) -> None:
    load = msgspec.structs.replace(SMALL, is_hybrid=is_hybrid)
    result = measure(CellTask(kind="sections", load=load, repeats=2))
    samples = load.requests * load.ranks * 2
    for name in NAMES.values():
        assert result.spreads[f"ours: {name}"].count >= samples
    assert result.spreads["two walks: first walk"].count == samples
    reused = result.numbers["reused tokens of a request, mean"]
    assert reused == load.resumed_tokens > 0


def test_waiting_requests_are_discovered_and_stay() -> None:
    result = measure(CellTask(kind="waiting", load=CROWDED, repeats=5))
    assert result.spreads["discovery, all at once, ranks in turn"].count == CROWDED.requests
    assert result.spreads["discovery, one arrival, ranks in turn"].count == 5
    assert result.spreads["round, follower"].p10 > 0


def test_sockets_discover_on_every_process() -> None:
    result = run_cell(CellTask(kind="sockets", load=CROWDED, repeats=3))
    singles = result.spreads["discovery, one arrival"]
    assert singles.count == 3
    assert result.spreads["discovery, all at once"].count == BURSTS * CROWDED.requests
    assert result.spreads["discovery, one arrival, on all ranks"].max >= singles.p50


def test_memory_is_counted_per_block() -> None:
    numbers = measure(CellTask(kind="memory", load=SMALL, repeats=1)).numbers
    assert 10 < numbers["index bytes per block"] < numbers["key, tree and index bytes per block"]
    assert numbers["key, tree and index bytes per block"] < 1_000


def test_a_process_that_fails_is_reported_with_its_reason() -> None:
    impossible = msgspec.structs.replace(SMALL, families=0)
    with pytest.raises(PeerError, match="ZeroDivisionError"):
        run_cell(CellTask(kind="sections", load=impossible, repeats=1))


def test_a_report_says_how_to_get_it_again_and_reads_as_tables() -> None:
    options = AdmissionOptions(
        tokens=1_000,
        concurrency=3,
        ranks=2,
        block_tokens=(16,),
        repeats=1,
        arrivals=10,
        growth_tokens=(600, 1_200),
        growth_waiting=(1, 4),
        waiting_tokens=600,
    )
    notes: list[str] = []
    report = measure_admission(options, "wavepp bench admission", notes.append)
    assert len(notes) == 4 + 2 + 2, "one line per measuring step"
    assert report.by_tokens["ours: probe"].sizes == (600, 1_200)
    assert report.by_waiting["round, leader"].sizes == (1, 4)
    assert msgspec.json.decode(msgspec.json.encode(report), type=AdmissionReport) == report
    text = render(report)
    for wanted in ("ours: probe", "first walk", "discovery, one arrival", "exponent", "4"):
        assert wanted in text
    assert max(len(line) for line in text.splitlines()) < 140


def test_quick_options_are_small_and_keep_what_was_left_out() -> None:
    small = quick(AdmissionOptions(growth_waiting=()))
    check_options(small)
    assert small.tokens <= 8_000
    assert small.growth_tokens
    assert not small.growth_waiting


def test_the_command_writes_json_to_a_file_or_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["bench", "admission", "--tokens", "2000", "--concurrency", "2", "--ranks", "1"]
    options += ["--block-tokens", "16", "--no-growth", "--quick"]
    out = tmp_path / "out.json"
    assert main([*options, "--json", str(out)]) == 0
    assert "ours: probe" in capsys.readouterr().out
    report = msgspec.json.decode(out.read_bytes(), type=AdmissionReport)
    assert report.command == "wavepp " + " ".join(options)
    assert main([*options, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=AdmissionReport).by_tokens == {}


@pytest.mark.parametrize(
    "wrong",
    [["--block-tokens", "x"], ["--block-tokens", "0"], ["--tokens", "10"], ["--ranks", "0"]],
)
def test_options_without_sense_are_refused(wrong: list[str]) -> None:
    assert main(["bench", "admission", *wrong]) == 2


def test_nonsense_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="20 blocks"):
        check_options(AdmissionOptions(tokens=600))
