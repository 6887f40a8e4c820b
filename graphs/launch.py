"""Run a deployment on this machine: ordered start, readiness, watch, ordered stop.

    start     needed components first; all start at once, because late joiners work in Dynamo
    ready     workers: Dynamo's /health on their system port; frontend: /v1/models lists the model
    watch     a process that ends takes the graph down, unless --keep-going and others are left
    stop      frontend, then workers: SIGTERM, a budget, SIGKILL; a second Ctrl-C kills at once

One private folder per graph holds the processes' configurations, the discovery store and their
TMPDIR; it is removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from graphs.child import Child, describe_end
from graphs.deployment import Deployment, Folders, process_plans
from graphs.preflight import free_ports, visible_gpus
from graphs.screen import Screen
from wavepp_worker.runtime.folders import PrivateFolder

POLL_S = 0.25
HTTP_TIMEOUT_S = 2.0
HTTP_BYTES_MAX = 1 << 20
READY_FILE = "ready.json"  # in the private folder
STOP_MARGIN_S = 5.0  # over Dynamo's own grace and drain times

EXIT_STOPPED, EXIT_FAILED = 0, 1


class _StopRequestedError(Exception):
    """The user wants the graph to end."""


class _ChildFailedError(Exception):
    """A process ended that the graph cannot do without."""

    def __init__(self, child: Child) -> None:
        super().__init__(
            f"{child.name} (pid {child.pid}) ended: {describe_end(child.ended.result())}"
        )
        self.child = child


def launch(
    deployment: Deployment,
    working_dir: Path,
    *,
    keep_going: bool = False,
    ready_file: Path | None = None,
) -> int:
    """Run until the user stops the graph or a process fails; return the exit status.

    Args:
        ready_file: gets a `ReadyGraph` as JSON once everything answers.
    """
    launcher = Launcher(deployment, working_dir, keep_going=keep_going, ready_file=ready_file)
    return asyncio.run(launcher.run())


class ReadyProcess(msgspec.Struct, frozen=True):
    """One process of a graph that answers."""

    name: str
    component: str
    pid: int
    metrics_url: str = ""


class ReadyGraph(msgspec.Struct, frozen=True):
    """Where a started graph can be reached."""

    api_url: str
    models: tuple[str, ...]
    processes: tuple[ReadyProcess, ...]


class Launcher:
    """One run of a deployment."""

    def __init__(
        self,
        deployment: Deployment,
        working_dir: Path,
        *,
        keep_going: bool,
        ready_file: Path | None = None,
    ) -> None:
        self._deployment = deployment
        self._working_dir = working_dir
        self._keep_going = keep_going
        self._ready_file = ready_file
        self._children: list[Child] = []
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._screen = Screen(on_closed=self._stop.set)
        self._started = time.monotonic()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        failure: _ChildFailedError | None = None
        with PrivateFolder("graph") as folder:
            try:
                self._spawn(folder)
                await self._wait_ready()
                self._show_ready()
                self._write_ready(folder)
                await self._watch()
            except _StopRequestedError:
                pass
            except _ChildFailedError as error:
                failure = error
                self._screen.say(f"{error}; stopping the others", "bold red")
            finally:
                self._screen.progress_done()
                await self._stop_all()
        if failure is None:
            self._screen.say("stopped")
            return EXIT_STOPPED
        self._screen.say(f"The graph failed: {failure}. Its last lines:", "bold red")
        for line in failure.child.tail:
            self._screen.log(failure.child.plan.component.name, f"[{failure.child.name}] {line}")
        return EXIT_FAILED

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    # ── start ────────────────────────────────────────────────────────────────────────────────

    def _spawn(self, root: Path) -> None:
        folders = Folders(
            config=str(root / "config"), store=str(root / "store"), temporary=str(root / "tmp")
        )
        for folder in (folders.config, folders.store, folders.temporary):
            Path(folder).mkdir(mode=0o700)
        for name, settings in self._deployment.settings.items():
            text = msgspec.json.format(msgspec.json.encode(settings), indent=2)
            (root / "config" / f"{name}.json").write_bytes(text)
        plans = process_plans(
            self._deployment,
            folders,
            environment=os.environ,
            gpus=visible_gpus(os.environ),
            system_ports=free_ports(),
            import_root=str(self._working_dir.resolve()),
        )
        for plan in plans:
            self._children.append(Child(plan, {**os.environ, **plan.env}, self._screen.log))

    async def _wait_ready(self) -> None:
        while waiting := [child for child in self._children if not child.is_ready]:
            elapsed_s = time.monotonic() - self._started
            self._screen.progress(self._progress(), f"({elapsed_s:.0f} s, Ctrl-C stops)")
            # The frontend logs every question, so it is asked when its answer can be yes.
            asked = [c for c in waiting if not c.plan.component.is_frontend] or waiting
            answers = await asyncio.gather(*(self._answers(child) for child in asked))
            for child, is_ready in zip(asked, answers, strict=True):
                child.is_ready = is_ready
            if not all(answers):
                await self._pause(POLL_S)
            self._check_children()
        self._screen.progress_done()

    def _progress(self) -> str:
        parts = []
        for component in self._deployment.graph.components:
            mine = [c.is_ready for c in self._children if c.plan.component is component]
            parts.append(f"{component.name} {sum(mine)}/{len(mine)}")
        return f"starting: {', '.join(parts)} ready"

    async def _answers(self, child: Child) -> bool:
        """Return whether a process is ready to serve."""
        component = child.plan.component
        if not component.is_frontend:
            status, _ = await http_get("127.0.0.1", child.plan.system_port, "/health")
            return status == 200
        address = component.address(self._deployment.settings[component.name])
        if address is None:
            return True
        status, body = await http_get(_reachable_host(address[0]), address[1], "/v1/models")
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            listed = {entry["id"] for entry in json.loads(body)["data"]}
            return status == 200 and listed.issuperset(self._deployment.model_names())
        return False

    def _show_ready(self) -> None:
        elapsed_s = time.monotonic() - self._started
        self._screen.say(
            f"\n{self._deployment.graph.spec} is ready after {elapsed_s:.1f} s", "bold green"
        )
        rows = [(c.name, c.pid, c.plan.component.does) for c in reversed(self._children)]
        self._screen.table(rows)
        if address := self._deployment.frontend():
            url = f"http://{_reachable_host(address[0])}:{address[1]}/v1"
            self._screen.say(f"\nOpenAI API: {url}\nTry it:")
            for name in self._deployment.model_names()[:1]:
                self._screen.say(curl(url, name), "green")
        self._screen.say("\nCtrl-C stops it.\n")

    def _write_ready(self, folder: Path) -> None:
        """Write the ready files: one for `wavepp top`, one for who asked for it.

        Whole or not at all, so that who waits for one never reads half of it.
        """
        address = self._deployment.frontend()
        ready = ReadyGraph(
            api_url=f"http://{_reachable_host(address[0])}:{address[1]}/v1" if address else "",
            models=tuple(self._deployment.model_names()),
            processes=tuple(
                ReadyProcess(
                    child.name,
                    child.plan.component.name,
                    child.pid,
                    f"http://127.0.0.1:{child.plan.system_port}/metrics"
                    if child.plan.system_port
                    else "",
                )
                for child in self._children
            ),
        )
        text = msgspec.json.format(msgspec.json.encode(ready)) + b"\n"
        for file in filter(None, (folder / READY_FILE, self._ready_file)):
            part = file.with_name(file.name + ".part")
            part.write_bytes(text)
            part.replace(file)

    # ── watch ────────────────────────────────────────────────────────────────────────────────

    async def _watch(self) -> None:
        while True:
            alive = {child.ended for child in self._children if not child.ended.done()}
            await self._first_of(alive, None)
            self._check_children()

    def _check_children(self) -> None:
        """Raise if the user wants to stop or a process ended that is needed."""
        if self._stop.is_set():
            raise _StopRequestedError
        for child in [child for child in self._children if child.ended.done()]:
            siblings = [
                other
                for other in self._children
                if other.plan.component is child.plan.component and not other.ended.done()
            ]
            if not (self._keep_going and siblings):
                raise _ChildFailedError(child)
            self._children.remove(child)
            self._screen.say(
                f"{_ChildFailedError(child)}; {len(siblings)} left, going on", "bold yellow"
            )

    async def _pause(self, seconds: float) -> None:
        await self._first_of({c.ended for c in self._children if not c.ended.done()}, seconds)

    async def _first_of(self, futures: set[asyncio.Future[int]], timeout_s: float | None) -> None:
        """Wait for one of `futures`, for the stop request or for the timeout."""
        stop = asyncio.ensure_future(self._stop.wait())
        awaited: set[asyncio.Future[Any]] = {*futures, stop}
        try:
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    # ── stop ─────────────────────────────────────────────────────────────────────────────────

    async def _stop_all(self) -> None:
        frontends = [c for c in self._children if c.plan.component.is_frontend]
        workers = [c for c in self._children if not c.plan.component.is_frontend]
        for group in (frontends, workers):
            if alive := [child for child in group if not child.ended.done()]:
                names = ", ".join(child.name for child in alive)
                self._screen.progress(f"stopping {names}", "(Ctrl-C again kills)")
                await self._stop_group(alive)
        self._screen.progress_done()

    async def _stop_group(self, group: list[Child]) -> None:
        for child in group:
            child.terminate()
        ended = asyncio.gather(*(child.ended for child in group))
        kill = asyncio.ensure_future(self._kill.wait())
        budget_s = stop_budget_s(group)
        awaited: set[asyncio.Future[Any]] = {ended, kill}
        await asyncio.wait(awaited, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        kill.cancel()
        for child in group:
            if not child.ended.done():
                if not self._kill.is_set():
                    self._screen.say(
                        f"{child.name} did not end in {budget_s:.0f} s: killed", "yellow"
                    )
                child.kill()
        await ended


def stop_budget_s(group: list[Child]) -> float:
    """Return how long a group may take to end: Dynamo's grace, a worker's drain, a margin."""
    budgets = []
    for child in group:
        env = {**os.environ, **child.plan.env}
        budget_s = _seconds(env, "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS") + STOP_MARGIN_S
        if not child.plan.component.is_frontend:
            budget_s += _seconds(env, "DYN_PREFILL_DRAIN_TIMEOUT_S")
        budgets.append(budget_s)
    return max(budgets)


def _seconds(env: Mapping[str, str], name: str) -> float:
    try:
        return max(0.0, float(env.get(name, "0")))
    except ValueError:
        return 0.0


def _reachable_host(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def curl(url: str, model: str) -> str:
    """Return a command that asks the model something, ready to paste."""
    question = {"role": "user", "content": "What is the capital of France?"}
    # A small model is sensible only at temperature 0; the API's own default is 1.
    body = json.dumps({"model": model, "messages": [question], "max_tokens": 64, "temperature": 0})
    return f"curl -s {url}/chat/completions -H 'content-type: application/json' \\\n  -d '{body}'"


async def http_get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Return (status, body) of a GET; (0, b"") when nobody answers in time."""
    writer = None
    try:
        async with asyncio.timeout(HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            request = f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            writer.write(request.encode())
            reply = b""
            while len(reply) < HTTP_BYTES_MAX and (data := await reader.read(1 << 16)):
                reply += data
        head, _, body = reply.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), body
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0, b""
    finally:
        if writer is not None:
            writer.close()
