"""Real WAVE processes on real sockets and Dynamo's file discovery, with a scripted LOOP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.config.derive import ModelFacts, derive
from wavepp_worker.config.schema import (
    CacheConfig,
    ClusterConfig,
    Config,
    DebugConfig,
    ModelConfig,
    PlannerConfig,
    TransportConfig,
)
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.supervisor import ROLES, RankSupervisor
from wavepp_worker.wire.mailbox import (
    Announce,
    CacheView,
    Fatal,
    Finished,
    Gone,
    KvDelta,
    Ready,
    ReportMessage,
    Stats,
    WorkerReady,
)

pytestmark = pytest.mark.dynamo

HERE = Path(__file__).parent
BLOCK_TOKENS = 16
CACHE_TOKENS = 4096
DEADLINE_S = 20.0
FACTS = ModelFacts(
    family="llama",
    layers=6,
    hidden=64,
    vocab=1000,
    context_tokens=4096,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    dtype_bytes=4,
    fingerprint="test",
)


def make_config(stages: int, **transport: object) -> Config:
    return Config(
        model=ModelConfig(path="unused"),
        cluster=ClusterConfig(stages=stages, start_timeout_s=15.0),
        cache=CacheConfig(block_tokens=BLOCK_TOKENS, device_tokens=CACHE_TOKENS),
        planner=PlannerConfig(wave_tokens_max=64),
        transport=TransportConfig(**transport),
        debug=DebugConfig(invariants="always"),
    )


def make_announce(rid: int, prompt: list[int]) -> Announce:
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt)
    keys = sequence_keys(tokens, BLOCK_TOKENS, scope_key("test"))
    return Announce(rid, len(prompt), keys, tokens)


class Worker:
    """What the serving process does with its ranks, reduced to a list of reports."""

    def __init__(self, supervisor: RankSupervisor, front: FrontDoor) -> None:
        self.supervisor = supervisor
        self.front = front
        self.reports: list[ReportMessage] = []
        self._news = asyncio.Condition()
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for report in self.front:
            if isinstance(report, Fatal):
                self.supervisor.note_fatal(report)
            async with self._news:
                self.reports.append(report)
                self._news.notify_all()

    def of(self, kind: type) -> list:
        return [report for report in self.reports if isinstance(report, kind)]

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(is_done)

    async def finish(self, announce: Announce) -> Finished:
        """Announce a request and wait until nothing of it is left."""
        self.front.announce(announce)
        await self.until(lambda: announce.rid in [gone.rid for gone in self.of(Gone)])
        await self.until(lambda: announce.rid in [done.rid for done in self.of(Finished)])
        return next(done for done in self.of(Finished) if done.rid == announce.rid)

    async def views(self, number: int) -> list[CacheView]:
        """Return the cache view of every rank."""

        def mine() -> list[CacheView]:
            return [view for view in self.of(CacheView) if view.number == number]

        self.front.request_view(number)
        await self.until(lambda: len(mine()) == len(self.pids()) // 2)
        return mine()

    def has_run_dir(self) -> bool:
        return Path(self.supervisor.run_dir).exists()

    def pids(self) -> dict[str, int]:
        return {child.name: child.pid for child in self.supervisor._children}

    async def close(self) -> None:
        self._reader.cancel()
        await self.supervisor.kill()
        self.front.close()


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    monkeypatch.setenv("DYN_REQUEST_PLANE", "tcp")
    monkeypatch.setenv("DYN_EVENT_PLANE", "zmq")
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@asynccontextmanager
async def starting(config: Config) -> AsyncIterator[Worker]:
    roles = {**ROLES, "loop": "scripted_loop"}
    supervisor = RankSupervisor(config, derive(config, FACTS), FACTS, "test", roles=roles)
    worker = Worker(supervisor, FrontDoor(supervisor.run_dir, config.cluster.host))
    try:
        await supervisor.start(worker.front.report_address)
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Worker]:
    async with starting(config) as worker:
        waits = [asyncio.ensure_future(worker.until(lambda: bool(worker.of(WorkerReady))))]
        await asyncio.wait([*waits, worker.supervisor.exited], return_when="FIRST_COMPLETED")
        assert not worker.supervisor.exited.done(), worker.supervisor.exited.result()
        waits[0].result()
        yield worker


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


async def wait_dead(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {left}"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("stages", "rounds"), [(1, "zmq"), (2, "zmq"), (3, "zmq"), (2, "dynamo"), (3, "dynamo")]
)
async def test_requests_pass_all_ranks_and_leave_nothing(
    stages: int, rounds: str, tmp_path: Path
) -> None:
    """FS-59, FS-75, I44: evicting prompts; the books add up and deltas have no gap."""
    async with running(make_config(stages, rounds=rounds)) as worker:
        assert worker.of(WorkerReady) == [WorkerReady(CACHE_TOKENS)]
        prompt = list(range(200))
        first = await worker.finish(make_announce(1, prompt))
        again = await worker.finish(make_announce(2, prompt))
        longer = await worker.finish(make_announce(3, prompt[:100] + prompt[:100]))
        assert (first.endpoint, again.endpoint, longer.endpoint) == (0, 192, 96)
        views = await worker.views(1)
        assert len({view.keys for view in views}) == 1  # nothing was evicted: all ranks agree

        announces = [make_announce(rid, [rid] * 300) for rid in range(10, 40)]  # evict one another
        for announce in announces:
            worker.front.announce(announce)
        await worker.until(lambda: len(worker.of(Gone)) == 33)
        await worker.until(lambda: len(worker.of(Ready)) == 33 * stages)
        assert {ready.rank for ready in worker.of(Ready)} == set(range(stages))
        for view in await worker.views(2):
            assert sorted(view.keys[0]) == sorted(tree_after(worker, view.rank))
            assert (view.lease_count, view.escrow_count, view.sequence_count) == (0, 0, 0)
            assert view.free[0] + view.cached[0] == view.total[0] == CACHE_TOKENS // BLOCK_TOKENS

        def admitted() -> dict[int, float]:
            return {stats.rank: stats.values["wavepp_admitted_total"] for stats in worker.of(Stats)}

        await worker.until(lambda: admitted() == dict.fromkeys(range(stages), 33.0))

        worker.front.shutdown("test")
        assert await worker.supervisor.stop(grace_s=5.0)
        assert all(child.status == 0 for child in worker.supervisor._children)
        assert not worker.supervisor.exited.done()
        assert not worker.has_run_dir()
        assert not worker.of(Fatal)
        assert not list((tmp_path / "discovery").rglob("*wavepp*"))


def tree_after(worker: Worker, rank: int) -> set[bytes]:
    """Return the keys that a rank's deltas leave stored."""
    stored: set[bytes] = set()
    deltas = [delta for delta in worker.of(KvDelta) if delta.rank == rank]
    assert [delta.sequence for delta in deltas] == list(range(1, len(deltas) + 1))
    for is_stored, window, key in [change for delta in deltas for change in delta.changes]:
        assert window == 0
        assert is_stored != (key in stored)
        stored ^= {key}
    return stored


