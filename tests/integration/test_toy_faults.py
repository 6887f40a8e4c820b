"""Kills, stops, losses and cancels in a worker of real processes with requests in every phase.

Each test brings five requests into five phases at once (arriving, in admission, installed,
running, held), does its harm, and then asks for right answers or for a prompt and complete end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.integration.toy import stop_in_order, toy_worker
from tests.integration.toy_books import check_books
from tests.integration.toy_crowd import MOMENTS, crowd_touch, gather_crowd, open_gates
from tests.integration.toy_processes import DEADLINE_S, poll_until, state_of
from tests.integration.toy_setup import (
    BLOCK,
    STAGES,
    WAVE_TOKENS,
    attention,
    family_prompts,
    recurrent,
    toy_config,
)
from tests.integration.toy_wire import Touch, ToySpec
from wavepp_worker.config.schema import Config

pytestmark = pytest.mark.dynamo

WINDOWS = ((attention(64, 16), recurrent(12, 4)), (recurrent(10, 4),))
PROCESSES = ("wave0", "wave1", "loop0", "loop1")
FAIL_WITHIN_S = 5.0
SILENCE_S = 1.0
FREEZE_S = 2.0  # how long a process is stopped; the harm itself, not a guess
RING_WAVES = 2 * STAGES
CROWD_RID = 4  # in admission: the fourth request


def patient() -> Config:
    return toy_config()


def impatient() -> Config:
    """Return a configuration that gives a silent process up soon."""
    return toy_config(transport={"collective_timeout_s": SILENCE_S})


KILLS = list(zip(PROCESSES, MOMENTS, strict=True))
MORE_KILLS = [pair for pair in itertools.product(PROCESSES, MOMENTS) if pair not in KILLS]


@pytest.mark.parametrize(
    ("victim", "moment"),
    [*KILLS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_KILLS)],
)
async def test_a_killed_process_ends_the_worker(victim: str, moment: str, tmp_path: Path) -> None:
    """FS-08: SIGKILL with requests in every phase; all processes end, and the reason is named."""
    spec = ToySpec(windows=WINDOWS, touches=(crowd_touch(moment, CROWD_RID),))
    async with toy_worker(patient(), spec, tmp_path) as worker:
        await gather_crowd(worker, family_prompts(3, 5, 100))
        os.kill(worker.pids()[victim], signal.SIGKILL)
        reason = await worker.failure(FAIL_WITHIN_S)
        assert reason.startswith(f"{victim} (pid {worker.pids()[victim]}) was killed by SIGKILL")


async def test_the_next_life_starts_empty_and_is_right(tmp_path: Path) -> None:
    """FS-100: a new epoch of the same group meets the traces of the last one and no old state."""
    config = toy_config(cluster={"group": "same"})
    spec = ToySpec(windows=WINDOWS)
    prompt = next(family_prompts(3, 1, 100))
    async with toy_worker(config, spec, tmp_path) as worker:
        await worker.finish(prompt)
        os.kill(worker.pids()["loop1"], signal.SIGKILL)
        await worker.failure(FAIL_WITHIN_S)
    async with toy_worker(config, spec, tmp_path) as worker:
        again = await worker.finish(prompt)
        assert again.finished is not None
        assert again.finished.endpoint == 0
        await check_books(worker)
        await stop_in_order(worker)


@pytest.mark.parametrize(
    "moment",
    ["committed", *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS if m != "committed")],
)
async def test_a_process_that_stops_for_a_while_costs_only_time(
    moment: str, tmp_path: Path
) -> None:
    """FS-08: SIGSTOP of each process in turn for two seconds, then SIGCONT."""
    touches = tuple(crowd_touch(moment, CROWD_RID + 5 * turn) for turn in range(len(PROCESSES)))
    prompts = family_prompts(4, 40, 100)
    async with toy_worker(patient(), ToySpec(windows=WINDOWS, touches=touches), tmp_path) as worker:
        pids = worker.pids()
        for victim in PROCESSES:
            crowd = await gather_crowd(worker, prompts)
            os.kill(pids[victim], signal.SIGSTOP)
            if victim != "wave1":
                os.kill(pids["wave1"], signal.SIGCONT)
            await poll_until(lambda: state_of(pids[victim]) == "T", 5, "stopped")  # noqa: B023
            await asyncio.sleep(FREEZE_S)
            os.kill(pids[victim], signal.SIGCONT)
            await open_gates(worker)
            await asyncio.gather(*(worker.take(request) for request in crowd.all()))
        await check_books(worker)
        await stop_in_order(worker)


@pytest.mark.parametrize("victim", PROCESSES)
async def test_a_process_that_stops_for_ever_is_named(victim: str, tmp_path: Path) -> None:
    """FS-08, FS-09: SIGSTOP for ever; the worker fails in a bounded time and names the silent."""
    prompts = family_prompts(5, 5, 100)
    async with toy_worker(impatient(), ToySpec(windows=WINDOWS), tmp_path) as worker:
        held = worker.announce(next(prompts))
        await worker.until(lambda: held.is_complete, "the held request")
        await worker.gate(1, "wave", is_open=False)
        worker.announce(next(prompts))
        await worker.until_at_gate(1, "wave")
        os.kill(worker.pids()[victim], signal.SIGSTOP)
        reason = await worker.failure(SILENCE_S + FAIL_WITHIN_S)
        # A WAVE process is missed by the other ranks and by its own LOOP.
        names = {victim, victim.replace("wave", "rank ")}
        assert any(f"{name} said nothing for {SILENCE_S:g} s" in reason for name in names)


@pytest.mark.parametrize("victim", ["wave0", "loop0"])
async def test_a_process_of_the_only_rank_that_stops_for_ever_is_named(
    victim: str, tmp_path: Path
) -> None:
    """FS-08: with P = 1 no other rank is there to miss it; its own other half does."""
    config = toy_config(cluster={"stages": 1}, transport={"collective_timeout_s": SILENCE_S})
    async with toy_worker(config, ToySpec(windows=WINDOWS[:1]), tmp_path) as worker:
        await worker.finish(next(family_prompts(5, 1, 100)))
        os.kill(worker.pids()[victim], signal.SIGSTOP)
        reason = await worker.failure(SILENCE_S + FAIL_WITHIN_S)
        assert f"{victim} said nothing for {SILENCE_S:g} s" in reason


async def test_the_only_rank_is_healthy_when_idle(tmp_path: Path) -> None:
    """FS-09 (b): heartbeats go on when there is nothing to do."""
    config = toy_config(cluster={"stages": 1}, transport={"collective_timeout_s": SILENCE_S})
    prompts = family_prompts(6, 2, 100)
    async with toy_worker(config, ToySpec(windows=WINDOWS[:1]), tmp_path) as worker:
        await worker.finish(next(prompts))
        await asyncio.sleep(FREEZE_S)  # longer than the silence allowed
        await worker.finish(next(prompts))
        await stop_in_order(worker)


@pytest.mark.slow
async def test_idle_and_slow_workers_are_healthy_and_a_stuck_one_is_not(tmp_path: Path) -> None:
    """FS-09 (a), (b), (c): liveness follows the processes' own turns and, with work, progress."""
    config = toy_config(
        transport={"collective_timeout_s": SILENCE_S}, executor={"stall_timeout_s": 3 * SILENCE_S}
    )
    prompts = family_prompts(6, 5, 100)
    async with toy_worker(config, ToySpec(windows=WINDOWS), tmp_path) as worker:

        def rounds() -> float:
            return worker.stat("wave", 0, "wavepp_rounds_total")

        # Quiet rounds come every 50 ms, so these take longer than the silence that is fatal.
        quiet = rounds() + 1.5 * SILENCE_S / 0.05
        await worker.until(lambda: rounds() >= quiet, "idle for longer than the silence allowed")
        await worker.gate(1, "wave", is_open=False)
        slow = worker.announce(next(prompts))
        await worker.until_at_gate(1, "wave")
        quiet = rounds() + 1.5 * SILENCE_S / 0.05
        await worker.until(lambda: rounds() >= quiet, "one wave longer than that")
        await worker.gate(1, "wave", is_open=True)
        await worker.take(slow)
        await worker.gate(1, "wave", is_open=False)
        worker.announce(next(prompts))
        reason = await worker.failure(3 * SILENCE_S + FAIL_WITHIN_S)
        assert "no wave retired for 3 s" in reason


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_an_error_in_a_stage_is_what_the_log_shows(
    rank: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """FS-08: a stage raises with requests in flight; all end, and the log shows the first error."""
    spec = ToySpec(windows=WINDOWS, broken_waves={rank: 6})
    async with toy_worker(patient(), spec, tmp_path) as worker:
        for prompt in family_prompts(7, 12, 100):
            worker.announce(prompt)
        reason = await worker.failure(FAIL_WITHIN_S + 5)
    text = f"stage {rank}: wave 6: RuntimeError: a kernel of this wave failed"
    assert f"loop{rank} reported: {text}" in reason
    errors = [line for line in capfd.readouterr().err.splitlines() if " ERROR " in line]
    assert f"[loop{rank}]" in errors[0]


LOSSES = {
    "broadcast": ("receive", "LEASE", "rank 1 said nothing for 1 s"),
    "vote": ("send", "COMMITTED", "rank 1 said nothing for 1 s"),
    "gathered": ("receive", "gathered", "a round began before the last was merged"),
}


@pytest.mark.parametrize(
    "frame", ["vote", "gathered", pytest.param("broadcast", marks=pytest.mark.slow)]
)
async def test_a_lost_frame_of_a_round_is_noticed(frame: str, tmp_path: Path) -> None:
    """FS-06: a round that a rank did not see to its end fails the worker; nobody goes on alone."""
    way, kind, text = LOSSES[frame]
    touch = Touch(rank=1, way=way, frame=kind, action="drop", rid=2)
    spec = ToySpec(windows=WINDOWS, touches=(touch,))
    prompts = family_prompts(8, 5, 100)
    async with toy_worker(impatient(), spec, tmp_path) as worker:
        await worker.finish(next(prompts))
        worker.announce(next(prompts))
        assert text in await worker.failure(SILENCE_S + FAIL_WITHIN_S)


async def test_a_lost_wave_stops_the_schedule(tmp_path: Path) -> None:
    """FS-04: a header that never arrives is a gap, and no stage computes past it."""
    spec = ToySpec(windows=WINDOWS, lost_waves=(4,))
    async with toy_worker(patient(), spec, tmp_path) as worker:
        for prompt in family_prompts(9, 12, 100):
            worker.announce(prompt)
        assert "waves arrive in order wave=5" in await worker.failure(FAIL_WITHIN_S + 5)


async def test_repeated_and_late_frames_change_nothing(tmp_path: Path) -> None:
    """FS-06: every frame of the rounds twice, and a follower that is late with each vote."""
    touches = (
        Touch(rank=0, way="receive", frame="any", action="repeat", times=0),
        Touch(rank=1, way="receive", frame="any", action="repeat", times=0),
        Touch(rank=1, way="send", frame="any", action="slow", times=0, delay_s=0.002),
    )
    async with toy_worker(patient(), ToySpec(windows=WINDOWS, touches=touches), tmp_path) as worker:
        requests = [worker.announce(prompt) for prompt in family_prompts(10, 20, 100)]
        await asyncio.gather(*(worker.take(request) for request in requests))
        await check_books(worker)
        for rank in range(STAGES):
            assert worker.stat("wave", rank, "wavepp_stale_messages_total") > 20
        await stop_in_order(worker)


@pytest.mark.parametrize(
    "moment",
    ["admitted", *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS if m != "admitted")],
)
async def test_cancels_in_every_phase_leave_nothing(moment: str, tmp_path: Path) -> None:
    """FS-19, FS-27: all cancelled in five phases, and the same prompts sent again at once."""
    spec = ToySpec(windows=WINDOWS, touches=(crowd_touch(moment, CROWD_RID),))
    async with toy_worker(patient(), spec, tmp_path) as worker:
        crowd = await gather_crowd(worker, family_prompts(11, 5, 100))
        for request in crowd.all():
            worker.cancel(request)
        again = [worker.announce(request.prompt) for request in crowd.all()]
        os.kill(worker.pids()["wave1"], signal.SIGCONT)
        await open_gates(worker)
        await asyncio.gather(*(worker.take(request) for request in again))
        await check_books(worker)
        assert crowd.arriving.finished is None
        await stop_in_order(worker)


