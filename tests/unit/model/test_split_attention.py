"""Attention in pieces: cutting and merging, on the CPU with the plain definition as kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.model.attention import causal
from wavepp_worker.model.split_attention import (
    KEY_ROWS,
    PADDING_SHARE_MAX,
    QUERY_ROWS,
    cut_keys,
    cut_queries,
    fits,
    split_attention,
)


@given(st.integers(min_value=1, max_value=60_000))
def test_queries_are_cut_without_gap_and_only_the_last_piece_is_padded(tokens: int) -> None:
    pieces = cut_queries(tokens)
    assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].stop) == (0, tokens)
    assert all(piece.rows == piece.stop - piece.start for piece in pieces[:-1])
    assert all(piece.rows in QUERY_ROWS for piece in pieces)
    padding = pieces[-1].rows - (pieces[-1].stop - pieces[-1].start)
    assert 0 <= padding <= max(PADDING_SHARE_MAX * tokens, QUERY_ROWS[-1] - 1)


@given(st.integers(min_value=0, max_value=1_000_000), st.sampled_from(KEY_ROWS))
def test_keys_are_cut_into_known_lengths_and_one_short_rest(tokens: int, rows_max: int) -> None:
    cuts = list(cut_keys(tokens, rows_max))
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts)][: len(cuts)]
    assert sum(stop - start for start, stop in cuts) == tokens
    lengths = [stop - start for start, stop in cuts]
    assert all(length in KEY_ROWS and length <= rows_max for length in lengths[:-1])
    assert not lengths or lengths[-1] in KEY_ROWS or lengths[-1] < KEY_ROWS[-1]


@pytest.mark.parametrize("queries", [128, 256, 300, 800])
@pytest.mark.parametrize("prefix", [0, 1, 255, 256, 1000, 2900])
def test_pieces_give_what_one_piece_does(queries: int, prefix: int) -> None:
    """Two KV heads for four query heads, narrower values; 2,900 keys need more than one merge."""
    generator = torch.Generator().manual_seed(queries * prefix)
    q = torch.randn(queries, 4, 16, generator=generator)
    k = torch.randn(prefix + queries, 2, 16, generator=generator)
    v = torch.randn(prefix + queries, 2, 8, generator=generator)
    scale = 0.3
    want = causal(
        q.transpose(0, 1),
        k.repeat_interleave(2, 1).transpose(0, 1),
        v.repeat_interleave(2, 1).transpose(0, 1),
        scale,
    )
    got = split_attention(
        q,
        k[prefix:],
        v[prefix:],
        prefix,
        lambda start, stop: (k[start:stop], v[start:stop]),
        scale=scale,
        key_rows_max=256,
    )
    torch.testing.assert_close(got, want.transpose(0, 1), atol=1e-5, rtol=1e-4)


def test_the_cpu_attends_in_one_piece() -> None:
    assert not fits(torch.zeros(4096, 2, 16), 16)
