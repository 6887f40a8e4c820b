"""The production LOOP process of a hybrid model; only the hand-off is not production's.

Run by the supervisor in place of `wavepp_worker.runtime.loop_process`, where no decode worker
reads: here a hold ends as soon as it is opened.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from wavepp_worker.runtime import loop_process
from wavepp_worker.runtime.stage_setup import TorchSide, build_work, open_stream
from wavepp_worker.runtime.stage_stream import CpuStageStream, CudaStageStream
from wavepp_worker.transport.activations import join_store
from wavepp_worker.transport.sockets import Context, open_socket
from wavepp_worker.wire.mailbox import StageHandoff, StateSlots, WindowReport


class BriefDesk:
    """Stands where `transfer.desk.HoldDesk` stands; nobody ever reads."""

    def __init__(self, rank: int, context: Context) -> None:
        self._rank = rank
        self._ended: list[int] = []
        self.socket = open_socket(context, zmq.ROUTER)
        self.socket.bind(f"inproc://desk{rank}")

    def open_hold(
        self,
        rid: int,
        tables: Sequence[Sequence[int]],
        tokens: int,
        states: Sequence[StateSlots],
        now: float,
    ) -> StageHandoff:
        self._ended.append(rid)
        return StageHandoff(self._rank, (0, 1), "nowhere", f"{len(states)} states")

    def release(self, rid: int) -> None:
        """The hold has ended or is about to."""

    def poll(self, now: float) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def next_deadline(self) -> float | None:
        return 0.0 if self._ended else None

    def stats(self, now: float) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.socket.close()


@dataclass
class HybridRank:
    """What the LoopDriver drives; the same fields as `stage_setup.Stage`."""

    stream: CpuStageStream | CudaStageStream
    desk: BriefDesk
    windows: tuple[WindowReport, ...]

    def close(self) -> None:
        self.stream.close()
        self.desk.close()


class HybridSide(TorchSide):
    """Production's device side, up to the desk."""

    def build_stage(self, store_address: str, context: Context) -> Any:
        if self._store is None:
            timeout_s = self._boot.config.cluster.start_timeout_s
            self._store = join_store(store_address, timeout_s=timeout_s)
        work, windows = build_work(self._boot, self._rank, self._store)
        return HybridRank(open_stream(work), BriefDesk(self._rank, context), windows)


if __name__ == "__main__":
    exit_status = loop_process.main(sys.argv[1:], HybridSide)
    logging.shutdown()
    os._exit(exit_status)