@pytest.mark.parametrize(
    ("victim", "rounds"),
    [("wave0", "zmq"), ("wave1", "zmq"), ("loop0", "zmq"), ("loop1", "zmq"), ("wave0", "dynamo")],
)
async def test_killed_process_takes_the_worker_with_it(victim: str, rounds: str) -> None:
    """FS-08"""
    async with running(make_config(2, rounds=rounds)) as worker:
        pids = worker.pids()
        os.kill(pids[victim], signal.SIGKILL)
        started = time.monotonic()
        reason = await asyncio.wait_for(worker.supervisor.exited, 5.0)
        assert time.monotonic() - started < 2.0
        assert reason.startswith(f"{victim} (pid {pids[victim]}) was killed by SIGKILL")
        await wait_dead(list(pids.values()), within_s=1.0)
        assert not worker.has_run_dir()


async def test_rank_ignores_ctrl_c_and_obeys_sigterm() -> None:
    """Dynamo's runtime in the WAVE process takes neither signal over."""
    async with running(make_config(2)) as worker:
        pids = worker.pids()
        for pid in pids.values():
            os.kill(pid, signal.SIGINT)
        await worker.finish(make_announce(1, [5] * 40))
        assert not worker.supervisor.exited.done()
        os.kill(pids["wave1"], signal.SIGTERM)
        reason = await asyncio.wait_for(worker.supervisor.exited, 5.0)
        assert reason.startswith(f"wave1 (pid {pids['wave1']}) was killed by SIGTERM")


