"""The production LOOP process around a stage of digests: no torch, no NIXL, all else is real.

Run by the supervisor in place of `wavepp_worker.runtime.loop_process`.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

from tests.integration.toy_desk import DigestDesk
from tests.integration.toy_stream import DigestStream, Gates, Hop
from tests.integration.toy_wire import desk_address, load_spec
from wavepp_worker.base.types import Rank
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.runtime import loop_process
from wavepp_worker.runtime.boot import Boot
from wavepp_worker.sim.digest import DigestStage
from wavepp_worker.transfer.holds import HoldTable
from wavepp_worker.transport.sockets import Context
from wavepp_worker.wire.mailbox import WindowReport
from wavepp_worker.wire.waves import WAVES, WaveHeader


@dataclass
class DigestRank:
    """What the LoopDriver drives; the same fields as `stage_setup.Stage`."""

    stream: DigestStream
    desk: DigestDesk
    windows: tuple[WindowReport, ...]

    def close(self) -> None:
        self.stream.close()
        self.desk.close()


class DigestSide:
    """A `DeviceSide` without a device."""

    def __init__(self, boot: Boot, rank: Rank) -> None:
        self._boot, self._rank = boot, rank
        self._context: Context | None = None
        self._hop: Hop | None = None

    def open_store(self) -> str:
        self._hop = Hop(self._boot.config.cluster.host)
        return self._hop.address if self._rank == 0 else ""

    def build_stage(self, store_address: str, context: Context) -> Any:
        spec, config = load_spec(), self._boot.config
        assert self._hop is not None
        if self._rank:
            self._hop.connect(store_address)
        windows = spec.windows[self._rank]
        delays = {
            name: spec.delays_s.get(f"{name}{self._rank}", 0.0) for name in ("wave", "copy", "hop")
        }
        gates = Gates(delays)
        stage = DigestStage(
            self._rank, [window_spec(window) for window in windows], config.cache.block_tokens
        )
        stream = DigestStream(
            stage,
            self._hop,
            gates,
            is_last=self._rank == config.cluster.stages - 1,
            broken_wave=spec.broken_waves.get(self._rank),
        )
        holds = HoldTable(config.transfer.hold_s, config.transfer.holds_max)
        address = desk_address(self._boot.run_dir, self._rank)
        desk = DigestDesk(self._rank, context, address, holds, stage, stream, gates)
        return DigestRank(stream, desk, windows)


def window_spec(window: WindowReport) -> WindowSpec:
    """Return the cache's description of a window that this rank reports."""
    return WindowSpec(
        kind=window.kind,  # type: ignore[arg-type]
        slots=window.slots,
        host_slots=window.host_slots,
        span_tokens=window.span_tokens,
        chunk_tokens=window.chunk_tokens,
    )


class LossySockets(loop_process.LoopSockets):
    """Loses the wave headers that the test's spec names."""

    def send_to_peers(self, frame: bytes) -> None:
        message = WAVES.decode(frame)
        if not (isinstance(message, WaveHeader) and message.wave in load_spec().lost_waves):
            super().send_to_peers(frame)


if __name__ == "__main__":
    loop_process.LoopSockets = LossySockets  # type: ignore[misc]
    exit_status = loop_process.main(sys.argv[1:], DigestSide)
    logging.shutdown()
    os._exit(exit_status)
