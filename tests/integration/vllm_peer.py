"""Decode's side of vLLM's push protocol, for tests: real ZeroMQ and NIXL, none of our state.

Written from vLLM's messages, not from `vllm_decode`.  Runs in the test's process, or in one of its
own that can be stopped and killed, driven by JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from wavepp_worker.transfer.agent import load_nixl

REPO = Path(__file__).resolve().parents[2]
SENTINEL = -7.0  # what every block holds until it is written


class VllmPeer:
    """A decode engine with one rank: allocates, registers, counts notices.

    Args:
        engine_id: a restarted engine may come back under its old one.
        changes: of its own handshake, e.g. `block_size`.
    """

    def __init__(
        self,
        compatibility_hash: str,
        *,
        layers: int,
        heads: int,
        block_tokens: int,
        dims: int,
        blocks: int = 32,
        engine_id: str = "decode-engine",
        is_silent: bool = False,
        changes: dict[str, Any] | None = None,
    ) -> None:
        api = load_nixl()
        self.engine_id, self.is_silent = engine_id, is_silent
        self.hash = compatibility_hash
        shape = (layers, blocks, heads, block_tokens, 2 * dims)
        self.pool = torch.full(shape, SENTINEL)
        self.notices: Counter[str] = Counter()
        self._agent = api.nixl_agent(str(uuid.uuid4()), api.nixl_agent_config(backends=["UCX"]))
        self._registered = self._agent.register_memory(self.pool)
        block_bytes = self.pool[0, 0].nbytes
        inner = {
            "engine_id": engine_id,
            "agent_metadata": self._agent.get_agent_metadata(),
            "kv_caches_base_addr": [self.pool[layer].data_ptr() for layer in range(layers)],
            "device_id": 0,
            "num_blocks": blocks,
            "block_lens": [block_bytes] * layers,
            "block_strides": [block_bytes] * layers,
            "kv_cache_layout": "LBHNC",
            "block_size": block_tokens,
            "ssm_sizes": (0, 0),
            "attn_backend_name": "CPU_ATTN",
            "physical_blocks_per_logical_kv_block": 1,
            "region_num_blocks": [blocks] * layers,
            "region_group_ids": [0] * layers,
            "region_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)],
            "region_mem_types": ["DRAM"] * layers,
            "dcp_size": 1,
            "pcp_size": 1,
            "region_members": None,
            **(changes or {}),
        }
        self._payload = msgspec.msgpack.encode(
            {
                "compatibility_hash": compatibility_hash,
                "agent_metadata_bytes": msgspec.msgpack.encode(inner),
            }
        )
        self._context: zmq.Context[Any] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def register(self, request_id: str, blocks: list[int], params: dict[str, Any]) -> None:
        """Shake hands with every stage, then offer blocks to all of them."""
        for key in (
            "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id",
            "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size",
            "remote_num_tokens", "remote_blocks_expiry_time", "transfer_mode",
        ):  # fmt: skip
            assert key in params, f"vLLM's engine would die without {key}"
        agents = [self._shake_hands(params, stage) for stage in range(params["pp_size"])]
        registration = {
            "request_id": request_id,
            "decode_engine_id": self.engine_id,
            "decode_host": "127.0.0.1",
            "decode_port": self.port,
            "decode_tp_size": 1,
            "local_block_ids": [blocks],
            "remote_engine_id": params["remote_engine_id"],
            "remote_host": params["remote_host"],
            "remote_port": params["remote_port"],
            "remote_tp_size": params["tp_size"],
            "remote_pp_size": params["pp_size"],
        }
        for agent in agents:
            self._agent.send_notif(agent, b"PUSH_REG:" + msgspec.msgpack.encode(registration))

    def written(self, blocks: list[int]) -> list[int]:
        """Return which of these blocks anything was written to."""
        return [block for block in blocks if bool((self.pool[:, block] != SENTINEL).any())]

    def count(self, request_id: str) -> int:
        """Return how many stages have written."""
        for notices in self._agent.get_new_notifs().values():
            for notice in notices:
                name, _, ranks = notice.decode().rpartition(":")
                assert ranks == "1"
                self.notices[name] += 1
        return self.notices[request_id]

    def is_filled(self, request_id: str, stages: int, timeout_s: float) -> bool:
        """Return whether all stages wrote within the time."""
        deadline = time.monotonic() + timeout_s
        while self.count(request_id) < stages:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        assert self.count(request_id) == stages, "a stage wrote twice"
        return True

    def keys_values(self, layer: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the CPU kernel would read of a block: [heads, tokens, dims] each."""
        heads, tokens, width = self.pool.shape[2:]
        dims = width // 2
        flat = self.pool[layer, block].reshape(heads, -1)
        keys = flat[:, : dims * tokens].reshape(heads, dims, tokens).transpose(1, 2)
        return keys, flat[:, dims * tokens :].reshape(heads, tokens, dims)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(5)
        self._agent.deregister_memory(self._registered)
        self._agent = None
        self._context.destroy(linger=0)

    def _shake_hands(self, params: dict[str, Any], stage: int) -> str:
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        try:
            socket.connect(f"tcp://{params['remote_host']}:{params['remote_port']}")
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", stage, 0)))
            payload, clock = socket.recv_multipart()
        finally:
            socket.close()
        assert isinstance(msgspec.msgpack.decode(clock), float)
        outer = msgspec.msgpack.decode(payload)
        assert outer["compatibility_hash"] == self.hash, "decode would refuse this producer"
        inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
        assert inner["engine_id"] == params["remote_engine_id"]
        assert inner["block_size"] == self.pool.shape[3]
        name = self._agent.add_remote_agent(inner["agent_metadata"])
        return name.decode() if isinstance(name, bytes) else name

    def _serve(self) -> None:
        while not self._is_closing:
            if not self._router.poll(20) or self.is_silent:
                continue
            identity, empty, request = self._router.recv_multipart()
            assert (empty, msgspec.msgpack.decode(request)) == (b"", [b"get_meta_msg", 0, 0])
            clock = msgspec.msgpack.encode(time.perf_counter())
            self._router.send_multipart([identity, b"", self._payload, clock])


class PeerProcess:
    """A peer that can be stopped and killed.  Use as a context manager."""

    def __init__(self, compatibility_hash: str, **shape: Any) -> None:
        settings = json.dumps({"compatibility_hash": compatibility_hash, **shape})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.vllm_peer", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPO,
        )

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the peer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the peer died"
        return json.loads(line)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def main() -> None:
    """Answer method calls until stdin ends."""
    settings = json.loads(sys.argv[1])
    peer = VllmPeer(settings.pop("compatibility_hash"), **settings)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        stops = method == "register_and_stop"
        answer = getattr(peer, "register" if stops else method)(*arguments)
        print(json.dumps(answer), flush=True)
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