async def test_silent_rank_is_fatal() -> None:
    """FS-08: a frozen stage."""
    async with running(make_config(2, collective_timeout_s=0.5)) as worker:
        pids = worker.pids()
        os.kill(pids["wave1"], signal.SIGSTOP)
        reason = await asyncio.wait_for(worker.supervisor.exited, 5.0)
        assert "wave0" in reason
        assert "rank 1 said nothing for 0.5 s" in reason
        await wait_dead(list(pids.values()), within_s=1.0)


async def test_failure_at_start_shows_the_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEPP_TEST_LOOP", "crash")
    async with starting(make_config(2)) as worker:
        reason = await asyncio.wait_for(worker.supervisor.exited, DEADLINE_S)
        assert reason.startswith("loop")
        assert "exited with status 1" in reason
        assert "RuntimeError: no device for this test" in reason


async def test_mute_loop_is_reported_after_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WAVEPP_TEST_LOOP", "mute")
    config = make_config(1)
    cluster = ClusterConfig(stages=1, start_timeout_s=1.0)
    config = Config(model=config.model, cluster=cluster, cache=config.cache, planner=config.planner)
    async with starting(config) as worker:
        reason = await asyncio.wait_for(worker.supervisor.exited, DEADLINE_S)
        assert reason.startswith("wave0")
        assert "wave0 reported: PeerError: loop0 sent no LoopUp in time" in reason


async def test_stop_without_an_answer_ends_in_signals() -> None:
    async with running(make_config(2)) as worker:
        pids = worker.pids()
        os.kill(pids["loop1"], signal.SIGSTOP)
        worker.front.shutdown("test")
        assert not await worker.supervisor.stop(grace_s=0.5)
        await wait_dead(list(pids.values()), within_s=0.1)
        assert not worker.has_run_dir()


async def test_wave_process_loads_neither_torch_nor_numpy(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every module loaded, on stderr
    async with running(make_config(2)) as worker:
        await worker.finish(make_announce(1, [7] * 50))
        worker.front.shutdown("test")
        assert await worker.supervisor.stop()
    lines = capfd.readouterr().err.splitlines()
    loaded = {line.rsplit("|", 1)[1].strip() for line in lines if line.startswith("[wave1] import")}
    assert {"wavepp_worker.cache.rank_cache", "dynamo.runtime", "zmq"} <= loaded
    assert not {name for name in loaded if name.split(".")[0] in {"torch", "numpy"}}


async def test_killed_serving_process_leaves_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is left to remove the run folder
    script = (
        "import asyncio, test_ranks as t\n"
        "async def main():\n"
        "    async with t.running(t.make_config(2)) as worker:\n"
        "        print(*worker.pids().values(), flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    serving = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE
    )
    try:
        assert serving.stdout is not None
        line = await asyncio.wait_for(serving.stdout.readline(), DEADLINE_S)
        children = [int(pid) for pid in line.split()]
        assert len(children) == 4
        assert all(is_alive(pid) for pid in children)
    finally:
        serving.kill()
        await serving.wait()
    await wait_dead(children, within_s=5.0)
