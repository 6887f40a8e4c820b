"""Which event a wave waits for on CUDA, seen in the order of calls; no device is needed.

tests/conformance runs the same rule on real streams where there are CUDA devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.runtime import stage_stream
from wavepp_worker.runtime.stage_stream import CudaStageStream
from wavepp_worker.wire.mailbox import Copy

OFFLOAD, ONBOARD = Copy("offload", 0, 4, 2), Copy("onboard", 0, 2, 20)


class FakeStream:
    def __init__(self, log: list[Any]) -> None:
        self._log = log

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append(("wait", event.after))


class FakeEvent:
    """Remembers what was enqueued last when it was recorded."""

    def __init__(self, log: list[Any]) -> None:
        self._log = log
        self.after: Any = None
        self.is_passed = False

    def record(self) -> None:
        self.after = self._log[-1]

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        pass


class FakeWork:
    """Copies and forwards that only leave their names."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.model = self.store = self
        self.device, self.block_tokens = torch.device("cpu"), 8

    def copy(self, copies: tuple[Copy, ...], _times: Any) -> None:
        self.log.append(copies)

    def receive(self, _chunks: Any) -> None:
        pass

    def forward(self, _batch: Any, _inputs: Any) -> dict[str, Any]:
        self.log.append("forward")
        return {}

    def pick(self, *_: Any) -> None:
        pass

    def send(self, _outputs: Any) -> None:
        pass


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CudaStageStream, list[Any]]]:
    """Return a stream on a device that has done nothing yet, and the order of its calls."""
    log: list[Any] = []

    @contextmanager
    def on(_stream: Any) -> Iterator[None]:
        yield

    class FakeCuda:
        def Stream(self, _device: Any) -> FakeStream:
            return FakeStream(log)

        def Event(self, **_: Any) -> FakeEvent:
            return FakeEvent(log)

    monkeypatch.setattr(stage_stream, "_cuda", FakeCuda())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    stream = CudaStageStream(FakeWork(log))  # type: ignore[arg-type]
    yield stream, log
    stream.close()


def run(stream: CudaStageStream, wave: int, copies_before: int) -> None:
    stream.run(wave, [WaveChunk(wave, 0, 8, ((3,),))], copies_before)


def test_a_wave_waits_for_the_last_batch_it_needs(rig: tuple[CudaStageStream, list[Any]]) -> None:
    """I47, FS-03: not for the batch after it, and not again for what an earlier wave awaited."""
    stream, log = rig
    first, second, third = (OFFLOAD,), (ONBOARD,), (OFFLOAD, ONBOARD)
    for copies in (first, second, third):
        stream.copy(copies)
    run(stream, 1, copies_before=2)
    run(stream, 2, copies_before=1)
    assert log == [first, second, third, ("wait", second), "forward", "forward"]


def test_a_wave_that_waits_for_a_buffer_keeps_its_copies(
    rig: tuple[CudaStageStream, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies enqueued between a wave's call and its launch do not hold it back either."""
    stream, log = rig
    monkeypatch.setattr(stage_stream, "RECEIVES_MAX", 0)
    stream.copy((OFFLOAD,))
    run(stream, 1, copies_before=1)
    stream.copy((ONBOARD,))
    monkeypatch.setattr(stage_stream, "RECEIVES_MAX", 1)
    assert stream.poll() == []  # launches
    assert log == [(OFFLOAD,), (ONBOARD,), ("wait", (OFFLOAD,)), "forward"]


def test_batches_that_are_done_are_forgotten(rig: tuple[CudaStageStream, list[Any]]) -> None:
    """Requests that are cancelled before any wave leave copies that nobody waits for."""
    stream, log = rig
    for _ in range(20):
        stream.copy((OFFLOAD,))
        stream._copied[-1].is_passed = True
    assert len(stream._copied) == 1
    stream.copy((ONBOARD,))
    run(stream, 1, copies_before=20)
    assert log[-1] == "forward"
    run(stream, 2, copies_before=21)
    assert log[-2:] == [("wait", (ONBOARD,)), "forward"]
