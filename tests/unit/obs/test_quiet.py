"""FS-104: whoever fails requests cannot drive the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from wavepp_worker.obs import quiet
from wavepp_worker.obs.quiet import INTERVAL_S, LINES_MAX, QuietLog

NAME = "wavepp_worker.tests.quiet"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> QuietLog:
    caplog.set_level(logging.WARNING, NAME)
    logger = logging.getLogger(NAME)
    logger.disabled = False  # tools in the same process may have disabled it
    return QuietLog(logger, clock)


async def test_a_few_lines_are_written_as_they_are(
    log: QuietLog, caplog: pytest.LogCaptureFixture
) -> None:
    log.warn("request failed: code=a", "request=1")
    log.warn("request failed: code=b", "request=2")
    log.close()
    assert caplog.messages == [
        "request failed: code=a request=1",
        "request failed: code=b request=2",
    ]


async def test_a_flood_becomes_a_few_lines_and_a_count(
    log: QuietLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """FS-104: 10,000 failures in 30 s; none is lost from the counts."""
    for index in range(10_000):
        clock.now += 0.003
        log.warn("flood", index)
    log.warn("other", "is not held back")
    log.close()
    counts = [int(line.split()[1]) for line in caplog.messages if " more in " in line]
    single = [line for line in caplog.messages if line.startswith("flood ")]
    assert len(single) + sum(counts) == 10_000
    assert len(caplog.messages) <= (30 / INTERVAL_S + 1) * (LINES_MAX + 1) + 1
    assert "other is not held back" in caplog.messages


async def test_the_rest_is_told_even_if_nothing_follows(
    log: QuietLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "INTERVAL_S", 0.01)
    for index in range(LINES_MAX + 5):
        log.warn("flood", index)
    async with asyncio.timeout(5):
        while len(caplog.messages) <= LINES_MAX:  # noqa: ASYNC110  a log line signals nothing
            await asyncio.sleep(0.001)
    assert caplog.messages[-1].startswith("flood: 5 more in ")
    log.close()
    assert len(caplog.messages) == LINES_MAX + 1, "told once"


async def test_a_new_interval_starts_afresh(
    log: QuietLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(LINES_MAX + 1):
        log.warn("flood", "x")
    clock.now += INTERVAL_S
    log.warn("flood", "again")
    assert caplog.messages[-2:] == [f"flood: 1 more in {INTERVAL_S:.0f} s", "flood again"]
    log.close()