async def test_a_reader_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """A54: a hold ends at its deadline, its slots are used again, and its reader learns of it."""
    config = toy_config(transfer={"hold_s": 0.2})
    prompts = family_prompts(12, 30, 100)
    async with toy_worker(config, ToySpec(windows=WINDOWS), tmp_path) as worker:
        late = worker.announce(next(prompts))
        await worker.until(lambda: late.is_gone, "the hold's deadline")
        for prompt in prompts:
            worker.announce(prompt)
        assert await worker.is_refused(late)
        await check_books(worker)
        await stop_in_order(worker)


async def test_a_release_that_overtakes_its_install_is_kept(tmp_path: Path) -> None:
    """S3, S4: cancelled in the round that admits it; rank 1 hears of the end before the start."""
    touches = (crowd_touch("committed", 2), crowd_touch("admitted", 2))
    async with toy_worker(patient(), ToySpec(windows=WINDOWS, touches=touches), tmp_path) as worker:
        wave1 = worker.pids()["wave1"]

        def count(name: str) -> float:
            return worker.stat("wave", 0, f"wavepp_admission_{name}_total")

        # A full ring, so that no wave of the second request leaves before it is dropped.
        await worker.gate(1, "wave", is_open=False)
        filler = worker.announce(range(RING_WAVES * WAVE_TOKENS + 1))
        await worker.until(
            lambda: worker.stat("loop", 0, "wavepp_ring_waves") == RING_WAVES, "the ring is full"
        )
        request = worker.announce(range(1000, 1000 + 2 * BLOCK))
        await poll_until(lambda: state_of(wave1) == "T", DEADLINE_S, "stopped before its vote")
        worker.cancel(request)
        await worker.until(lambda: count("cancel") == 1, "the cancel at rank 0, the round open")
        os.kill(wave1, signal.SIGCONT)
        await worker.until(lambda: count("drop") == 1, "admitted and dropped by rank 0")
        await poll_until(lambda: state_of(wave1) == "T", DEADLINE_S, "stopped before the merge")
        await worker.until(
            lambda: worker.stat("loop", 0, "wavepp_releases_total") == 1, "released by rank 0"
        )
        os.kill(wave1, signal.SIGCONT)
        await worker.until(lambda: request.is_gone, "gone")
        await open_gates(worker)
        await worker.take(filler)
        await check_books(worker)
        assert request.finished is None
        # Rank 1 took its slots back without ever counting a Release of something it knew.
        assert worker.stat("loop", 1, "wavepp_installs_total") == 2
        assert worker.stat("loop", 1, "wavepp_releases_total") == 0
        await stop_in_order(worker)
