"""Where blocks wait, in decode's layout, for their write: host memory of a fixed size.

    staging_LSHBD: [layers L, slots S, heads H, tokens of a decode block B, 2 * dims D]

A slot holds one decode block of every layer of this stage.  Layers lie outside slots, so that
neighbouring slots meet neighbouring blocks of decode's region and NIXL makes one write of them.

Our blocks may be several decode blocks long: decode block `v` of a prompt's cache is part `v % k`
of our block `v // k`.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wavepp_worker.base.errors import check
from wavepp_worker.vllm_decode.pack import pack_blocks
from wavepp_worker.vllm_decode.versions import BlockLayout


class Staging:
    """Packed copies of cache blocks.  One thread.

    Args:
        pool_NLKHBD: the stage's cache, [blocks, layers, 2, heads, tokens, dims]; any device.
        block_tokens: of decode; divides ours.
        slots: decode blocks that fit at the same time.
    """

    def __init__(
        self, pool_NLKHBD: Tensor, layout: BlockLayout, block_tokens: int, slots: int
    ) -> None:
        _, layers, planes, heads, tokens, dims = pool_NLKHBD.shape
        check(planes == 2 and tokens % block_tokens == 0, "keys and values in whole decode blocks")
        self._cache = pool_NLKHBD
        self._layout = layout
        self._block_tokens = block_tokens
        self._parts = tokens // block_tokens
        self.layers, self.slots = layers, slots
        self.pool = torch.zeros(
            (layers, slots, heads, block_tokens, 2 * dims), dtype=pool_NLKHBD.dtype
        )
        # A stream of its own: the stage's waves are not waited for and do not wait.
        self._stream = (
            torch.cuda.Stream(pool_NLKHBD.device)  # type: ignore[no-untyped-call]
            if pool_NLKHBD.device.type == "cuda"
            else None
        )

    @property
    def base_address(self) -> int:
        """Address of slot 0 of the first layer."""
        return self.pool.data_ptr()

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one decode block."""
        return self.pool[0, 0].nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes from one layer's slots to the next layer's."""
        return self.slots * self.layer_bytes

    def virtual_blocks(self, table: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return the decode blocks of a prompt whose cache blocks are `table`."""
        count = -(-tokens // self._block_tokens)
        parts = self._parts
        return tuple(table[at // parts] * parts + at % parts for at in range(count))

    def pack(self, blocks: Sequence[int], slots: Sequence[int], used_of_last: int) -> None:
        """Copy decode blocks into slots; returns when the copies are there.

        Args:
            used_of_last: tokens of the last block that belong to the prompt; the rest is zeroed,
                because it may still hold what another prompt left there.
        """
        if self._stream is None:
            self._pack(blocks, slots, used_of_last)
            return
        with torch.cuda.stream(self._stream):
            self._pack(blocks, slots, used_of_last)

    def _pack(self, blocks: Sequence[int], slots: Sequence[int], used_of_last: int) -> None:
        device = self._cache.device
        ours_n = torch.tensor([block // self._parts for block in blocks], device=device)
        part_n = torch.tensor([block % self._parts for block in blocks], device=device)
        slots_n = torch.tensor(slots)
        count_n = torch.arange(len(blocks), device=device)
        for layer in range(self.layers):
            rows_nKHBD = self._cache[ours_n, layer]
            if self._parts > 1:
                pieces_nKHpBD = rows_nKHBD.view(
                    *rows_nKHBD.shape[:3], self._parts, self._block_tokens, rows_nKHBD.shape[-1]
                )
                rows_nKHBD = pieces_nKHpBD.movedim(3, 1)[count_n, part_n]
            rows_nKHBD[-1, :, :, used_of_last:] = 0
            packed = pack_blocks(rows_nKHBD[:, 0], rows_nKHBD[:, 1], self._layout)
            self.pool[layer, slots_n] = packed.cpu()
