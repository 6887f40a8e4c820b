"""A real Dynamo deployment for tests: frontend, prefill and decode workers as real processes.

Everything runs on loopback with file discovery unless the test says otherwise.  `Pipeline`
plays Dynamo's prefill router towards the workers' own endpoints, so that tests can compare token
ids; HTTP tests go through Dynamo's frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import PLANE_SETTINGS

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = 16
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? ([0-9.eE+-]+|NaN)$")


def free_port() -> int:
    """Return a port that was free a moment ago; below 32,768, Dynamo's limit for system ports."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll `condition` until it is truthy; return its value or fail naming `what`."""
    deadline = time.monotonic() + timeout_s
    pause = 0.01
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.25)
    return value


def descendants(pid: int) -> list[int]:
    """Return the pids of all living descendants of a process."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_of(pid: int) -> str:
    """Return the command line of a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


class Process:
    """One started process with its log file."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log = name, log
        self._file = log.open("wb")
        self.popen = subprocess.Popen(
            command, env=env, cwd=REPOSITORY, stdout=self._file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.pid = self.popen.pid

    def children(self) -> list[int]:
        return descendants(self.pid)

    def child(self, *words: str) -> int:
        """Return the descendant whose command line holds all `words`."""
        for pid in self.children():
            if all(word in command_of(pid) for word in words):
                return pid
        raise AssertionError(f"{self.name} has no child with {words}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, grace_s: float = 20.0) -> int:
        """Terminate in order; kill what is left of its session after `grace_s`."""
        if self.popen.poll() is None:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_s)
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.popen.wait(10)
        self._file.close()
        return int(self.popen.returncode)


class Deployment:
    """Processes that share one discovery store."""

    def __init__(self, folder: Path, planes: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        # TMPDIR stays short: ipc socket paths are limited to 107 bytes.
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(PLANE_SETTINGS)},
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_FILE_KV": str(folder / "kv"),
            "DYN_NAMESPACE": "dynamo",
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **(planes or {}),
        }
        self.http_port = 0

    def start(self, name: str, module: str, *args: str, **env: str) -> Process:
        return self.start_inside((), name, module, *args, **env)

    def start_inside(
        self, wrapper: Sequence[str], name: str, module: str, *args: str, **env: str
    ) -> Process:
        """Start a module by a command that replaces itself with it, as `ip netns exec` does."""
        process = Process(
            name,
            [*wrapper, sys.executable, "-m", module, *args],
            {**self.env, **env},
            self.folder / f"{name}.log",
        )
        self.processes.append(process)
        return process

    def prefill(self, config: dict[str, Any], name: str = "prefill", **env: str) -> Process:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        return self.start(name, "components.prefill_worker", "--config", str(path), **env)

    def decode(self, config: dict[str, Any], name: str = "decode", **env: str) -> Process:
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        return self.start(name, "components.decode_worker", "--config", str(path), **env)

    def frontend(self, *args: str) -> str:
        """Start Dynamo's frontend; return its base URL."""
        self.http_port = free_port()
        self.start(
            "frontend", "dynamo.frontend", "--http-host", "127.0.0.1",
            "--http-port", str(self.http_port), "--router-mode", "kv", *args,
        )  # fmt: skip
        return f"http://127.0.0.1:{self.http_port}"

    def wait_for_model(self, model: str, timeout_s: float = 90.0) -> None:
        """Wait until the frontend serves `model` end to end."""

        def is_served() -> bool:
            self.check_alive()
            try:
                reply = httpx.get(f"http://127.0.0.1:{self.http_port}/v1/models", timeout=2)
                if not any(entry["id"] == model for entry in reply.json().get("data", [])):
                    return False
                answer = httpx.post(
                    f"http://127.0.0.1:{self.http_port}/v1/completions",
                    json={"model": model, "prompt": "x", "max_tokens": 1}, timeout=30,
                )  # fmt: skip
            except (httpx.HTTPError, ValueError):
                return False
            return answer.status_code == 200

        wait_until(is_served, timeout_s, f"model {model} is served\n{self.logs()}")

    def check_alive(self) -> None:
        for process in self.processes:
            if process.popen.poll() is not None:
                raise AssertionError(
                    f"{process.name} exited with {process.popen.returncode}\n{process.tail()}"
                )

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.tail(15)}" for p in self.processes)

    def close(self) -> None:
        """Stop everything; fail if any process of ours survives."""
        family = {pid for process in self.processes for pid in process.children()}
        for process in self.processes:
            process.stop()
        wait_until(
            lambda: not [pid for pid in family if is_alive(pid)], 10,
            f"all child processes ended: {[command_of(pid) for pid in family if is_alive(pid)]}",
        )  # fmt: skip


@contextlib.contextmanager
def deployment(folder: Path, **planes: str) -> Iterator[Deployment]:
    """Yield a deployment and stop it at the end."""
    deploy = Deployment(folder, planes)
    try:
        yield deploy
    except BaseException:
        print(deploy.logs())
        raise
    finally:
        deploy.close()


