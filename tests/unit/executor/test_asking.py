"""The naive rung's executor: it asks when a wave has room, and plans nothing until the answer."""

from __future__ import annotations

import pytest

from tests.unit.executor.test_loop_machine import Rig, make_install
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.base.types import Epoch, Rank
from wavepp_worker.executor.commands import LoopCommand, RunWave, SendToFollowers, ToWave
from wavepp_worker.executor.loop import LoopMachine, LoopSettings
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.wire.mailbox import Ask, Refused, Waiting
from wavepp_worker.wire.waves import WaveHeader

B, K, M = 4, 2, 16


class AskingRig(Rig):
    def __init__(self) -> None:
        super().__init__(0, 2)
        settings = LoopSettings(
            rank=Rank(0),
            stages=2,
            epoch=Epoch(1),
            block_tokens=B,
            ring_waves=4,
            admit_timeout_s=5.0,
            stall_timeout_s=60.0,
            asks_spans_max=K,
        )
        self.machine = LoopMachine(settings, GreedyPlanner(M, K, B))


def asks(commands: list[LoopCommand]) -> list[Ask]:
    return [c.message for c in commands if isinstance(c, ToWave) and isinstance(c.message, Ask)]


def waves(commands: list[LoopCommand]) -> list[int]:
    headers = [c.message for c in commands if isinstance(c, SendToFollowers)]
    return [header.tokens for header in headers if isinstance(header, WaveHeader)]


def test_an_idle_executor_asks_once_and_waits() -> None:
    rig = AskingRig()
    assert rig.tick() == []
    assert asks(rig.send(Waiting(2)) + rig.tick()) == [Ask(may_refuse=False)]
    rig.send(Waiting(1))
    assert rig.tick() == []


def test_a_wave_with_room_waits_for_the_answer_and_takes_it_in() -> None:
    rig = AskingRig()
    rig.send(Waiting(3))
    rig.tick()
    rig.send(make_install(1, 7, 8))
    commands = rig.tick()
    assert waves(commands) == []
    assert asks(commands) == [Ask(may_refuse=True)]
    rig.now += 0.25
    rig.send(make_install(2, 8, 20))
    commands = rig.tick()
    assert waves(commands) == [16]  # full: 8 of the one, 8 of the other; the rest has room again
    assert asks(commands) == [Ask(may_refuse=True)]
    assert rig.machine.stats()["wavepp_asks_total"] == 3
    assert rig.machine.stats()["wavepp_ask_wait_seconds_total"] == pytest.approx(0.25)


def test_after_a_refusal_one_wave_goes_out_with_what_there_is() -> None:
    rig = AskingRig()
    rig.send(Waiting(2))
    rig.tick()
    rig.send(make_install(1, 7, 8))
    rig.tick()
    rig.send(Refused())
    commands = rig.tick()
    assert waves(commands) == [8]
    assert asks(commands) == [Ask(may_refuse=False)]  # nothing else is left to do


def test_a_full_wave_and_one_of_k_requests_ask_for_nothing() -> None:
    rig = AskingRig()
    rig.send(Waiting(5))
    rig.tick()
    rig.send(make_install(1, 7, 2))
    rig.tick()
    rig.send(make_install(2, 8, 2))
    commands = rig.tick()
    assert waves(commands) == [4]
    assert any(isinstance(command, RunWave) for command in commands)


def test_answers_that_nobody_asked_for_are_defects() -> None:
    rig = AskingRig()
    with pytest.raises(InvariantError, match="nobody asked for"):
        rig.send(make_install(1, 7, 8))
    with pytest.raises(InvariantError, match="nobody asked for"):
        AskingRig().send(Refused())
    with pytest.raises(InvariantError, match="ahead"):
        Rig().send(Waiting(1))
