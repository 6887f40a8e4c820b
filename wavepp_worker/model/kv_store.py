"""The block pools of one stage, device and host: one tensor each, block-major.

    pool_NLKHBD: [blocks N, layers L, 2 (key, value), kv_heads H, block_tokens B, head_dim D]

One block of a stage is one contiguous range (`block_bytes`), so a hand-off needs one descriptor
per block, and a stage's layers are a contiguous part of a whole-model row.  Heads lie outside
tokens: a reader that owns some heads of a block finds each layer's share contiguous as well.
Blocks move between the tiers as whole ranges, neighbours together.

Legend: T tokens of the wave, S tokens of one sequence, n blocks of one sequence.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wavepp_worker.base.errors import check
from wavepp_worker.model.pinning import pin_while_alive
from wavepp_worker.wire.mailbox import Copy


class KvStore:
    """Keys and values of one stage's attention layers, addressed by block slots."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        host_blocks: int = 0,
    ) -> None:
        # Zeroed: no reader of a block may ever see another process's freed memory.
        self.pool = torch.zeros(
            (blocks, layers, 2, kv_heads, block_tokens, head_dim), dtype=dtype, device=device
        )
        self.host_pool = torch.zeros((host_blocks, *self.pool.shape[1:]), dtype=dtype)
        if self.pool.is_cuda and self.host_pool.nbytes:
            pin_while_alive(self, self.host_pool, self.pool.device)
        self.layers = layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._keys_NHBD = [self.pool[:, layer, 0] for layer in range(layers)]
        self._values_NHBD = [self.pool[:, layer, 1] for layer in range(layers)]
        self._pairs_KHNBD = [self.pool[:, layer].permute(1, 2, 0, 3, 4) for layer in range(layers)]

    @property
    def base_address(self) -> int:
        """Address of block 0; block b starts at `base_address + b * block_bytes`."""
        return self.pool.data_ptr()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers of this stage, keys and values."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer within a block; layer l starts at `l * layer_bytes`."""
        return math.prod(self.pool.shape[2:]) * self.pool.element_size()

    def write(
        self, layer: int, blocks_T: Tensor, offsets_T: Tensor, k_THD: Tensor, v_THD: Tensor
    ) -> None:
        """Store the wave's keys and values; token t goes to row `offsets_T[t]` of `blocks_T[t]`.

        Args:
            layer: index within this stage.
            blocks_T, offsets_T: int64 on the pool's device; pairs are distinct.
            k_THD, v_THD: the pool's dtype and device, any strides.
        """
        self._keys_NHBD[layer][blocks_T, :, offsets_T] = k_THD
        self._values_NHBD[layer][blocks_T, :, offsets_T] = v_THD

    def gather(self, layer: int, table_n: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return contiguous-in-D copies k_HSD, v_HSD of a sequence's first `tokens` tokens.

        Args:
            layer: index within this stage.
            table_n: int64 on the pool's device; slots of the sequence's blocks, in order.
            tokens: S, at most `n * block_tokens`.
        """
        pair_KHnBD = self._pairs_KHNBD[layer].index_select(2, table_n)
        pair_KHSD = pair_KHnBD.flatten(2, 3)[:, :, :tokens]
        return pair_KHSD[0], pair_KHSD[1]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Move blocks between the tiers, in order; on CUDA on the current stream.

        Raises:
            InvariantError: a copy of state, or a slot that no pool has.
        """
        for kind, source, target, count in merge_neighbours(copies):
            if kind == "offload":
                origin, goal = self.pool, self.host_pool
            else:
                origin, goal = self.host_pool, self.pool
            check(
                0 <= source <= len(origin) - count and 0 <= target <= len(goal) - count,
                "slots are in the pools",
                kind=kind,
                source=source,
                target=target,
                count=count,
            )
            goal[target : target + count].copy_(origin[source : source + count], non_blocking=True)


def merge_neighbours(copies: Sequence[Copy]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (kind, first source, first target, count): runs of slots that rise together.

    Sources and targets of one kind lie on different tiers, so a run never reads what it wrote.
    """
    run: tuple[str, int, int, int] | None = None
    for copy in copies:
        check(copy.kind in {"offload", "onboard"}, "this store keeps no states", kind=copy.kind)
        if run is not None:
            kind, source, target, count = run
            if (copy.kind, copy.source, copy.target) == (kind, source + count, target + count):
                run = (kind, source, target, count + 1)
                continue
            yield run
        run = (copy.kind, copy.source, copy.target, 1)
    if run is not None:
        yield run
