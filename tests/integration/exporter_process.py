"""One exporting stage in its own process, driven by JSON lines: what LOOP does with its desk.

The pool holds seeded random bytes, so that a test can compute what a reader must see.  The clock
can be moved forward, which makes holds expire at a chosen point of a transfer.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import zmq

from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.transfer.desk import HoldDesk

KV_HEADS, HEAD_DIM = 2, 8
REPO = Path(__file__).resolve().parents[2]


def make_store(layers: int, blocks: int, block_tokens: int, seed: int) -> KvStore:
    """Return a store filled with seeded random numbers (seed < 0: zeros)."""
    store = KvStore(
        layers=layers,
        blocks=blocks,
        kv_heads=KV_HEADS,
        block_tokens=block_tokens,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
    )
    if seed >= 0:
        store.pool.normal_(generator=torch.Generator().manual_seed(seed))
    return store


class Exporter:
    """Handle of a running exporter process.  Use as a context manager."""

    def __init__(
        self,
        rank: int = 0,
        layers: tuple[int, int] = (0, 2),
        *,
        blocks: int = 32,
        block_tokens: int = 16,
        hold_s: float = 30.0,
        fingerprint: str = "model-a",
        env: dict[str, str] | None = None,
    ) -> None:
        self.rank, self.layers = rank, layers
        self.blocks, self.block_tokens = blocks, block_tokens
        self.seed = 100 + rank
        settings = {
            "rank": rank,
            "layers": layers,
            "blocks": blocks,
            "block_tokens": block_tokens,
            "hold_s": hold_s,
            "fingerprint": fingerprint,
            "seed": self.seed,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name if __spec__ else __name__, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPO,
            env=env,
        )
        self._is_up = False  # waited for when first asked, so that several start together

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def pool(self) -> torch.Tensor:
        """Return what the exporter's pool held at its start."""
        first, stop = self.layers
        return make_store(stop - first, self.blocks, self.block_tokens, self.seed).pool

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run a command in the exporter and return its answer."""
        assert self.process.stdin is not None
        if not self._is_up:
            assert self._read() == "up"
            self._is_up = True
        line = json.dumps({"command": command, **arguments}) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        return self._read()

    def wait_for(self, command: str, wanted: Any, timeout_s: float = 20.0) -> None:
        """Ask until the answer is `wanted`."""
        deadline = time.monotonic() + timeout_s
        while (answer := self.ask(command)) != wanted:
            assert time.monotonic() < deadline, f"{command} stays {answer!r}, wanted {wanted!r}"
            time.sleep(0.005)

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the exporter died"
        return json.loads(line)


def main() -> None:
    """Serve the desk and the commands until stdin ends."""
    settings = json.loads(sys.argv[1])
    first, stop = settings["layers"]
    store = make_store(stop - first, settings["blocks"], settings["block_tokens"], settings["seed"])
    desk = HoldDesk(
        TransferConfig(hold_s=settings["hold_s"]),
        "127.0.0.1",
        store,
        rank=settings["rank"],
        layers=(first, stop),
        block_tokens=settings["block_tokens"],
        dtype="float32",
        fingerprint=settings["fingerprint"],
    )
    ended: list[int] = []
    offset_s = 0.0
    poller = zmq.Poller()
    poller.register(desk.socket, zmq.POLLIN)
    poller.register(sys.stdin.buffer.raw, zmq.POLLIN)
    print(json.dumps("up"), flush=True)
    while True:
        poller.poll(20)
        ended += desk.poll(time.monotonic() + offset_s)
        desk.check_invariants()
        if not select.select([sys.stdin.buffer.raw], [], [], 0)[0]:
            continue
        line = sys.stdin.buffer.raw.readline()
        if not line:
            return
        request = json.loads(line)
        answer: Any = None
        match request["command"]:
            case "hold":
                handoff = desk.open_hold(
                    request["rid"],
                    (request["table"],),
                    request["tokens"],
                    (),
                    time.monotonic() + offset_s,
                )
                answer = [handoff.stage, handoff.layers, handoff.control_address, handoff.hold]
            case "release":
                desk.release(request["rid"])
            case "advance":
                offset_s += request["seconds"]
            case "overwrite":
                store.pool.fill_(-1.0)
            case "ended":
                answer = ended
            case "stats":
                answer = desk.stats(time.monotonic() + offset_s)
            case "reading":
                answer = sum(1 for hold in desk._holds._by_name.values() if hold.ticket)
            case "close":
                desk.close()
                return
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
