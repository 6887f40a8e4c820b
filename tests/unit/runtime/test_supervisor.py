"""The worker's processes start, fail and end together; scripted children stand in for ranks."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.runtime.test_boot import FACTS
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig
from wavepp_worker.runtime.boot import load_boot
from wavepp_worker.runtime.front_door import FrontDoor
from wavepp_worker.runtime.supervisor import RankSupervisor
from wavepp_worker.wire.mailbox import Fatal

REPORTS = "tcp://127.0.0.1:1"
SCRIPTS = {
    "sleeps": "import time; print('up', flush=True); time.sleep(60)",
    "ends": "print('up', flush=True)",
    "fails": "import time; time.sleep(0.3); raise RuntimeError('broken on purpose')",
    "stubborn": (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\n"
        "time.sleep(60)"
    ),
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, script in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
async def make(modules: None) -> AsyncIterator[object]:
    supervisors: list[RankSupervisor] = []

    def make_supervisor(wave: str, loop: str, stages: int = 1) -> RankSupervisor:
        config = Config(model=ModelConfig(path="m"), cluster=ClusterConfig(stages=stages))
        roles = {"wave": wave, "loop": loop}
        plan = derive(config, FACTS)
        supervisors.append(RankSupervisor(config, plan, FACTS, "n", roles=roles))
        return supervisors[-1]

    yield make_supervisor
    for supervisor in supervisors:
        await supervisor.kill()


def has_run_dir(supervisor: RankSupervisor) -> bool:
    return Path(supervisor.run_dir).exists()


async def until_up(supervisor: RankSupervisor) -> None:
    async with asyncio.timeout(10):
        while not all(child.tail() for child in supervisor._children):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_start_writes_the_boot_file_into_a_private_folder(make) -> None:
    supervisor = make("sleeps", "sleeps", stages=2)
    await supervisor.start(REPORTS)
    assert stat.S_IMODE(os.stat(supervisor.run_dir).st_mode) == 0o700
    boot = load_boot(os.path.join(supervisor.run_dir, "boot.json"))
    assert boot.report_address == REPORTS
    assert boot.parent_pid == os.getpid()
    assert boot.group
    assert [child.name for child in supervisor._children] == ["wave0", "loop0", "wave1", "loop1"]


async def test_ranks_do_not_inherit_serving_s_fixed_ports(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_SYSTEM_PORT", "9090")
    monkeypatch.setenv("DYN_NAMESPACE", "kept")
    supervisor = make("sleeps", "sleeps")
    await supervisor.start(REPORTS)
    await until_up(supervisor)
    environment = Path(f"/proc/{supervisor._children[0].pid}/environ").read_bytes()  # noqa: ASYNC240
    assert b"DYN_SYSTEM_PORT=" not in environment
    assert b"DYN_NAMESPACE=kept" in environment


async def test_ranks_of_a_pod_meet_in_the_run_folder(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "kubernetes")
    supervisor = make("sleeps", "sleeps")
    await supervisor.start(REPORTS)
    await until_up(supervisor)
    for child in supervisor._children:
        variables = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")  # noqa: ASYNC240
        assert b"DYN_DISCOVERY_BACKEND=file" in variables
        assert f"DYN_FILE_KV={supervisor.run_dir}/store".encode() in variables
    assert os.environ["DYN_DISCOVERY_BACKEND"] == "kubernetes"  # the serving process's own


async def test_long_temporary_folder_does_not_break_the_sockets(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    front = FrontDoor(make("sleeps", "sleeps").run_dir, "127.0.0.1")
    front.close()


async def test_any_exit_ends_the_worker_and_says_why(make) -> None:
    supervisor = make("sleeps", "fails")
    await supervisor.start(REPORTS)
    reason = await asyncio.wait_for(supervisor.exited, 10)
    assert "loop0" in reason
    assert "exited with status 1" in reason
    assert "RuntimeError: broken on purpose" in reason
    assert not any(is_running(child.pid) for child in supervisor._children)
    assert not has_run_dir(supervisor)


async def test_exit_zero_before_stop_is_a_failure_too(make) -> None:
    supervisor = make("sleeps", "ends")
    await supervisor.start(REPORTS)
    assert "loop0" in await asyncio.wait_for(supervisor.exited, 10)


async def test_fatal_report_ends_the_worker_within_a_second(make) -> None:
    supervisor = make("sleeps", "sleeps")
    await supervisor.start(REPORTS)
    started = time.monotonic()
    supervisor.note_fatal(Fatal(0, "loop", "DeviceError: out of memory"))
    reason = await asyncio.wait_for(supervisor.exited, 10)
    assert reason == "loop0 reported: DeviceError: out of memory"
    assert time.monotonic() - started < 1.0
    await asyncio.wait_for(asyncio.gather(*(c.gone for c in supervisor._children)), 1.0)


async def test_the_cause_comes_before_the_peers_that_lost_it(make) -> None:
    supervisor = make("sleeps", "sleeps")
    await supervisor.start(REPORTS)
    supervisor.note_fatal(Fatal(1, "wave", "PeerError: rank 0 said nothing"))
    supervisor.note_fatal(Fatal(0, "wave", "InvariantError: negative count"))
    reason = await asyncio.wait_for(supervisor.exited, 10)
    assert reason.index("InvariantError") < reason.index("PeerError")


async def test_stop_waits_for_an_ordered_end(make) -> None:
    supervisor = make("ends", "ends")
    await supervisor.start(REPORTS)
    assert await supervisor.stop(grace_s=10.0)
    assert not supervisor.exited.done()
    assert not has_run_dir(supervisor)


@pytest.mark.parametrize("script", ["sleeps", "stubborn"])
async def test_stop_ends_those_that_do_not(make, script: str) -> None:
    supervisor = make("ends", script)
    await supervisor.start(REPORTS)
    supervisor._is_stopping = True  # `ends` may be gone before stop is called
    await until_up(supervisor)
    assert not await supervisor.stop(grace_s=0.1)
    statuses = {child.name: child.status for child in supervisor._children}
    assert statuses == {"wave0": 0, "loop0": -15 if script == "sleeps" else -9}


async def test_stop_and_kill_are_safe_at_any_time(make) -> None:
    never_started = make("sleeps", "sleeps")
    assert await never_started.stop()
    await never_started.kill()
    assert not has_run_dir(never_started)
    started = make("sleeps", "sleeps")
    await started.start(REPORTS)
    await started.kill()
    await started.kill()
    assert await started.stop()
    assert not started.exited.done()
