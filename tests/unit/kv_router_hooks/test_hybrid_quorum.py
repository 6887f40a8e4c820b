"""Named cases of the quorum and the view with windows that are not dense."""

from __future__ import annotations

import pytest

from kv_router_hooks.quorum import Change, Quorum, Removed, Stored
from kv_router_hooks.router_view import BlockRemoved, BlockStored, RouterView
from kv_router_hooks.window_rule import DENSE, RECURRENT, WindowRule
from wavepp_worker.base.errors import InvariantError

CHAIN = [bytes([letter]) * 32 for letter in b"ABCDE"]
A, B, C, D, E = CHAIN
X = b"X" * 32


def make_quorum(*ranks: tuple[WindowRule, ...]) -> Quorum:
    quorum = Quorum(ranks)
    for key, parent in zip(CHAIN, [None, *CHAIN], strict=False):
        quorum.learn(key, parent)
    return quorum


def store(quorum: Quorum, rank: int, window: int, *keys: bytes) -> list[Change]:
    return [change for key in keys for change in quorum.store(rank, window, key)]


def stored(*keys: bytes) -> list[Change]:
    return [Stored(key, None if key == A else CHAIN[CHAIN.index(key) - 1]) for key in keys]


def removed(*keys: bytes) -> list[Change]:
    return [Removed(key) for key in keys]


def test_a_snapshot_publishes_the_chain_above_it() -> None:
    quorum = make_quorum((DENSE, RECURRENT))
    assert store(quorum, 0, 0, *CHAIN) == []
    assert store(quorum, 0, 1, C) == stored(A, B, C)
    assert store(quorum, 0, 1, B) == []
    assert store(quorum, 0, 1, E) == stored(D, E)


def test_losing_a_snapshot_takes_the_chain_back_to_the_one_before() -> None:
    """FS-79"""
    quorum = make_quorum((DENSE, RECURRENT))
    store(quorum, 0, 0, *CHAIN)
    store(quorum, 0, 1, B, E)
    assert quorum.remove(0, 1, E) == removed(E, D, C)
    assert quorum.remove(0, 1, B) == removed(B, A)
    assert store(quorum, 0, 1, D) == stored(A, B, C, D)
    assert store(quorum, 0, 1, B) == []
    assert quorum.remove(0, 0, C) == removed(D, C)


def test_ranks_meet_at_a_boundary_that_all_have() -> None:
    """FS-35, worked example X1: snapshots 64/72/90 and 64/80 meet at 64, attention everywhere."""
    quorum = make_quorum((DENSE, RECURRENT), (DENSE, RECURRENT))
    for rank in range(2):
        store(quorum, rank, 0, *CHAIN)
    store(quorum, 0, 1, B, C, E)
    assert store(quorum, 1, 1, D) == []
    assert store(quorum, 1, 1, B) == stored(A, B)
    assert quorum.remove(0, 1, B) == removed(B, A)
    assert store(quorum, 1, 1, C) == stored(A, B, C)


def test_ranks_may_have_snapshots_only() -> None:
    """FS-32: one rank without attention, one with attention only, one with both."""
    quorum = make_quorum((RECURRENT,), (DENSE,), (DENSE, RECURRENT))
    store(quorum, 0, 0, C)
    store(quorum, 1, 0, *CHAIN)
    store(quorum, 2, 1, C)
    assert store(quorum, 2, 0, A, B) == []
    assert store(quorum, 2, 0, C) == stored(A, B, C)

    alone = make_quorum((RECURRENT,))
    assert store(alone, 0, 0, C) == stored(A, B, C)
    assert alone.remove(0, 0, C) == removed(C, B, A)


def test_a_sliding_window_needs_the_last_blocks_only() -> None:
    quorum = make_quorum((DENSE, WindowRule(2)))
    store(quorum, 0, 0, *CHAIN)
    assert store(quorum, 0, 1, A) == stored(A), "a prompt's first block is all there is"
    assert quorum.remove(0, 1, A) == removed(A)
    assert store(quorum, 0, 1, D) == []
    assert store(quorum, 0, 1, C) == stored(A, B, C, D)
    assert store(quorum, 0, 1, E) == stored(E)
    assert quorum.remove(0, 1, C) == removed(), "D and E are held: E can be resumed"
    assert quorum.remove(0, 1, D) == removed(E, D, C, B, A)


def test_a_branch_keeps_what_is_above_it() -> None:
    quorum = make_quorum((DENSE, RECURRENT))
    quorum.learn(X, B)
    store(quorum, 0, 0, *CHAIN, X)
    store(quorum, 0, 1, E, X)
    assert quorum.remove(0, 1, E) == removed(E, D, C)
    assert quorum.remove(0, 1, X) == removed(X, B, A)


def test_misuse_is_refused() -> None:
    for windows in ((), ((DENSE,), ()), ((WindowRule(0),),)):
        with pytest.raises(InvariantError):
            Quorum(windows)
    quorum = make_quorum((RECURRENT,))
    with pytest.raises(InvariantError, match="parent"):
        quorum.learn(X, b"Y" * 32)
    with pytest.raises(InvariantError, match="needed"):
        quorum.forget(A)
    quorum.store(0, 0, E)
    with pytest.raises(InvariantError, match="needed"):
        quorum.forget(E)


# ── the view ─────────────────────────────────────────────────────────────────────────────────

PROMPT = b"".join(number.to_bytes(4, "little") for number in range(5))


def make_view(*ranks: tuple[WindowRule, ...]) -> RouterView:
    view = RouterView(ranks, 1)
    view.open(1, CHAIN, PROMPT)
    return view


def test_tokens_are_kept_for_every_block_that_may_be_published_again() -> None:
    view = make_view((RECURRENT,), (RECURRENT,))
    view.apply(0, 1, [(True, 0, C)])
    view.close(1)
    assert view.catalog_count == 3, "C and what leads to it"
    events = view.apply(1, 1, [(True, 0, C), (True, 0, E)])
    assert [event.key for event in events] == [A, B, C]
    assert [event.tokens for event in events if isinstance(event, BlockStored)] == [
        PROMPT[at : at + 4] for at in (0, 4, 8)
    ]
    events = view.apply(0, 2, [(False, 0, C)])
    assert events == [BlockRemoved(C), BlockRemoved(B), BlockRemoved(A)]
    assert view.catalog_count == 3, "rank 1 still holds C"
    view.apply(1, 2, [(False, 0, C), (False, 0, E)])
    assert view.catalog_count == 0


def test_what_one_rank_can_resume() -> None:
    view = make_view((DENSE, RECURRENT), (DENSE, DENSE), (RECURRENT,))
    assert view.resumable_keys(0, [CHAIN, [B, X]]) == {A, B}
    assert view.resumable_keys(0, [[A, B], [C]]) == set()
    assert view.resumable_keys(0, [[A, B, X], [X]]) == set(), "nobody here knows X's prompt"
    assert view.resumable_keys(1, [[A, B, X], [A, X]]) == {A, X}, "dense trees need no chain"
    assert view.resumable_keys(2, [[D]]) == {A, B, C, D}
