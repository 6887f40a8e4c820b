"""The two commands of the README: the shipped graph with the demo model, from start to Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.deployment import REPOSITORY, descendants, free_port, is_alive, wait_until

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
MODEL = Path(os.environ.get("WAVEPP_MODEL") or CACHE / "wavepp" / "smollm2-135m-instruct")
COMMAND = "import sys; from wavepp_worker.cli import dynamo_main; sys.exit(dynamo_main())"
QUESTION = "What is the capital of France?"
START_TIMEOUT_S = 150.0


class Running:
    """`dynamo serve graphs.disagg -f configs/smollm2-cpu.yaml` on a free port."""

    def __init__(self, tmp: Path, log: Path) -> None:
        self.tmp, self.log, self.port = tmp, log, free_port()
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", COMMAND, "serve", "graphs.disagg",
                 "-f", "configs/smollm2-cpu.yaml", "--port", str(self.port),
                 "--set", f"Common.model.path={MODEL}"],
                cwd=REPOSITORY, env={**os.environ, "TMPDIR": str(tmp)},
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}/v1/chat/completions"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def body(self, **more: object) -> dict[str, object]:
        messages = [{"role": "user", "content": QUESTION}]
        body = {"model": MODEL.name, "messages": messages, "max_tokens": 24, "temperature": 0}
        return {**body, **more}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not (MODEL / "model.safetensors").exists():
        pytest.skip("the demo model is not here; `make test` prepares it")
    folder = tmp_path_factory.mktemp("serve")
    (folder / "t").mkdir()
    run = Running(folder / "t", folder / "log")
    try:
        wait_until(
            lambda: "Ctrl-C stops it." in run.text() or run.popen.poll() is not None,
            START_TIMEOUT_S, "the graph is ready",
        )  # fmt: skip
        assert run.popen.poll() is None, run.text()
        yield run
    finally:
        if run.popen.poll() is None:
            run.popen.terminate()
            run.popen.wait(60)


@pytest.mark.timeout(240)
def test_a_chat_answers_in_a_sentence(running: Running) -> None:
    reply = httpx.post(running.url, json=running.body(), timeout=90)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


def test_a_streamed_chat_says_the_same(running: Running) -> None:
    pieces: list[str] = []
    with httpx.stream("POST", running.url, json=running.body(stream=True), timeout=90) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert "Paris" in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 1


def test_the_screen_says_what_runs(running: Running) -> None:
    text = running.text()
    for name in ("Frontend", "PrefillWorker", "DecodeWorker"):
        assert f"\n{name} " in text, text
        assert f"[{name}] " in text
    assert f"curl -s {running.url}" in text
    assert "Status code: 503" not in text  # our own early questions


def test_ctrl_c_leaves_no_process_and_no_file(running: Running) -> None:
    family = descendants(running.popen.pid)
    assert len(family) >= 7  # frontend, decode worker, serving process, two ranks of two processes
    begin = time.monotonic()
    running.popen.send_signal(signal.SIGINT)
    assert running.popen.wait(60) == 0, running.text()
    wait_until(lambda: not any(is_alive(pid) for pid in family), 5, "all processes are gone")
    assert list(running.tmp.iterdir()) == []
    assert time.monotonic() - begin < 60