def prefill_config(model: Path, stages: int, **overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a small prefill worker on CPU; keyword sections are merged in."""
    config: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "cluster": {"stages": stages, "start_timeout_s": 60},
        "cache": {"block_tokens": BLOCK, "device_tokens": 2048},
        "planner": {"wave_tokens_max": 64},
        "serving": {"served_model_name": "tiny"},
        "debug": {"invariants": "always"},
    }
    for section, values in overrides.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def decode_config(model: Path, **overrides: Any) -> dict[str, Any]:
    """Return a small decode worker on CPU."""
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "served_model_name": "tiny",
        "block_tokens": BLOCK,
        "batch": {"cache_tokens": 4096},
        **overrides,
    }


class Pipeline:
    """Dynamo's prefill router, reduced: prefill, then decode with its result."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._prefill, self._decode = prefill, decode

    def prefill_ids(self) -> list[int]:
        """Return the instances that discovery knows."""
        return sorted(self._prefill.instance_ids())

    @staticmethod
    def request(tokens: list[int], max_tokens: int, **extra: Any) -> dict[str, Any]:
        return {
            "model": "tiny", "token_ids": tokens,
            "stop_conditions": {"max_tokens": max_tokens, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0}, "output_options": {},
            "eos_token_ids": [2], "annotations": [], **extra,
        }  # fmt: skip

    async def prefill(self, tokens: list[int], worker: int = 0, **extra: Any) -> dict[str, Any]:
        """Return the prefill worker's terminal chunk."""
        chunks = await self.prefill_chunks(tokens, worker, **extra)
        assert len(chunks) == 1, chunks
        return chunks[0]

    async def prefill_chunks(
        self, tokens: list[int], worker: int = 0, context: Any = None, **extra: Any
    ) -> list[dict[str, Any]]:
        """Return the whole stream; it can be empty if `context` was stopped."""
        ids = sorted(self._prefill.instance_ids())
        return [
            dict(chunk)
            async for chunk in await self._prefill.direct(
                self.request(tokens, 1, **extra), ids[worker], annotated=False, context=context
            )
        ]

    async def decode(
        self, tokens: list[int], result: dict[str, Any], max_tokens: int, **extra: Any
    ) -> list[int]:
        """Return the answer tokens of the decode worker."""
        hand_off = {"disaggregated_params": result["disaggregated_params"]}
        answer: list[int] = []
        async for chunk in await self._decode.round_robin(
            self.request(tokens, max_tokens, prefill_result=hand_off, **extra), annotated=False
        ):
            answer += chunk["token_ids"]
        return answer

    async def generate(
        self, tokens: list[int], max_tokens: int, worker: int = 0
    ) -> tuple[list[int], int]:
        """Return (answer tokens, cached tokens)."""
        result = await self.prefill(tokens, worker)
        usage = result["completion_usage"]
        answer = await self.decode(tokens, result, max_tokens)
        return answer, int(usage["prompt_tokens_details"]["cached_tokens"])


@contextlib.asynccontextmanager
async def pipeline(deploy: Deployment, prefill_workers: int = 1) -> AsyncIterator[Pipeline]:
    """Connect to the workers' own endpoints through Dynamo's runtime."""
    from dynamo.runtime import DistributedRuntime

    os.environ.update({k: v for k, v in deploy.env.items() if k.startswith(PLANE_SETTINGS)})
    runtime = DistributedRuntime(
        asyncio.get_running_loop(), deploy.env["DYN_DISCOVERY_BACKEND"],
        deploy.env["DYN_REQUEST_PLANE"], event_plane=deploy.env["DYN_EVENT_PLANE"],
    )  # fmt: skip
    try:
        prefill = await runtime.endpoint("dynamo.prefill.generate").client()
        decode = await runtime.endpoint("dynamo.decode.generate").client()
        deadline = time.monotonic() + 90
        while len(prefill.instance_ids()) < prefill_workers or not decode.instance_ids():
            deploy.check_alive()
            assert time.monotonic() < deadline, f"workers not registered\n{deploy.logs()}"
            await asyncio.sleep(0.05)
        yield Pipeline(prefill, decode)
    finally:
        runtime.shutdown()


def scrape(port: int) -> dict[tuple[str, str], float]:
    """Return {(name, label text): value} of a worker's /metrics."""
    samples: dict[tuple[str, str], float] = {}
    for line in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text.splitlines():
        if match := SAMPLE.match(line):
            samples[(match[1], match[2] or "")] = float(match[3])
    return samples


def per_rank(port: int, name: str) -> dict[int, float]:
    """Return a metric's value per rank."""
    found: dict[int, float] = {}
    for (metric, labels), value in scrape(port).items():
        if metric == name and (match := re.search(r'rank="(\d+)"', labels)):
            found[int(match[1])] = found.get(int(match[1]), 0.0) + value
    return found
