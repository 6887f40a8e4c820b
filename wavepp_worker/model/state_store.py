"""The state pools of one stage, device and host: one tensor of bytes each, slot-major.

    slot   |layer 0: state fp32 [H, K, V], tail [R, C] ..|layer 1: ...............|...

A slot is a working state or a snapshot; the cache says which.  It is one contiguous range, and the
stage's layers are a contiguous part of a whole model's slot, as for blocks of keys and values.
States are fp32 whatever the model's type: rounding them shows in every later token.

Legend: H value heads, K key dim, V value dim, R rows of the tail, C channels of the convolution.
"""

# ruff: noqa: N803 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.pinning import pin_while_alive
from wavepp_worker.wire.mailbox import Copy


class StateStore:
    """Recurrent states and convolution tails of one stage's delta layers, addressed by slots."""

    def __init__(
        self,
        delta: DeltaSpec,
        *,
        layers: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        host_slots: int = 0,
    ) -> None:
        layer_bytes = delta.layer_bytes(dtype.itemsize)
        self.layers = layers
        self.slots = slots
        # Zeroed: no reader of a slot may ever see another process's freed memory.
        self.pool = torch.zeros((slots, layers * layer_bytes), dtype=torch.uint8, device=device)
        self.host_pool = torch.zeros((host_slots, layers * layer_bytes), dtype=torch.uint8)
        if self.pool.is_cuda and host_slots:
            pin_while_alive(self, self.host_pool, self.pool.device)
        self.layer_bytes = layer_bytes
        self.state_shape = state_shape = (delta.value_heads, delta.key_dim, delta.value_dim)
        self.tail_shape = tail_shape = (delta.tail_rows, delta.channels)
        tail_bytes = delta.tail_rows * delta.channels * dtype.itemsize
        self.states_NHKV: list[Tensor] = []
        self.tails_NRC: list[Tensor] = []
        for layer in range(layers):
            start = layer * layer_bytes
            middle, stop = start + delta.state_bytes, start + delta.state_bytes + tail_bytes
            states = self.pool[:, start:middle].view(torch.float32)
            self.states_NHKV.append(states.view(slots, *state_shape))
            self.tails_NRC.append(self.pool[:, middle:stop].view(dtype).view(slots, *tail_shape))

    @property
    def base_address(self) -> int:
        """Address of slot 0."""
        return self.pool.data_ptr()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: all delta layers of this stage."""
        return self.pool.shape[1]

    def write(self, layer: int, slot: int, state_HKV: Tensor, tail_RC: Tensor) -> None:
        """Store one layer's state after a chunk; on CUDA on the current stream."""
        self.states_NHKV[layer][slot].copy_(state_HKV)
        self.tails_NRC[layer][slot].copy_(tail_RC)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Perform an Install's copies of this window in order; on CUDA on the current stream.

        Raises:
            InvariantError: a kind of copy or a slot that does not exist.
        """
        for copy in copies:
            origin, goal = self._sides(copy.kind)
            is_inside = copy.target in range(len(goal)) and (
                origin is None or copy.source in range(len(origin))
            )
            check(is_inside, "slots are in the pools", copy=copy)
            if origin is None:
                goal[copy.target].zero_()
            else:
                goal[copy.target].copy_(origin[copy.source], non_blocking=True)

    def _sides(self, kind: str) -> tuple[Tensor | None, Tensor]:
        match kind:
            case "zero_state":
                return None, self.pool
            case "load_state":
                return self.pool, self.pool
            case "onboard_state" | "onboard":
                return self.host_pool, self.pool
            case "offload":
                return self.pool, self.host_pool
            case _:
                raise InvariantError(f"a kind of copy that no state has: {kind}")
