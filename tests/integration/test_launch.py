"""`dynamo serve` with stand-in components: start, readiness, failures, stop, nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.deployment import REPOSITORY, free_port, is_alive, wait_until

GRAPH = "tests.integration.standin_graph"
TIMEOUT_S = 30.0
COMMAND = "import sys; from wavepp_worker.cli import dynamo_main; sys.exit(dynamo_main())"


class Serve:
    """A running `dynamo serve` and its output so far."""

    def __init__(self, tmp: Path, *args: str) -> None:
        self.tmp, self.port = tmp, free_port()
        self.output = ""
        self.popen = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "serve", GRAPH, "--port", str(self.port), *args],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(tmp), "DYN_PREFILL_DRAIN_TIMEOUT_S": "0",
                 "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output += line.decode()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.popen.poll() is not None, TIMEOUT_S, text)
        assert text in self.output, self.output

    def facts(self, key: str) -> list[str]:
        return re.findall(rf"\b{key}=(\S+)", self.output)

    def pids(self) -> list[int]:
        return [int(pid) for key in ("pid", "grandchild") for pid in self.facts(key)]

    def end(self) -> int:
        status = self.popen.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status

    def check_nothing_left(self) -> None:
        pids = self.pids()
        assert pids, self.output
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 5, "all processes are gone")
        assert list(self.tmp.iterdir()) == []


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*args: str) -> Serve:
        started.append(Serve(tmp_path, *args))
        return started[-1]

    yield start
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
        one.end()


def test_start_says_what_runs_and_ctrl_c_stops_frontend_first(
    serve: Callable[..., Serve],
) -> None:
    run = serve("--Worker.ServiceArgs.workers=2", "--Worker.ServiceArgs.envs.KEY=7")
    run.wait_for("Ctrl-C stops it.")
    assert re.search(r"Frontend +\d+ +stands in for the frontend", run.output)
    assert re.search(r"Worker-2 +\d+ +stands in for a worker", run.output)
    assert f"curl -s http://127.0.0.1:{run.port}/v1/chat/completions" in run.output
    assert '"model": "stand-in"' in run.output
    assert run.facts("key").count("7") == 2
    (tmp,) = set(run.facts("tmp"))
    assert os.stat(Path(tmp).parent).st_mode & 0o077 == 0
    run.popen.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert run.facts("ended") == ["frontend", "worker", "worker"]
    run.check_nothing_left()


def test_a_worker_that_refuses_to_start_ends_the_graph_and_is_named(
    serve: Callable[..., Serve],
) -> None:
    run = serve("--Worker.mode=refuse")
    assert run.end() == 1
    assert re.search(r"The graph failed: Worker \(pid \d+\) ended: exit status 3", run.output)
    assert run.output.rstrip().endswith("[Worker] this model is too large for me")
    run.check_nothing_left()


def test_a_killed_worker_ends_the_graph(serve: Callable[..., Serve]) -> None:
    run = serve("--Worker.mode=parent")
    run.wait_for("Ctrl-C stops it.")
    worker = int(re.findall(r"\[Worker\] pid=(\d+)", run.output)[0])
    os.kill(worker, signal.SIGKILL)
    assert run.end() == 1
    assert f"Worker (pid {worker}) ended: signal SIGKILL" in run.output
    run.check_nothing_left()


def test_keep_going_lives_as_long_as_each_component_does(serve: Callable[..., Serve]) -> None:
    run = serve("--Worker.ServiceArgs.workers=2", "--keep-going")
    run.wait_for("Ctrl-C stops it.")
    first, second = (int(pid) for pid in re.findall(r"\[Worker-\d\] pid=(\d+)", run.output))
    os.kill(first, signal.SIGKILL)
    run.wait_for("1 left, going on")
    assert run.popen.poll() is None
    os.kill(second, signal.SIGKILL)
    assert run.end() == 1
    run.check_nothing_left()


def test_second_ctrl_c_kills_what_does_not_end(serve: Callable[..., Serve]) -> None:
    run = serve("--Worker.mode=stubborn")
    run.wait_for("Ctrl-C stops it.")
    run.popen.send_signal(signal.SIGINT)
    run.wait_for("stopping Worker")
    run.popen.send_signal(signal.SIGINT)
    assert run.end() == 0
    assert "did not end in" not in run.output
    run.check_nothing_left()


def test_sigterm_kills_a_stubborn_worker_after_its_budget(serve: Callable[..., Serve]) -> None:
    run = serve("--Worker.mode=stubborn")
    run.wait_for("Ctrl-C stops it.")
    run.popen.terminate()
    assert run.end() == 0
    assert "Worker did not end in 5 s: killed" in run.output
    run.check_nothing_left()


def test_a_killed_launcher_takes_its_processes_along(serve: Callable[..., Serve]) -> None:
    run = serve()
    run.wait_for("Ctrl-C stops it.")
    run.popen.kill()
    pids = run.pids()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5, "children died with it")


def test_a_taken_port_is_refused_before_anything_starts(serve: Callable[..., Serve]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = serve("--port", str(taken.getsockname()[1]))
        assert run.end() == 2
    assert "error: Frontend.port: cannot listen on 127.0.0.1:" in run.output
    assert run.pids() == []


def test_gpus_are_handed_out_in_order(
    serve: Callable[..., Serve], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    run = serve("--Worker.ServiceArgs.workers=2", "--Worker.ServiceArgs.resources.gpu=2")
    run.wait_for("Ctrl-C stops it.")
    assert sorted(re.findall(r"\[Worker-\d\] cuda=(\S+)", run.output)) == ["4,5", "6,7"]
    run.popen.send_signal(signal.SIGINT)
    assert run.end() == 0


def test_a_closed_terminal_stops_the_graph(serve: Callable[..., Serve]) -> None:
    run = serve()
    run.wait_for("[Worker] pid=")
    run.wait_for("[Frontend] pid=")
    run.popen.send_signal(signal.SIGHUP)
    assert run.end() == 0
    run.check_nothing_left()


def test_a_reader_that_leaves_stops_the_graph(tmp_path: Path) -> None:
    """`dynamo serve … | head -1` leaves nothing behind."""
    command = [sys.executable, "-c", COMMAND, "serve", GRAPH, "--port", str(free_port())]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline().startswith(b"starting: Worker 0/1")
        popen.stdout.close()
        assert popen.wait(TIMEOUT_S) == 0
    assert list(tmp_path.iterdir()) == []
