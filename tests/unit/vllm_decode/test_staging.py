"""Cache blocks, packed into staging slots, against the pool they came from."""

from __future__ import annotations

import pytest
import torch

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.vllm_decode.staging import Staging
from wavepp_worker.vllm_decode.versions import BlockLayout

LAYERS, HEADS, OURS, DIMS = 2, 3, 8, 4


def make(block_tokens: int, layout: BlockLayout, slots: int = 5) -> tuple[torch.Tensor, Staging]:
    pool = torch.randn(6, LAYERS, 2, HEADS, OURS, DIMS, generator=torch.Generator().manual_seed(1))
    return pool, Staging(pool, layout, block_tokens, slots)


@pytest.mark.parametrize("block_tokens", [2, 8])
def test_slots_hold_the_parts_asked_for(block_tokens: int) -> None:
    pool, staging = make(block_tokens, BlockLayout.TOKEN_MAJOR)
    blocks = staging.virtual_blocks([4, 1], 11)
    parts = OURS // block_tokens
    assert blocks == tuple(range(4 * parts, 5 * parts)) + tuple(
        range(parts, parts + -(-3 // block_tokens))
    )
    chosen, slots = blocks[-2:], [3, 1]
    used = 11 - block_tokens * (len(blocks) - 1)
    staging.pack(chosen, slots, used)
    for layer in range(LAYERS):
        for index, (block, slot) in enumerate(zip(chosen, slots, strict=True)):
            first = block % parts * block_tokens
            rows = pool[block // parts, layer, :, :, first : first + block_tokens].clone()
            if index == 1:
                rows[:, :, used:] = 0
            assert torch.equal(staging.pool[layer, slot], torch.cat([rows[0], rows[1]], -1))
    assert torch.count_nonzero(staging.pool[:, [0, 2, 4]]) == 0
    assert torch.equal(pool, make(block_tokens, BlockLayout.TOKEN_MAJOR)[0]), "the cache is read"


def test_keys_are_transposed_where_decode_wants_it() -> None:
    pool, staging = make(OURS, BlockLayout.KEYS_TRANSPOSED)
    staging.pack([2], [0], OURS)
    flat = staging.pool[1, 0].reshape(HEADS, -1)
    keys = flat[:, : DIMS * OURS].reshape(HEADS, DIMS, OURS)
    assert torch.equal(keys, pool[2, 1, 0].transpose(1, 2))
    assert torch.equal(flat[:, DIMS * OURS :].reshape(HEADS, OURS, DIMS), pool[2, 1, 1])


def test_addresses_are_those_of_the_slots() -> None:
    _, staging = make(OURS, BlockLayout.TOKEN_MAJOR)
    for layer in range(LAYERS):
        address = staging.base_address + layer * staging.block_bytes + 2 * staging.layer_bytes
        assert staging.pool[layer, 2].data_ptr() == address


def test_blocks_that_do_not_divide_are_a_mistake() -> None:
    with pytest.raises(InvariantError):
        make(3, BlockLayout.TOKEN_MAJOR)
