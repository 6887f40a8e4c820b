"""One NIXL agent and the one pool that it registers; used by the hold desk, by the reader and by
the stage that writes into vLLM.

Rules that the rest of the package relies on:

* An agent's name is never used twice, so a restarted process is never mistaken for its
  predecessor, whose registrations are void.
* A pool is registered once, in one piece, and stays mapped while the agent lives: a peer may read
  it at any time, and a read of unmapped memory kills the exporting process.
* Metadata travels with a checksum: NIXL forgets how to reach a peer whose metadata arrived cut.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from wavepp_worker.base.errors import ConfigError, TransferError
from wavepp_worker.transfer.desk_wire import Opened

logger = logging.getLogger(__name__)

Region = tuple[int, int, int, int, int]  # address, row bytes, device, bytes to the next row, rows
LOCAL_SIDE = "NIXL_INIT_AGENT"
# How long NIXL's progress thread may wait for traffic.  Its Python API fixes 0, which spins: three
# spinning threads on two cores took a 512 KiB read over tcp from 0.45 ms to 16 ms (median).
PROGRESS_WAIT_US = 100


class BlockPool(Protocol):
    """What a transfer needs of a block store: one contiguous, block-major tensor."""

    @property
    def pool(self) -> torch.Tensor:
        """[blocks, layers, ...], contiguous: a block is one range, a layer one part of it."""

    @property
    def base_address(self) -> int:
        """Address of block 0."""

    @property
    def block_bytes(self) -> int:
        """Bytes from one block to the next; a block is contiguous."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""


class StatePool(Protocol):
    """What a transfer needs of a state store: one contiguous, slot-major tensor of bytes."""

    @property
    def pool(self) -> torch.Tensor:
        """[slots, bytes of a slot], contiguous: a slot is one range, a layer one part of it."""

    @property
    def base_address(self) -> int:
        """Address of slot 0."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one slot."""

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one layer's fp32 state, which comes first."""

    @property
    def tail_shape(self) -> tuple[int, ...]:
        """Shape of one layer's convolution tail, of the model's type."""


