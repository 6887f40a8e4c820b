"""The push desk's thread: what LOOP sees of it, and what it sees when it fails."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import zmq

from wavepp_worker.base.errors import ConfigError, InvariantError, PeerError
from wavepp_worker.runtime.push_desk import PushDesk
from wavepp_worker.vllm_decode.driver import PushDriver


class ScriptedDriver:
    address = "tcp://here"

    def __init__(self) -> None:
        self.offers: list[tuple[int, list[int], int]] = []
        self.ended: list[int] = []
        self.error: Exception | None = None
        self.is_closed = False

    def offer(self, rid: int, hold: str, table: Any, tokens: int, now: float) -> None:
        self.offers.append((rid, list(table), tokens))

    def withdraw(self, rid: int) -> None:
        self.ended.append(rid)

    def turn(self) -> list[int]:
        if self.error is not None:
            raise self.error
        ended, self.ended = self.ended, []
        return ended

    def sockets(self) -> list[Any]:
        return []

    def wait_s(self) -> float:
        return 0.05

    def stats(self) -> dict[str, float]:
        return {"wavepp_push_holds": float(len(self.offers))}

    def close(self) -> None:
        self.is_closed = True


def open_desk(context: zmq.Context[Any], driver: ScriptedDriver) -> PushDesk:
    return PushDesk(1, (2, 4), 64, context, lambda: cast(PushDriver, driver))


def test_offers_go_in_and_ended_requests_come_out() -> None:
    driver = ScriptedDriver()
    with zmq.Context() as context:
        desk = open_desk(context, driver)
        handoff = desk.open_hold(5, ([9, 8, 7],), 70, (), 0.0)
        assert (handoff.stage, handoff.layers) == (1, (2, 4))
        assert handoff.control_address == "tcp://here"
        desk.release(5)
        assert desk.socket.poll(5000), "LOOP is woken"
        assert desk.poll(0.0) == [5]
        assert desk.poll(0.0) == []
        assert driver.offers == [(5, [9, 8], 70)]
        assert desk.stats(0.0) == {"wavepp_push_holds": 1.0}
        with pytest.raises(InvariantError):
            desk.open_hold(6, ([1],), 70, (), 0.0)
        desk.close()
        desk.close()
        assert driver.is_closed


def test_a_failure_of_the_thread_reaches_loop() -> None:
    driver = ScriptedDriver()
    with zmq.Context() as context:
        desk = open_desk(context, driver)
        driver.error = ValueError("what now")
        assert desk.socket.poll(5000)
        with pytest.raises(PeerError, match="what now"):
            desk.poll(0.0)
        assert driver.is_closed
        desk.close()


def test_a_driver_that_cannot_be_opened_is_told_as_it_is() -> None:
    def refuse() -> PushDriver:
        raise ConfigError("no such backend")

    began = time.monotonic()
    with zmq.Context() as context, pytest.raises(ConfigError, match="no such backend"):
        PushDesk(0, (0, 1), 64, context, refuse)
    assert time.monotonic() - began < 5.0
