"""`dynamo serve --trace-out`: the timeline of a real run, and what a crash leaves of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    BLOCK,
    REPOSITORY,
    command_of,
    decode_config,
    descendants,
    free_port,
    prefill_config,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model
from wavepp_worker.runtime.gaps import CAUSES

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

COMMAND = "import sys; from wavepp_worker.cli import dynamo_main; sys.exit(dynamo_main())"
STAGES = 2
DEVICE = 1  # the device's track
ROUNDING_US = 0.01
Event = dict[str, Any]


class Graph:
    """A started graph."""

    def __init__(self, folder: Path) -> None:
        model = make_tiny_model(folder / "model", "llama", seed=3)
        self.trace, self.log, self.port = folder / "trace.json", folder / "log", free_port()
        (folder / "t").mkdir()
        # The cache is small, so that blocks move to the host tier and back.
        cache = {"device_tokens": 512, "host_tokens": 2048}
        config = {
            "Frontend": {"port": self.port},
            "PrefillWorker": prefill_config(model, STAGES, cache=cache),
            "DecodeWorker": decode_config(model),
        }
        (folder / "graph.yaml").write_text(json.dumps(config))
        with self.log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", "graphs.disagg",
                 "-f", str(folder / "graph.yaml"), "--trace-out", str(self.trace)],
                cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(folder / "t")},
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, prompt: str) -> int:
        """Return the prompt's length in tokens."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        reply = httpx.post(url, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens"])

    def events(self) -> list[Event]:
        events: list[Event] = json.loads(self.trace.read_text())["traceEvents"]
        return events


@contextmanager
def graph(folder: Path) -> Iterator[Graph]:
    run = Graph(folder)
    try:
        wait_until(
            lambda: "Ctrl-C stops it." in run.text() or run.popen.poll() is not None,
            60, "the graph is ready",
        )  # fmt: skip
        yield run
    except BaseException:
        print(run.text())
        raise
    finally:
        if run.popen.poll() is None:
            run.popen.terminate()
            run.popen.wait(30)


def names(events: list[Event]) -> dict[str, int]:
    """Return the process number of each track."""
    return {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}


def slices(events: list[Event], pid: int, tid: int) -> list[Event]:
    """Return a track's slices in order."""
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)]
    return sorted(found, key=lambda e: e["ts"])


def spans(events: list[Event], pid: int, group: str) -> dict[str, list[tuple[str, str, float]]]:
    """Return (begin or end, name, time) of a process's overlapping spans by their key."""
    found = defaultdict(list)
    for e in events:
        if e["ph"] in "be" and (e["pid"], e["cat"]) == (pid, group):
            found[e["id2"]["local"]].append((e["ph"], e["name"], e["ts"]))
    return dict(found)


def check_nested(steps: list[tuple[str, str, float]]) -> None:
    """Ends match begins from the inside out, and time does not go back."""
    open_names: list[str] = []
    for kind, name, _ in steps:
        if kind == "b":
            open_names.append(name)
        else:
            assert open_names.pop() == name, steps
    assert open_names == [], steps
    inner = [at for _, _, at in steps]
    assert inner == sorted(inner), steps


