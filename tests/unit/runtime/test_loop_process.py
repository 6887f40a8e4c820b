"""The top of a LOOP process: what it records when it cannot go on."""

from __future__ import annotations

import logging

import pytest

from wavepp_worker.base.errors import ConfigError, PeerError
from wavepp_worker.runtime import loop_process
from wavepp_worker.wire.mailbox import Fatal


class FakeSockets:
    def __init__(self) -> None:
        self.reports: list[Fatal] = []

    def report(self, message: Fatal) -> None:
        self.reports.append(message)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ConfigError("cluster.devices: no such device"), False), (PeerError("peer lost"), True)],
)
def test_the_users_mistake_is_one_line_and_everything_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    has_traceback: bool,
) -> None:
    sockets = FakeSockets()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop_process, "begin_child", lambda _: (None, 1))
    monkeypatch.setattr(loop_process, "LoopSockets", lambda *_: sockets)
    monkeypatch.setattr(loop_process, "run_loop", fail)
    # A name of its own: Dynamo's logging set-up in another test may have silenced the module's.
    monkeypatch.setattr(loop_process, "logger", logging.getLogger("test_loop_process"))
    assert loop_process.main([]) == 1
    assert sockets.reports == [Fatal(rank=1, role="loop", text=f"stage 1: {error}")]
    (record,) = caplog.records
    assert (record.exc_info is not None) == has_traceback
    assert has_traceback or "cluster.devices: no such device" in record.getMessage()
