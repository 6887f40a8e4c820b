"""`wavepp ablate`: the ladder, its ratios and table, costs, and the simulated pipeline."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from wavepp_worker.bench.ablate_simulated import (
    H200_STAGE,
    SimulatedOptions,
    admission_of,
    climb_simulated,
)
from wavepp_worker.bench.figures import Machine
from wavepp_worker.bench.host_costs import STEPS, CostPoint, HostCost, HostCosts, fit_costs
from wavepp_worker.bench.ladder import RUNGS, LadderReport, RungFigures, render, steps_of
from wavepp_worker.bench.ladder_page import ladder_page
from wavepp_worker.bench.planners import PlannerOptions
from wavepp_worker.bench.svg import HEIGHT, WIDTH, bar_chart, line_chart, number_text
from wavepp_worker.cli import main
from wavepp_worker.sim.pipeline import Admission, Prompt, StageTime

MACHINE = Machine(cpus=2, cpu_model="a <model>", python="CPython", system="Linux", load_average=0.1)


def make_figures(name: str, served: float, **more: object) -> RungFigures:
    return RungFigures(
        rung=name,
        served_tokens_per_s=served,
        computed_tokens_per_s=served / 2,
        served_runs=(served,),
        p50_s=1.0,
        p95_s=2.0,
        completion_s=(0.5, 1.0, 2.0),
        **more,  # type: ignore[arg-type]
    )


def make_report(*rungs: RungFigures, **more: object) -> LadderReport:
    given: dict[str, object] = {
        "kind": "simulated", "workload": "reuse-131k", "concurrency": 8, "command": "wavepp ablate",
        "machine": MACHINE, "rungs": rungs,
    }  # fmt: skip
    return LadderReport(**(given | more))  # type: ignore[arg-type]


def make_costs(naive_s: float = 0.001) -> HostCosts:
    costs = {mode: HostCost(0.001, 0.0, 0.0) for mode in STEPS}
    return HostCosts(costs | {"naive": HostCost(naive_s, 0.0, 0.0)})


def make_options(**more: object) -> SimulatedOptions:
    time = StageTime(fixed_s=1e-4, linear_s=1e-7, square_s=1e-13)
    given: dict[str, object] = {
        "workload": "reuse-131k", "concurrency": 4, "requests": 12,
        "pipeline": PlannerOptions(stages=2, time=time),
    }  # fmt: skip
    return SimulatedOptions(**(given | more))  # type: ignore[arg-type]


def test_the_ladder_is_the_papers_and_pure_configuration() -> None:
    assert [rung.name for rung in RUNGS] == ["naive", "waves", "leases", "mpu"]
    assert [(rung.mode, rung.planner) for rung in RUNGS] == [
        ("naive", "greedy"), ("waves", "greedy"), ("leases", "greedy"), ("leases", "mpu"),
    ]  # fmt: skip
    assert RUNGS[3].overrides() == (
        "PrefillWorker.admission.mode=leases",
        "PrefillWorker.planner.kind=mpu",
    )


def test_ratios_are_to_naive_and_to_the_rung_right_below() -> None:
    names = ("naive", "waves", "leases", "mpu")
    report = make_report(*map(make_figures, names, (100.0, 150.0, 300.0, 450.0)))
    steps = steps_of(report)
    assert [step.to_first for step in steps] == [1.0, 1.5, 3.0, 4.5]
    assert [step.to_previous for step in steps] == [None, 1.5, 2.0, 1.5]
    assert steps[3].paper_to_previous == pytest.approx(211_214 / 149_021)
    assert steps[3].paper_to_first is None, "the paper prints no naive figure for this workload"


def test_a_missing_rung_takes_the_ratios_to_it_along() -> None:
    steps = steps_of(make_report(make_figures("waves", 10.0), make_figures("mpu", 20.0)))
    assert [(step.rung, step.to_first, step.to_previous) for step in steps] == [
        ("waves", None, None),
        ("mpu", None, None),
    ]


def test_the_table_has_what_the_run_has_and_no_other_column() -> None:
    simulated = render(make_report(make_figures("naive", 1234.5, busy_share=0.5)))
    assert simulated.startswith("SIMULATED pipeline: reuse-131k, 8 clients")
    assert "1,234" in simulated and "50.0 %" in simulated and "paper x naive" in simulated
    assert "good hits" not in simulated
    measured = render(
        make_report(
            make_figures("naive", 10.0, good_hit_share=0.25, gap_s={"receive": 1.5}),
            kind="measured",
            workload="reuse",
            failures=("naive: broke",),
        )
    )
    assert measured.startswith("Measured: reuse")
    assert "25.0 %" in measured and "receive s" in measured and "1.50" in measured
    assert "busy" not in measured and "paper" not in measured
    assert "FAILED: naive: broke" in measured


def test_costs_are_the_line_through_three_sizes() -> None:
    def point(tokens: int, computed: int) -> CostPoint:
        names = {step for steps in STEPS.values() for step in steps}
        steps_us = dict.fromkeys(names, 0.0)
        steps_us["ours: learn keys"] = 50.0  # in all three
        steps_us["two walks: first walk"] = 0.01 * (tokens - computed)  # falls with what is new
        steps_us["ours: materialise"] = 0.02 * tokens + 0.03 * computed
        return CostPoint(tokens, computed, steps_us)

    costs = fit_costs([point(1000, 100), point(4000, 400), point(4000, 4000)]).by_mode
    assert costs["waves"].fixed_s == pytest.approx(50e-6)
    assert costs["leases"].token_s == pytest.approx(20e-9)
    assert costs["leases"].computed_token_s == pytest.approx(30e-9)
    assert costs["naive"].token_s == pytest.approx(10e-9)
    assert costs["naive"].computed_token_s == 0.0, "a slope below 0 is not believed"


def test_work_grows_with_the_prompt_and_with_what_is_computed() -> None:
    admission = Admission(fixed_s=1.0, token_s=0.1, computed_token_s=0.01)
    assert admission.work_s(Prompt(100, 40)) == pytest.approx(1.0 + 10.0 + 0.6)


def test_rungs_pay_for_admission_in_their_own_way() -> None:
    options, costs = make_options(), make_costs(naive_s=0.5)
    kinds = [admission_of(rung, options, costs) for rung in RUNGS]
    assert [admission.kind for admission in kinds] == ["serial", "one", "batched", "batched"]
    assert [admission.fixed_s for admission in kinds] == [0.5, 0.001, 0.001, 0.001]
    assert {admission.latency_s for admission in kinds} == {2 * options.round_s}


def test_simulated_ladder_is_deterministic_and_slow_admission_hurts_naive_alone() -> None:
    def climb(naive_s: float) -> LadderReport:
        return climb_simulated(
            make_options(), make_costs(naive_s), MACHINE, "x", lambda _line: None
        )

    report = climb(0.001)
    assert climb(0.001) == report
    assert [figures.rung for figures in report.rungs] == [rung.name for rung in RUNGS]
    assert all(len(figures.completion_s) == 12 for figures in report.rungs)
    assert all(0 < (figures.busy_share or 0) <= 1 for figures in report.rungs)
    slow = climb(0.5)
    assert slow.rungs[0].served_tokens_per_s < 0.5 * report.rungs[0].served_tokens_per_s
    assert slow.rungs[1:] == report.rungs[1:]


def test_costs_measured_on_a_busy_machine_are_called_so() -> None:
    busy = msgspec.structs.replace(MACHINE, load_average=9.0)
    point = CostPoint(1, 1, {})
    measured = HostCosts(make_costs().by_mode, (point,))
    for costs, machine, is_told in ((measured, busy, True), (measured, MACHINE, False),
                                    (make_costs(), busy, False)):  # fmt: skip
        report = climb_simulated(make_options(), costs, machine, "x", lambda _line: None)
        assert ("was busy" in render(report)) == is_told


def test_the_default_stage_is_the_one_in_the_results() -> None:
    file = Path(__file__).parents[3] / "docs/results/stage/llama-70b-stage-h200.json"
    measured = msgspec.json.decode(file.read_bytes(), type=StageTime)
    for name in StageTime.__struct_fields__:
        assert getattr(H200_STAGE, name) == pytest.approx(getattr(measured, name), rel=0.02)


def test_command_simulates_with_given_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, out, page = (tmp_path / name for name in ("costs.json", "out.json", "out.html"))
    costs.write_bytes(msgspec.json.encode(make_costs().by_mode))
    options = ["ablate", "--simulate", "--ranks", "2", "--requests", "8", "-c", "2"]
    options += ["--host-costs", str(costs)]
    given = [*options, "--workload", "cold-65k", "--json", str(out), "--html", str(page)]
    assert main(given) == 0
    assert "cold-65k" in page.read_text() and str(tmp_path) not in page.read_text()
    written = json.loads(out.read_bytes())
    assert written["kind"] == "simulated"
    assert [rung["rung"] for rung in written["rungs"]] == ["naive", "waves", "leases", "mpu"]
    assert str(tmp_path) not in out.read_text(), "a report names no folder"
    captured = capsys.readouterr()
    assert "SIMULATED pipeline: cold-65k, 2 clients" in captured.out
    assert "mpu: waves sized" in captured.err
    assert main([*options, "--workload", "cold-65k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rungs"] == written["rungs"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps(written["details"]["costs"]))
    assert main([*options, "--host-costs", str(again), "--workload", "cold-65k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rungs"] == written["rungs"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--workload warm", "simulated ones are cold-65k"),
        ("-c 0", "at least 1"),
        ("--ranks 0", "--ranks"),
        ("--round-ms -1", "not negative"),
        ("--wave-tokens-min 100", "multiples"),
        ("--stage-time absent.json", "absent.json"),
        ("--host-costs absent.json", "absent.json"),
        ("--html absent/page.html", "no such folder"),
        ("--json absent/out.json", "no such folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "--simulate", *line.split()]) == 2
    assert text in capsys.readouterr().err


def test_costs_for_other_modes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    for text in ("{}", '{"naive": {"fixed_s": 1}}', "no json"):
        file.write_text(text)
        assert main(["ablate", "--simulate", "--host-costs", str(file)]) == 2
        assert "--host-costs" in capsys.readouterr().err


def test_the_page_stands_alone_and_says_what_it_shows() -> None:
    names = ("naive", "waves", "leases", "mpu")
    rungs = [make_figures(name, 100.0 * (n + 1), busy_share=0.5) for n, name in enumerate(names)]
    page = ladder_page(make_report(*rungs, facts=("<b>one</b> & two",)))
    assert not re.search(r"https?:|//[a-z]|src=|href=|@import|url\(", page), "nothing is loaded"
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == page.count("</svg>") == 5
    assert ">SIMULATED<" in page and page.count(", simulated") >= 4
    assert "&lt;b&gt;one&lt;/b&gt; &amp; two" in page, "text cannot become markup"
    assert "a &lt;model&gt;" in page
    assert "paper, 8 x B300" in page and "211,214" in page
    measured = ladder_page(
        make_report(
            make_figures("waves", 10.0, gap_s={"gap": 2.0}),
            kind="measured",
            workload="reuse",
            failures=("naive: broke",),
        )
    )
    assert "simulated" not in measured.partition("</style>")[2].lower()
    assert "FAILED: naive: broke" in measured and "Stages stood still" in measured
    assert "paper" not in measured


def test_bars_are_as_high_as_their_values_and_none_leaves_a_gap() -> None:
    chart = bar_chart("t", "s", ["a", "b"], {"one": [1.0, 2.0], "two": [None, 0.5]})
    heights = [float(rect.attrib["height"]) for rect in chart.iter("rect")][:3]  # then the legend
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.11)
    assert heights[2] == pytest.approx(heights[0] / 2, abs=0.11)
    assert len(list(bar_chart("t", "s", ["a"], {"one": [None]}).iter("rect"))) == 0


def test_lines_stay_inside_their_chart() -> None:
    chart = line_chart("t", "%", "s", {"a": [(0.0, 0.0), (3.0, 100.0)], "b": [(7.9, 50.0)]})
    for line in chart.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.123456, "0.123"), (1.5, "1.5"), (99.96, "100"), (211_214.4, "211,214")],
)
def test_numbers_on_charts_have_the_digits_that_count(value: float, text: str) -> None:
    assert number_text(value) == text