def test_a_run_is_told_wave_by_wave_gap_by_gap_and_request_by_request(tmp_path: Path) -> None:
    prompts = [f"{n:2} " + "abc " * (20 + 8 * (n % 5)) for n in range(8)]
    with graph(tmp_path) as run:
        with ThreadPoolExecutor(4) as pool:
            lengths = list(pool.map(run.ask, prompts)) + list(pool.map(run.ask, prompts[:4]))
        run.popen.send_signal(signal.SIGINT)
        assert run.popen.wait(30) == 0
        assert f"timeline: {run.trace}" in run.text()
    assert not list(tmp_path.glob("trace.json.*")), "the parts are merged and gone"
    events = run.events()
    pids = names(events)
    assert sorted(pids, key=lambda name: pids[name]) == [
        "serving", "WAVE_0", "LOOP_0", "WAVE_1", "LOOP_1",
    ]  # fmt: skip

    # Requests: all, as one span each, with their size.
    requests = spans(events, pids["serving"], "request")
    begun = [e for e in events if e["ph"] == "b" and e["name"].startswith("request ")]
    serving = [e for e in begun if e["pid"] == pids["serving"]]
    served = {e["id2"]["local"] for e in serving}
    told = sorted(e["args"]["tokens"] for e in serving)
    for length in lengths:
        told.remove(length)  # what is left are the health checks' own
    for steps in requests.values():
        check_nested(steps)
        phases = [name for kind, name, _ in steps if kind == "b"][1:]
        assert phases == ["hash", "queue", "lease", "wait", "execution", "handoff"]

    computed = 0
    for rank in range(STAGES):
        # On every rank: the same requests, installed once, held until they were read.
        wave, loop = pids[f"WAVE_{rank}"], pids[f"LOOP_{rank}"]
        admitted = spans(events, wave, "request")
        assert set(admitted) == served
        for steps in admitted.values():
            check_nested(steps)
        for pid in (wave, loop):
            installs = [e for e in events if e["name"] == "install" and e["pid"] == pid]
            assert {f"{e['args']['rid']:#x}" for e in installs} == served
            assert len(installs) == len(served)
        holds = spans(events, loop, "hold")
        assert set(holds) == served
        assert all([kind for kind, _, _ in steps] == ["b", "e"] for steps in holds.values())
        rounds = slices(events, wave, 1)
        assert any("announce" in e["name"] for e in rounds)
        assert all(len(e["args"]) > 1 for e in rounds), "heartbeats are not told"

        # The device: waves and gaps, next to each other; every gap has a cause.
        track = slices(events, loop, DEVICE)
        for one, next_one in pairwise(track):
            assert next_one["ts"] - (one["ts"] + one["dur"]) == pytest.approx(0, abs=ROUNDING_US)
        waves = [e["args"] for e in track if "wave" in e["args"]]
        gaps = [e["args"] for e in track if "wave" not in e["args"]]
        assert len(waves) + len(gaps) == len(track)
        assert [args["wave"] for args in waves] == list(range(1, len(waves) + 1))
        assert {args["cause"] for args in gaps} <= set(CAUSES)
        assert {args["before_wave"] for args in gaps} == set(range(2, len(waves) + 1))
        assert all(0 < args["tokens"] <= args["budget"] for args in waves)
        assert all(len(args["rids"]) == len(args["spans"]) > 0 for args in waves)
        assert {f"{rid:#x}" for args in waves for rid in args["rids"]} == served
        computed += sum(args["tokens"] for args in waves)
        queued = spans(events, loop, "queued")
        assert len(queued) == len(waves)
        for steps in queued.values():
            check_nested(steps)
        copies = slices(events, loop, 2)
        assert sum(e["args"]["offloads"] for e in copies) > 0
    assert computed % STAGES == 0, "all stages ran the same waves"

    # The first stage waits for nobody; the second one for it, once at least.
    causes = {
        rank: {e["name"] for e in slices(events, pids[f"LOOP_{rank}"], DEVICE)} for rank in (0, 1)
    }
    assert "receive" not in causes[0] and "receive" in causes[1]


def test_a_crash_leaves_what_there_was(tmp_path: Path) -> None:
    with graph(tmp_path) as run:
        length = run.ask("abc " * BLOCK)
        parts = list((tmp_path / "trace.json.parts").glob("*/*.jsonl"))
        assert len(parts) == 1 + 2 * STAGES
        wait_until(
            lambda: all(len(part.read_bytes().splitlines()) > 1 for part in parts),
            5, "every process has written",
        )  # fmt: skip
        (victim,) = [
            pid for pid in descendants(run.popen.pid)
            if "loop_process" in command_of(pid) and "--rank 1" in command_of(pid)
        ]  # fmt: skip
        os.kill(victim, signal.SIGKILL)
        assert run.popen.wait(30) == 1
    events = run.events()
    pids = names(events)
    assert len(pids) == 1 + 2 * STAGES
    asked = [e for e in events if e["pid"] == pids["serving"] and e["name"].startswith("request ")]
    assert length in [e["args"].get("tokens") for e in asked if e["ph"] == "b"]
    for rank in range(STAGES):
        assert slices(events, pids[f"LOOP_{rank}"], DEVICE)
