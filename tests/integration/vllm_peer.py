"""Decode's side of vLLM's push protocol, for tests: its own sockets and memory, none of our state.

Real ZeroMQ for the side channel.  NIXL's part is played by bytearrays: a WRITE copies ranges of
one into the other, and notifications are handed over in process.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import zmq


class VllmPeer:
    """A decode engine with one rank: allocates, registers, counts notices."""

    def __init__(self, host_hash: str, layers: int, blocks: int, block_bytes: int) -> None:
        self.engine_id = "decode-engine"
        self.block_bytes = block_bytes
        self.pools = [bytearray(blocks * block_bytes) for _ in range(layers)]
        self.notices: Counter[str] = Counter()
        self._context: zmq.Context[Any] = zmq.Context()
        self._asked: list[zmq.Socket[Any]] = []
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        inner = {
            "engine_id": self.engine_id,
            "agent_metadata": b"blob",
            "kv_caches_base_addr": [0] * layers,
            "device_id": 0,
            "num_blocks": blocks,
            "block_lens": [block_bytes] * layers,
            "block_strides": [block_bytes] * layers,
            "kv_cache_layout": "LBHNC",
            "block_size": 2,
            "ssm_sizes": (0, 0),
            "attn_backend_name": "CPU_ATTN",
            "physical_blocks_per_logical_kv_block": 1,
            "region_names": [f"model.layers.{layer}.self_attn.attn" for layer in range(layers)],
            "region_members": None,
        }
        self._payload = msgspec.msgpack.encode(
            {"compatibility_hash": host_hash, "agent_metadata_bytes": msgspec.msgpack.encode(inner)}
        )

    def serve(self) -> None:
        """Answer one handshake."""
        assert self._router.poll(5000), "nobody asked"
        identity, empty, request = self._router.recv_multipart()
        assert (empty, msgspec.msgpack.decode(request)) == (b"", [b"get_meta_msg", 0, 0])
        self._router.send_multipart([identity, b"", self._payload, msgspec.msgpack.encode(1.5)])

    def ask(self, port: int, pp_rank: int) -> zmq.Socket[Any]:
        """Send a handshake to a producer; the caller reads the reply."""
        socket = self._context.socket(zmq.REQ)
        self._asked.append(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((b"get_meta_msg", pp_rank, 0)))
        return socket

    def register(self, request_id: str, blocks: list[int], params: dict[str, Any]) -> bytes:
        """Return the notification that every stage gets."""
        return b"PUSH_REG:" + msgspec.msgpack.encode(
            {
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
        )

    def notify(self, notice: bytes) -> None:
        self.notices[notice.decode().rpartition(":")[0]] += 1

    def close(self) -> None:
        for socket in (self._router, *self._asked):
            socket.close(linger=0)
        self._context.term()
