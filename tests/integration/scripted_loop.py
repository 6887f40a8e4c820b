"""Stands in for the LOOP process: answers every Install at once, without a model or a wave plane.

Run by the supervisor in tests of the WAVE process.  `WAVEPP_TEST_LOOP` picks a misbehaviour:
`crash` fails at the start, `mute` never says a word.
"""

from __future__ import annotations

import os
import sys

import zmq

from wavepp_worker.runtime.boot import begin_child, loop_address
from wavepp_worker.transport.sockets import Context, open_socket
from wavepp_worker.wire.mailbox import (
    FROM_LOOP,
    REPORTS,
    TO_LOOP,
    Alive,
    Finished,
    Freed,
    Install,
    LoopReady,
    LoopUp,
    Peers,
    Ready,
    Shutdown,
    StageHandoff,
    WaveDone,
    WindowReport,
)

ALIVE_INTERVAL_MS = 100


def main() -> int:
    boot, rank = begin_child(sys.argv[1:])
    misbehaviour = os.environ.get("WAVEPP_TEST_LOOP", "")
    if misbehaviour == "crash":
        raise RuntimeError("no device for this test")
    context: Context = zmq.Context()
    mailbox = open_socket(context, zmq.PAIR, linger_ms=1000)
    mailbox.connect(loop_address(boot.run_dir, rank))
    reports = open_socket(context, zmq.PUSH, linger_ms=1000)
    reports.connect(boot.report_address)
    if misbehaviour != "mute":
        mailbox.send(FROM_LOOP.encode(LoopUp(f"tcp://loop{rank}", "store:1" if rank == 0 else "")))
    wave, is_ready = 0, False
    while True:
        while is_ready and not mailbox.poll(ALIVE_INTERVAL_MS):
            mailbox.send(FROM_LOOP.encode(Alive()))
        message = TO_LOOP.decode(mailbox.recv())
        match message:
            case Peers(wave_addresses=addresses, store_address=store):
                expected = tuple(f"tcp://loop{r}" for r in range(boot.config.cluster.stages))
                assert (addresses, store) == (expected, "store:1"), message
                slots = boot.config.cache.device_tokens // boot.plan.block_tokens
                mailbox.send(FROM_LOOP.encode(LoopReady((WindowReport("attention", slots),))))
                is_ready = True
            case Install(rid=rid, prompt_tokens=tokens, endpoint=endpoint):
                wave += 1
                mailbox.send(FROM_LOOP.encode(WaveDone(wave, ((rid, tokens),))))
                handoff = StageHandoff(int(rank), (0, 1), "tcp://desk", f"{rid}")
                reports.send(REPORTS.encode(Ready(rid, rank, handoff)))
                if rank == 0:
                    reports.send(REPORTS.encode(Finished(rid, endpoint, 42, -0.5)))
                mailbox.send(FROM_LOOP.encode(Freed(rid)))
            case Shutdown():
                context.destroy(linger=1000)
                return 0


if __name__ == "__main__":
    sys.exit(main())
