"""Named cases of the quorum, the view and the encoding for Dynamo."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kv_router_hooks.publisher import RouterPublisher, encode_events
from kv_router_hooks.quorum import Quorum, Removed, Stored
from kv_router_hooks.router_view import BlockRemoved, BlockStored, RouterView
from kv_router_hooks.window_rule import DENSE
from wavepp_worker.base.errors import InvariantError, PeerError

A, B, C = (bytes([n]) * 32 for n in (1, 2, 3))
BLOCK = 2


def tokens(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


PROMPT = tokens(1, 1, 2, 2, 3, 3, 9)  # three full blocks A, B, C and a rest
STORED = {
    A: BlockStored(A, None, tokens(1, 1), ""),
    B: BlockStored(B, A, tokens(2, 2), ""),
    C: BlockStored(C, B, tokens(3, 3), ""),
}


def make_view(stages: int = 2) -> RouterView:
    view = RouterView(((DENSE,),) * stages, BLOCK)
    assert view.open(1, [A, B, C], PROMPT) == []
    return view


def stored(*keys: bytes) -> list[tuple[bool, int, bytes]]:
    return [(True, 0, key) for key in keys]


def removed(*keys: bytes) -> list[tuple[bool, int, bytes]]:
    return [(False, 0, key) for key in keys]


def test_a_block_is_published_with_the_last_stage() -> None:
    view = make_view(3)
    assert view.apply(0, 1, stored(A, B)) == []
    assert view.apply(2, 1, stored(A)) == []
    assert view.apply(1, 1, stored(A, B)) == [STORED[A]]
    assert view.apply(2, 2, stored(B)) == [STORED[B]]


def test_a_single_stage_publishes_at_once() -> None:
    assert make_view(1).apply(0, 1, stored(A, B)) == [STORED[A], STORED[B]]


def test_the_first_stage_that_loses_a_block_retracts_it_and_what_is_below() -> None:
    view = make_view(2)
    view.apply(0, 1, stored(A, B, C))
    view.apply(1, 1, stored(A, B, C))
    assert view.apply(1, 2, removed(C, B)) == [BlockRemoved(C), BlockRemoved(B)]
    assert view.apply(0, 2, removed(C, B, A)) == [BlockRemoved(A)]
    assert view.published_count == 0


def test_a_block_comes_back_with_its_tokens_while_another_stage_kept_it() -> None:
    view = make_view(2)
    view.apply(0, 1, stored(A))
    view.apply(1, 1, stored(A))
    view.close(1)
    view.apply(1, 2, removed(A))
    assert view.catalog_count == 1, "rank 0 still holds it"
    assert view.apply(1, 3, stored(A)) == [STORED[A]]
    view.apply(0, 2, removed(A))
    view.apply(1, 4, removed(A))
    assert view.catalog_count == 0


def test_stored_and_removed_in_one_delta_still_carry_tokens() -> None:
    view = make_view(1)
    view.close(1)
    view.open(2, [A], tokens(1, 1))
    view.close(2)  # its delta is still on the way
    assert view.apply(0, 1, stored(A)) == [], "nobody knows its tokens any more"
    assert view.open(3, [A], tokens(1, 1)) == [STORED[A]], "now they are known"
    view.close(3)
    assert view.apply(0, 2, [*removed(A), *stored(A), *removed(A)]) == [BlockRemoved(A)]


def test_a_lost_delta_is_noticed() -> None:
    """FS-75"""
    view = make_view(2)
    view.apply(0, 1, stored(A))
    with pytest.raises(PeerError, match=r"rank 0.*3.*expected 2"):
        view.apply(0, 3, stored(B))


def test_the_salt_travels_with_the_block() -> None:
    """FS-80"""
    view = RouterView(((DENSE,),), BLOCK)
    view.open(1, [A], tokens(1, 1), "tenant")
    assert view.apply(0, 1, stored(A)) == [BlockStored(A, None, tokens(1, 1), "tenant")]


def test_a_key_per_full_block_is_required() -> None:
    with pytest.raises(InvariantError):
        RouterView(((DENSE,),), BLOCK).open(1, [A], tokens(1, 1, 2, 2))


def test_inner_blocks_take_their_descendants_along_deepest_first() -> None:
    """FS-76"""
    quorum = Quorum(((DENSE,),))
    for key, parent in ((A, None), (B, A), (C, B)):
        quorum.learn(key, parent)
        assert quorum.store(0, 0, key) == [Stored(key, parent)]
    assert quorum.remove(0, 0, A) == [Removed(C), Removed(B), Removed(A)]
    assert quorum.store(0, 0, A) == [Stored(A, None), Stored(B, A), Stored(C, B)]


def test_unknown_windows_are_refused() -> None:
    quorum = Quorum(((DENSE,), (DENSE, DENSE)))
    for rank, window in ((2, 0), (0, 1), (-1, 0), (1, 2)):
        with pytest.raises(InvariantError):
            quorum.store(rank, window, A)


# ── encoding ─────────────────────────────────────────────────────────────────────────────────


def test_chains_and_removals_are_merged_in_order() -> None:
    other = BlockStored(b"\x09" * 32, A, tokens(7, 8), "")
    events = [STORED[A], STORED[B], other, BlockRemoved(B), BlockRemoved(A), STORED[A]]
    assert encode_events(events, lambda key: key[0]) == [
        {
            "type": "stored", "token_ids": [1, 1, 2, 2], "num_block_tokens": [2, 2],
            "block_hashes": [1, 2], "parent_hash": None, "cache_salt": None,
        },
        {
            "type": "stored", "token_ids": [7, 8], "num_block_tokens": [2],
            "block_hashes": [9], "parent_hash": 1, "cache_salt": None,
        },
        {"type": "removed", "block_hashes": [2, 1]},
        {
            "type": "stored", "token_ids": [1, 1], "num_block_tokens": [2],
            "block_hashes": [1], "parent_hash": None, "cache_salt": None,
        },
    ]  # fmt: skip


def test_the_salt_is_encoded() -> None:
    (record,) = encode_events([BlockStored(A, None, tokens(1, 1), "tenant")], lambda key: key[0])
    assert record["cache_salt"] == "tenant"


def test_hashes_are_signed() -> None:
    top = (1 << 64) - 2
    for event in (BlockStored(B, A, tokens(1, 1), ""), BlockRemoved(B)):
        (record,) = encode_events([event], lambda key: top - key[0])
        assert record["block_hashes"] == [-4]
        assert record.get("parent_hash", -3) == -3


class Sink:
    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []

    def publish_batch(self, batch: list[dict[str, Any]]) -> None:
        self.batches.append(batch)


async def test_a_sink_that_comes_late_gets_a_snapshot_and_then_the_events() -> None:
    """FS-82"""
    view, sink = make_view(1), Sink()
    publisher = RouterPublisher(view, lambda key: key[0])
    publisher.publish(view.apply(0, 1, stored(A)))  # nobody listens
    thread = threading.Thread(target=publisher.attach_from_thread, args=(sink,))
    thread.start()
    thread.join()
    assert sink.batches == [], "attached on the loop, not in the caller's thread"
    await asyncio.sleep(0)
    publisher.publish(view.apply(0, 2, stored(B)))
    publisher.publish([])
    assert [record["block_hashes"] for batch in sink.batches for record in batch] == [[1], [2]]