def load_nixl() -> Any:
    """Import NIXL's Python API, whichever CUDA flavour of the wheel is installed.

    Raises:
        ConfigError: none is installed.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # read at its import; else INFO, to stdout
    major = (torch.version.cuda or "13").split(".")[0]
    names = dict.fromkeys((f"nixl_cu{major}", "nixl_cu13", "nixl_cu12"))
    for name in names:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    raise ConfigError("NIXL is not installed: install nixl-cu13 or nixl-cu12")


class TransferAgent:
    """A NIXL agent with its registered pools.  Threads may share it; NIXL serializes calls.

    Args:
        states: of a model with recurrent layers; either pool may be empty, but not both.

    Raises:
        ConfigError: NIXL or the backend cannot be used on this machine.
    """

    def __init__(
        self, role: str, backend: str, store: BlockPool, states: StatePool | None = None
    ) -> None:
        pools = [store.pool] if states is None else [store.pool, states.pool]
        pools = [pool for pool in pools if pool.numel()]
        if not pools or not all(pool.is_contiguous() for pool in pools):
            raise ConfigError("pools must be contiguous and not empty to be registered")
        api = load_nixl()
        self.name = f"wavepp-{role}-{uuid.uuid4().hex}"
        device = store.pool.device
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self.device = (device.index or 0) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.zeros(1, device=device)  # the CUDA context must exist before the agent
        config = api.nixl_agent_config(
            backends=[backend], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self._nixl = _make_patient_agent(api, self.name, config)
        if backend not in self._nixl.backends:
            raise ConfigError(f"transfer.backend {backend!r} is not available in this NIXL")
        self._pools = store, states  # keeps them mapped
        self._registered = [self._nixl.register_memory(pool) for pool in pools]
        self.metadata: bytes = self._nixl.get_agent_metadata()
        self.metadata_digest = digest(self.metadata)

    def add_peer(self, name: str, metadata: bytes, expected_digest: bytes) -> None:
        """Load a peer's metadata.

        Raises:
            TransferError: the metadata is damaged, or names another agent.
        """
        if digest(metadata) != expected_digest:
            raise TransferError("the exporter's metadata arrived damaged")
        loaded = self._nixl.add_remote_agent(metadata)
        loaded_name = loaded.decode() if isinstance(loaded, bytes) else loaded
        if loaded_name != name:
            self.forget_peer(loaded_name)
            raise TransferError(f"metadata of agent {loaded_name}, expected {name}")

    def load_peer(self, metadata: bytes) -> str:
        """Load the metadata of a peer that tells no checksum; return its agent's name.

        Raises:
            TransferError: NIXL cannot use them.
        """
        try:
            loaded = self._nixl.add_remote_agent(metadata)
        except Exception as error:  # NIXL's errors share no base class
            raise TransferError(f"NIXL refuses the peer's metadata: {error}") from error
        return loaded.decode() if isinstance(loaded, bytes) else str(loaded)

    def forget_peer(self, name: str) -> None:
        """Drop what is known of a peer; transfers with it become invalid.  Idempotent."""
        try:
            self._nixl.remove_remote_agent(name)
        except Exception as error:  # NIXL's errors share no base class
            logger.debug("peer was not known agent=%s error=%s", name, error)

    def local_rows(
        self, base: int, row_bytes: int, rows: int, offset_bytes: int, length_bytes: int
    ) -> Any:
        """Prepare `length_bytes` at `offset_bytes` of every row of an own pool; index = row."""
        row = (base + offset_bytes, length_bytes, self.device, row_bytes, rows)
        return self._nixl.prep_xfer_dlist(LOCAL_SIDE, np.array([row], np.uint64), self.memory)

    def peer_rows(self, opened: Opened, base: int, row_bytes: int, rows: int) -> Any:
        """Prepare every whole row of one of a peer's pools; index = row."""
        row = (base, row_bytes, opened.device, row_bytes, rows)
        return self._nixl.prep_xfer_dlist(opened.agent, np.array([row], np.uint64), opened.memory)

    def peer_regions(self, name: str, memory: str, regions: Sequence[Region]) -> Any:
        """Prepare every row of a peer's regions; the index counts across regions, in order."""
        return self._nixl.prep_xfer_dlist(name, np.array(regions, np.uint64), memory)

    def make_write(
        self, local: Any, local_rows: Any, remote: Any, remote_rows: Any, notice: bytes
    ) -> Any:
        """Make a WRITE; `notice`, if any, arrives after the last byte.  Row numbers are int32."""
        return self._nixl.make_prepped_xfer("WRITE", local, local_rows, remote, remote_rows, notice)

    def notify(self, name: str, notice: bytes) -> None:
        """Send a notice without data."""
        self._nixl.send_notif(name, notice)

    def take_notices(self) -> dict[str, list[bytes]]:
        """Return what has arrived since the last call, by the sender's name."""
        notices: dict[str, list[bytes]] = self._nixl.get_new_notifs()
        return notices

    def make_read(self, local: Any, local_blocks: Any, remote: Any, remote_blocks: Any) -> Any:
        """Make a READ of `remote_blocks` into `local_blocks`: int32 arrays of equal length."""
        return self._nixl.make_prepped_xfer("READ", local, local_blocks, remote, remote_blocks)

    def post(self, transfer: Any) -> bool:
        """Start a transfer; may copy inside the call.  True if it is done."""
        return self._is_done(self._nixl.transfer(transfer))

    def is_done(self, transfer: Any) -> bool:
        """Return whether a posted transfer is done; raises if the peer is gone."""
        return self._is_done(self._nixl.check_xfer_state(transfer))

    def close(self) -> None:
        """End the agent, and only then let go of the pool.  Idempotent."""
        if self._nixl is None:
            return
        for registered in self._registered:
            self._nixl.deregister_memory(registered)
        self._nixl = None
        self._registered = []

    @staticmethod
    def _is_done(state: str) -> bool:
        if state == "ERR":
            raise TransferError("NIXL reports a failed transfer")
        return state == "DONE"


def _make_patient_agent(api: Any, name: str, config: Any) -> Any:
    """Return an agent whose progress thread waits for traffic instead of spinning."""
    bindings = api.nixlBind
    plain = bindings.nixlAgentConfig

    class PatientConfig(plain):  # type: ignore[misc, valid-type]  # the API sets the field
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, PROGRESS_WAIT_US if key == "pthrDelay" else value)

    bindings.nixlAgentConfig = PatientConfig
    try:
        return api.nixl_agent(name, config)
    finally:
        bindings.nixlAgentConfig = plain


def digest(metadata: bytes) -> bytes:
    """Return the checksum that travels with metadata."""
    return hashlib.sha256(metadata).digest()
