"""The simulated pipeline, and the comparison of planners on it."""

from __future__ import annotations

from itertools import islice, repeat
from pathlib import Path

import msgspec
import pytest

from wavepp_worker.bench.ablate_simulated import H200_STAGE
from wavepp_worker.bench.planners import (
    GRID,
    PLANNERS,
    PlannerOptions,
    compare,
    planner_of,
    render,
)
from wavepp_worker.bench.planners_command import FIXED_S, LINEAR_S, SQUARE_S
from wavepp_worker.cli import main
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.sim.pipeline import Admission, Prompt, StageTime, run_closed_loop

TIME = StageTime(fixed_s=0.0, linear_s=0.001, square_s=0.0)


def run(count: int, concurrency: int, admission: Admission, stages: int = 2, tokens: int = 64):
    return run_closed_loop(
        GreedyPlanner(64, 16, 64),
        repeat(Prompt(tokens), count),
        stages=stages,
        time=TIME,
        concurrency=concurrency,
        admission=admission,
    )


def test_one_wave_takes_every_stage_in_turn() -> None:
    one = run(1, 1, Admission(), stages=4)
    assert one.seconds == pytest.approx(4 * 0.064)
    assert one.busy_share == pytest.approx(0.25)
    assert one.latency_s == (one.seconds,)


def test_a_long_prompt_fills_the_pipeline() -> None:
    """Sixteen waves on four stages: 16 + 3 steps; each stage is busy for 16 of them."""
    long = run(1, 1, Admission(), stages=4, tokens=16 * 64)
    assert long.waves == 16
    assert long.seconds == pytest.approx(19 * 0.064)
    assert long.busy_share == pytest.approx(16 / 19)


def test_attention_costs_tokens_times_context() -> None:
    time = StageTime(fixed_s=1.0, linear_s=0.0, square_s=1e-3)
    planner = GreedyPlanner(64, 16, 64)
    done = run_closed_loop(planner, iter([Prompt(192, 128)]), stages=1, time=time, concurrency=1)
    assert done.seconds == pytest.approx(1.0 + 1e-3 * 64 * (128 + 32))
    assert (done.prompt_tokens, done.computed_tokens) == (192, 64)


def test_admission_beside_the_pipeline_overlaps_and_in_its_path_does_not() -> None:
    """Forty prompts of one wave (0.064 s a stage), each with 0.1 s of admission."""
    cost = {"latency_s": 0.1, "wave_tokens": 64}
    batched = run(40, 8, Admission(kind="batched", **cost))
    one = run(40, 8, Admission(kind="one", **cost))
    serial = run(40, 8, Admission(kind="serial", **cost))
    assert batched.seconds < one.seconds <= serial.seconds
    assert batched.seconds == pytest.approx(41 * 0.064)
    assert one.seconds == pytest.approx(39 * 0.1 + 2 * 0.064)
    assert serial.requests == one.requests == batched.requests == 40


def test_work_of_batched_admissions_is_done_one_after_another() -> None:
    slow = run(10, 10, Admission(fixed_s=1.0))
    assert slow.seconds == pytest.approx(9.0 + 2 * 0.064)


def test_mpu_is_never_far_behind_greedy_and_far_ahead_with_little_work() -> None:
    """The claim of the paper's planner, on its own grid with P = 8."""
    time = StageTime(fixed_s=FIXED_S, linear_s=LINEAR_S, square_s=SQUARE_S)
    cells = compare(PlannerOptions(time=time, concurrencies=(1, 4, 16)), lambda _name: None)
    assert len(cells) == 3 * len(GRID) * len(PLANNERS)
    rate = {(c.load, c.concurrency, c.planner): c.tokens_per_s for c in cells}
    for load in GRID:
        for concurrency in (1, 4, 16):
            gain = rate[load.name, concurrency, "mpu"] / rate[load.name, concurrency, "greedy"]
            assert gain > 0.98, (load.name, concurrency, gain)
    assert rate["reuse-131k", 4, "mpu"] > 1.3 * rate["reuse-131k", 4, "greedy"]
    assert "reuse-131k" in render(cells)


def test_counting_the_whole_ring_keeps_two_very_long_prompts_level_with_greedy() -> None:
    """A21, where the rule loses: half-size waves fill the ring with half a prompt."""
    load = next(load for load in GRID if load.name == "cold-262k")
    time = H200_STAGE
    rate = {}
    for inflight in ("latest", "all"):
        options = PlannerOptions(time=time, inflight=inflight)
        for name in ("greedy", "mpu"):
            done = run_closed_loop(
                planner_of(name, options), islice(load.prompts(64), 32), stages=8, time=time,
                concurrency=2, hop_s=options.hop_s,
            )  # fmt: skip
            rate[name, inflight] = done.prompt_tokens / done.seconds
    assert rate["mpu", "latest"] < 0.92 * rate["greedy", "latest"]
    assert rate["mpu", "all"] > 0.99 * rate["greedy", "all"]


def test_the_command_reads_measured_constants_and_refuses_nonsense(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "stage.json", tmp_path / "out.json"
    file.write_bytes(msgspec.json.encode(StageTime(fixed_s=0.1, linear_s=0.001, square_s=1e-9)))
    options = ["bench", "planners", "--stages", "2", "--stage-time", str(file)]
    assert main([*options, "--json", str(out)]) == 0
    assert msgspec.json.decode(out.read_bytes())["options"]["time"]["linear_s"] == 0.001
    assert "cold-65k" in capsys.readouterr().out
    for text in ("{}", '{"fixed_s": 0, "linear_s": 1, "square_s": 1}'):
        file.write_text(text)
        assert main(options) == 2
    assert main(["bench", "planners", "--wave-tokens-min", "100"]) == 2
    assert "multiples" in capsys.readouterr().err
