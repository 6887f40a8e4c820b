"""One run of a serving benchmark: a graph of its own, warm-up, the measured requests.

Used by `wavepp bench serve` and, once per rung, by `wavepp ablate`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench import serve
from wavepp_worker.bench.workload import BenchPrompt

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0


class Measured(Struct, frozen=True):
    """The answers in order of their end, and their summary."""

    answers: list[serve.Answer]
    report: serve.ServeReport


def measure(
    target: serve.Target,
    warm_up: Sequence[BenchPrompt],
    prompts: Sequence[BenchPrompt],
    concurrency: int | None,
    label: str = "requests",
) -> Measured:
    """Send the warm-up one by one, then measure; a bar on stderr shows how far it is.

    Args:
        concurrency: closed loop with so many clients; None: open loop.

    Raises:
        ConfigError: no request was answered.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        if warm_up:
            task = progress.add_task("warm-up", total=len(warm_up))
            asyncio.run(
                serve.drive(
                    target, warm_up, concurrency=1, note=lambda _answer: progress.advance(task)
                )
            )
        before = asyncio.run(serve.stage_seconds(target.metrics_urls))
        running = progress.add_task(label, total=len(prompts))
        answers = asyncio.run(
            serve.drive(
                target,
                prompts,
                concurrency=concurrency,
                note=lambda _answer: progress.advance(running),
            )
        )
        after = asyncio.run(serve.stage_seconds(target.metrics_urls))
    return Measured(answers, serve.summarize(answers, before, after))


@contextmanager
def started_graph(
    config_files: Sequence[str], changes: Sequence[str], trace_out: Path | None = None
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Run `wavepp serve` for the time of a run; yield (API, prefill metrics pages).

    Args:
        config_files: given to `-f`, in order.
        changes: given to `--set`, later ones win.
        trace_out: where the graph writes its timeline when it ends; None: nowhere.

    Raises:
        ConfigError: the graph did not start; its last lines are in the text.
    """
    with tempfile.TemporaryDirectory(prefix="wavepp-bench-") as folder:
        ready_file, log_file = Path(folder) / "ready.json", Path(folder) / "graph.log"
        command = [sys.executable, "-m", "wavepp_worker", "serve", "graphs.disagg"]
        for name in config_files:
            command += ["-f", name]
        for change in changes:
            command += ["--set", change]
        command += ["--ready-file", str(ready_file)]
        if trace_out is not None:
            command += ["--trace-out", str(trace_out)]
        with log_file.open("wb") as log:
            # A group of its own: Ctrl-C reaches us alone, and we stop the graph in its order.
            graph = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            yield _await_ready(graph, ready_file, log_file)
        finally:
            graph.terminate()
            try:
                graph.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                graph.kill()
                graph.wait()


def _await_ready(
    graph: subprocess.Popen[bytes], ready_file: Path, log_file: Path
) -> tuple[str, tuple[str, ...]]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        if graph.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
            raise ConfigError(f"the graph did not start:\n{tail}")
        time.sleep(0.1)
    ready = msgspec.json.decode(ready_file.read_bytes())
    metrics = tuple(
        process["metrics_url"]
        for process in ready["processes"]
        if process["component"] == "PrefillWorker" and process["metrics_url"]
    )
    return ready["api_url"], metrics
