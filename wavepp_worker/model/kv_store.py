"""The block pools of one stage, device and host: one tensor each, block-major.

    pool_NLKHBD: [blocks N, layers L, 2 (key, value), kv_heads H, block_tokens B, head_dim D]
                 latent attention: one plane instead of 2, one head, D = latent + shared key

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
from wavepp_worker.base.units import ceil_div
from wavepp_worker.model.pinning import pin_while_alive
from wavepp_worker.wire.mailbox import Copy


class KvStore:
    """Keys and values, or latents, of one stage's attention layers, addressed by block slots.

    Args:
        planes: 2 with keys and values; 1 where one row per token and head holds all.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        planes: int = 2,
        dtype: torch.dtype,
        device: torch.device | str,
        host_blocks: int = 0,
    ) -> None:
        # Zeroed: no reader of a block may ever see another process's freed memory.
        self.pool = torch.zeros(
            (blocks, layers, planes, kv_heads, block_tokens, head_dim), dtype=dtype, device=device
        )
        self.host_pool = torch.zeros((host_blocks, *self.pool.shape[1:]), dtype=dtype)
        if self.pool.is_cuda and self.host_pool.nbytes:
            pin_while_alive(self, self.host_pool, self.pool.device)
        self.layers = layers
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._planes_KNHBD = [self.pool[:, layer].unbind(1) for layer in range(layers)]
        self._layers_KHNBD = [self.pool[:, layer].permute(1, 2, 0, 3, 4) for layer in range(layers)]
        self._layers_KNBHD = [self.pool[:, layer].permute(1, 0, 3, 2, 4) for layer in range(layers)]

    @property
    def base_address(self) -> int:
        """Address of block 0; block b starts at `base_address + b * block_bytes`."""
        return self.pool.data_ptr()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers and planes of this stage."""
        return self.layers * self.layer_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer within a block; layer l starts at `l * layer_bytes`."""
        return math.prod(self.pool.shape[2:]) * self.pool.element_size()

    def write(self, layer: int, blocks_T: Tensor, offsets_T: Tensor, *rows_THD: Tensor) -> None:
        """Store the wave's rows; token t goes to row `offsets_T[t]` of `blocks_T[t]`.

        Args:
            layer: index within this stage.
            blocks_T, offsets_T: int64 on the pool's device; pairs are distinct.
            rows_THD: one per plane (keys, values); the pool's dtype and device, any strides.
        """
        for plane, rows in zip(self._planes_KNHBD[layer], rows_THD, strict=True):
            plane[blocks_T, :, offsets_T] = rows

    def gather(self, layer: int, table_n: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Return per plane a contiguous-in-D copy [H, S, D] of a sequence's first `tokens` tokens.

        Args:
            layer: index within this stage.
            table_n: int64 on the pool's device; slots of the sequence's blocks, in order.
            tokens: S, at most `n * block_tokens`.
        """
        rows_KHnBD = self._layers_KHNBD[layer].index_select(2, table_n)
        return rows_KHnBD.flatten(2, 3)[:, :, :tokens].unbind()

    def rows(self, layer: int, table_n: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return per plane a copy [S, H, D], contiguous rows, of a sequence's tokens [start, stop).

        Args:
            layer: index within this stage.
            table_n: int64 on the pool's device; slots of the sequence's blocks, in order.
        """
        first = start // self.block_tokens
        table_n = table_n[first : ceil_div(stop, self.block_tokens)]
        rows_KnBHD = self._layers_KNBHD[layer].index_select(1, table_n)
        skipped = first * self.block_tokens
        return rows_KnBHD.flatten(1, 2)[:, start - skipped : stop - skipped].unbind()

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
