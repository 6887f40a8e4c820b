"""`wavepp ablate -f`: order of the runs, figures, and what counts as a failure."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench import serve_run
from wavepp_worker.bench.ablate_measured import climb_measured
from wavepp_worker.bench.figures import Machine
from wavepp_worker.bench.ladder import LadderReport, Rung
from wavepp_worker.bench.serve import Answer, answer_token_ids, summarize
from wavepp_worker.bench.serve_run import Measured, started_graph
from wavepp_worker.bench.workload import BenchPrompt, Workload
from wavepp_worker.cli import main

MACHINE = Machine(cpus=2, cpu_model="a model", python="CPython", system="Linux", load_average=0.1)
SECONDS = {"naive": 4.0, "waves": 2.0, "leases": 1.0, "mpu": 0.5}


class Graphs:
    """Answers every request after a time that depends on the rung; first token 7 + number."""

    def __init__(self, **changed: object) -> None:
        self.started: list[str] = []
        self.sent: set[tuple[int, ...]] = set()
        self.changed = changed

    def run(
        self, rung: Rung, warm_up: Sequence[BenchPrompt], prompts: Sequence[BenchPrompt], label: str
    ) -> Measured:
        self.started.append(label)
        self.sent.add(tuple(prompt.tokens[-1] for prompt in [*warm_up, *prompts]))
        change = self.changed.get(rung.name)
        if change == "no start":
            raise ConfigError("the graph did not start")
        answers = [
            Answer(
                number=prompt.number,
                sent_s=0.0,
                ended_s=SECONDS[rung.name],
                prompt_tokens=100,
                expected_reuse=prompt.expected_reuse,
                cached_tokens=64,
                error="HTTP 503" if change == "an error" and prompt.number == 1 else "",
                token_ids=() if change == "no ids" else (7 + prompt.number, 1),
            )
            for prompt in prompts
        ]
        if change == "another token":
            answers[0] = Answer(
                number=0, sent_s=0.0, ended_s=1.0, prompt_tokens=100, expected_reuse=64,
                token_ids=(99,),
            )  # fmt: skip
        after = {"0#0": {"forward": 0.25, "gap": 0.5, "receive_wait": 0.125}, "0#1": {"gap": 1.0}}
        return Measured(answers, summarize(answers, {}, after))


def climb(graphs: Graphs, repeats: int = 1, differing_max: int = 0) -> LadderReport:
    return climb_measured(
        Workload(kind="reuse", prompt_tokens=100, requests=4),
        graphs.run,
        concurrency=4,
        repeats=repeats,
        differing_max=differing_max,
        machine=MACHINE,
        command="wavepp ablate",
    )


def test_rungs_are_interleaved_over_repeats_and_get_the_same_prompts() -> None:
    graphs = Graphs()
    report = climb(graphs, repeats=2)
    assert graphs.started == [
        "naive 1/2", "waves 1/2", "leases 1/2", "mpu 1/2",
        "naive 2/2", "waves 2/2", "leases 2/2", "mpu 2/2",
    ]  # fmt: skip
    assert len(graphs.sent) == 1
    assert report.failures == ()
    naive, *_, mpu = report.rungs
    assert (naive.served_tokens_per_s, mpu.served_tokens_per_s) == (100.0, 800.0)
    assert (naive.computed_tokens_per_s, naive.good_hit_share) == (36.0, 1.0)
    assert (naive.p50_s, naive.p95_s, len(naive.completion_s)) == (4.0, 4.0, 8)
    assert naive.gap_s == {"gap": 3.0, "receive wait": 0.25, "install wait": 0.0}
    assert mpu.busy_share == pytest.approx(0.25 / (2 * 0.5))


def test_a_rung_that_does_not_start_is_a_failure_and_the_others_go_on() -> None:
    graphs = Graphs(waves="no start")
    report = climb(graphs, repeats=2)
    assert [figures.rung for figures in report.rungs] == ["naive", "leases", "mpu"]
    assert graphs.started.count("waves 1/2") == 1
    assert "waves 2/2" not in graphs.started, "it would not start a second time either"
    assert report.failures == ("waves, repeat 1: the graph did not start",)
    with pytest.raises(ConfigError, match="did not start"):
        climb(Graphs(**dict.fromkeys(SECONDS, "no start")))


def test_another_first_token_is_a_failure_unless_it_is_allowed() -> None:
    (failure,) = climb(Graphs(leases="another token")).failures
    assert failure.startswith("leases, repeat 1: 1 requests (0) of 4 did not answer")
    allowed = climb(Graphs(leases="another token"), differing_max=1)
    assert allowed.failures == ()
    assert "not those of the runs before: 1 of 16." in allowed.facts[-1]


def test_an_unknown_first_token_proves_nothing_and_fails() -> None:
    (failure,) = climb(Graphs(mpu="no ids")).failures
    assert failure.startswith("mpu, repeat 1: 4 requests (0, 1, 2, 3)")
    assert len(climb(Graphs(naive="no ids")).failures) == 1


def test_failed_requests_are_a_failure_of_their_run() -> None:
    assert climb(Graphs(mpu="an error")).failures == (
        "mpu, repeat 1: 1 of 4 requests failed: {'HTTP 503': 1}",
    )


def test_token_ids_are_read_where_dynamo_puts_them() -> None:
    assert answer_token_ids({"nvext": {"completion_token_ids": [216, 5]}}) == (216, 5)
    assert answer_token_ids({"nvext": None}) == answer_token_ids({}) == ()


def test_the_command_starts_every_rung_with_its_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timelines: list[Path | None] = []
    graphs, changes_seen, targets = Graphs(waves="another token"), [], []

    @contextmanager
    def fake_graph(
        files: Sequence[str], changes: Sequence[str], timeline: Path | None
    ) -> Iterator[tuple[str, tuple]]:
        assert files == ["my.yaml"]
        timelines.append(timeline)
        changes_seen.append(changes)
        yield "http://nowhere/v1", ()

    async def fake_model(_url: str) -> str:
        return "tiny"

    def fake_measure(target, warm_up, prompts, _concurrency, label):  # type: ignore[no-untyped-def]
        targets.append(target)
        rung = Rung(label.split()[0], "", "", "greedy", "")
        return graphs.run(rung, warm_up, prompts, label)

    monkeypatch.setattr(serve_run, "started_graph", fake_graph)
    monkeypatch.setattr(serve_run, "measure", fake_measure)
    monkeypatch.setattr("wavepp_worker.bench.serve.find_model", fake_model)
    options = ["ablate", "-f", "my.yaml", "--set", "Frontend.port=1", "--requests", "4"]
    options += ["--prompt-tokens", "100", "--trace-out", str(tmp_path)]
    assert main(options) == 1
    names = [f"{name}.json" for name in ("naive", "waves", "leases", "mpu")]
    assert timelines == [tmp_path / name for name in names]
    out, err = capsys.readouterr()
    assert [changes[1:] for changes in changes_seen] == [
        ["PrefillWorker.admission.mode=naive", "PrefillWorker.planner.kind=greedy"],
        ["PrefillWorker.admission.mode=waves", "PrefillWorker.planner.kind=greedy"],
        ["PrefillWorker.admission.mode=leases", "PrefillWorker.planner.kind=greedy"],
        ["PrefillWorker.admission.mode=leases", "PrefillWorker.planner.kind=mpu"],
    ]
    assert {changes[0] for changes in changes_seen} == {"Frontend.port=1"}
    assert all(target.wants_token_ids for target in targets)
    assert "Measured: reuse, 4 clients" in out
    assert "error: waves, repeat 1" in err
    assert main([*options, "--differing-max", "1"]) == 0


def test_a_graph_that_fails_is_refused_with_its_last_lines() -> None:
    with (
        pytest.raises(ConfigError, match=r"did not start:\n.*absent\.yaml"),
        started_graph(["absent.yaml"], []),
    ):
        pass


def test_a_graph_is_stopped_when_its_run_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between start and end: the process is gone when the interrupt comes out."""
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = []
    popen = serve_run.subprocess.Popen

    def start(_command: list[str], **options: object):  # type: ignore[no-untyped-def]
        started.append(popen(sleeper, **options))  # type: ignore[call-overload]
        return started[0]

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_run.subprocess, "Popen", start)
    monkeypatch.setattr(serve_run, "_await_ready", interrupt)
    with pytest.raises(KeyboardInterrupt), started_graph([], []):
        pass
    assert started[0].poll() is not None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "either -f FILE"),
        ("-f a.yaml --simulate", "either -f FILE"),
        ("-f a.yaml --repeats 0", "at least 1"),
        ("-f a.yaml --workload reuse-131k", "no such workload"),
        ("-f a.yaml --token-range 5", "two numbers"),
        ("-f a.yaml --trace-out nowhere", "nowhere: no such folder"),
        ("--simulate --trace-out .", "has no timeline"),
    ],
)
def test_options_that_contradict_are_refused(
    line: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", *line.split()]) == 2
    assert text in capsys.readouterr().err
