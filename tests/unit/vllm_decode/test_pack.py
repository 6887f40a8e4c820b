"""Decode's bytes, against blocks written out value by value."""

from __future__ import annotations

import struct

import pytest
import torch

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.vllm_decode.pack import pack_blocks, pack_tokens
from wavepp_worker.vllm_decode.versions import BlockLayout

# Two heads, three tokens, two dims; blocks of two tokens.  Value = kind, head, token, dim.
K_HTD = [[[100, 101], [110, 111], [120, 121]], [[1100, 1101], [1110, 1111], [1120, 1121]]]
V_HTD = [[[200, 201], [210, 211], [220, 221]], [[1200, 1201], [1210, 1211], [1220, 1221]]]
WRITTEN = {
    BlockLayout.TOKEN_MAJOR: [
        *(100, 101, 200, 201, 110, 111, 210, 211),  # block 0, head 0
        *(1100, 1101, 1200, 1201, 1110, 1111, 1210, 1211),
        *(120, 121, 220, 221, 0, 0, 0, 0),  # block 1: its second token is unused
        *(1120, 1121, 1220, 1221, 0, 0, 0, 0),
    ],
    BlockLayout.KEYS_TRANSPOSED: [
        *(100, 110, 101, 111, 200, 201, 210, 211),
        *(1100, 1110, 1101, 1111, 1200, 1201, 1210, 1211),
        *(120, 0, 121, 0, 220, 221, 0, 0),
        *(1120, 0, 1121, 0, 1220, 1221, 0, 0),
    ],
}


@pytest.mark.parametrize("layout", BlockLayout)
def test_the_bytes_are_those_of_decodes_layout(layout: BlockLayout) -> None:
    packed = pack_tokens(
        torch.tensor(K_HTD, dtype=torch.float32),
        torch.tensor(V_HTD, dtype=torch.float32),
        2,
        layout,
    )
    assert packed.shape == (2, 2, 2, 4)
    assert packed.numpy().tobytes() == struct.pack("<32f", *WRITTEN[layout])


@pytest.mark.parametrize("layout", BlockLayout)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_tokens", "dims"), [(16, 64), (32, 80), (64, 128)])
def test_every_element_is_where_the_layout_puts_it(
    layout: BlockLayout, dtype: torch.dtype, block_tokens: int, dims: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    shape = (3, 2, block_tokens, dims)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    rows = pack_blocks(k, v, layout).view(3, 2, -1)
    for block, head, token, dim in [(0, 0, 0, 0), (2, 1, block_tokens - 1, dims - 1), (1, 0, 5, 7)]:
        if layout is BlockLayout.TOKEN_MAJOR:
            key_at = token * 2 * dims + dim
            value_at = key_at + dims
        else:
            key_at = dim * block_tokens + token
            value_at = block_tokens * dims + token * dims + dim
        assert rows[block, head, key_at] == k[block, head, token, dim]
        assert rows[block, head, value_at] == v[block, head, token, dim]


def test_strided_input_packs_like_a_copy() -> None:
    pool = torch.arange(2 * 2 * 3 * 4 * 2, dtype=torch.float32).view(2, 2, 3, 4, 2)
    k, v = pool.unbind(1)
    for layout in BlockLayout:
        assert torch.equal(
            pack_blocks(k, v, layout), pack_blocks(k.contiguous(), v.contiguous(), layout)
        )


def test_keys_and_values_of_different_shapes_are_a_mistake() -> None:
    with pytest.raises(InvariantError, match="match in shape"):
        pack_blocks(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 4), BlockLayout.TOKEN_MAJOR)
