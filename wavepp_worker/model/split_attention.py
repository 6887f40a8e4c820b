"""Causal attention behind a prefix in pieces of a closed set of shapes, for cuDNN's kernels.

cuDNN attends about twice as fast as the built-in flash kernel on Hopper, but each new pair of
lengths costs it 40 to 60 ms on the host.  So the work is cut into lengths from two short lists,
whose graphs are built when a stage loads, and the pieces are merged by their log-sum-exp:

    keys      |32,768 ...|4,096|256|odd|own rows
    piece 0   |full      |full |...|...|causal|
    piece 1   |full      |full |...|...|full  |causal|--|     last piece: padded with zero rows

The odd rest of a prefix (less than the shortest length) goes through the flash kernel, which takes
any.  A prefix's keys may be made piece by piece (`PrefixKeys`), as latent attention does.

Legend: T queries, S keys, H heads (q) or KV heads (k, v), D key width, V value width.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.model.fused import merge

QUERY_ROWS: Final = (16_384, 8_192, 4_096, 2_048, 1_024, 512, 256)
KEY_ROWS: Final = (32_768, *QUERY_ROWS)
QUERIES_MIN: Final = 128  # fewer would be mostly padding
PADDING_SHARE_MAX: Final = 1 / 16  # of the queries, for being one piece instead of several
MERGED_MAX: Final = 8  # pieces merged at once; each is as large as the output

PrefixKeys = Callable[[int, int], tuple[Tensor, Tensor]]
Attended = tuple[Tensor, Tensor]  # [T, H, V], log-sum-exp of the scores f32 [H, T]

logger = logging.getLogger(__name__)


class QueryPiece(NamedTuple):
    """Queries [start, stop), padded to `rows`."""

    start: int
    stop: int
    rows: int


class AttentionShape(NamedTuple):
    """What cuDNN's graphs depend on beside the lengths."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    q_stride: int  # elements from one query row to the next
    scale: float
    key_rows_max: int = KEY_ROWS[0]


def split_attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THV: Tensor,
    prefix_tokens: int,
    prefix_keys: PrefixKeys,
    *,
    scale: float | None = None,
    key_rows_max: int = KEY_ROWS[0],
) -> Tensor:
    """Return the attention output [T, H, V] of a chunk behind a prefix.

    Args:
        q_THD: any constant row stride.
        k_THD, v_THV: the chunk's own keys and values.
        prefix_keys: returns keys [n, H, D] and values [n, H, V] of prefix tokens [start, stop).
        key_rows_max: longest piece that `prefix_keys` is asked for.
    """
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    k_THD, v_THV = k_THD.contiguous(), v_THV.contiguous()
    pieces = cut_queries(len(q_THD))
    queries = [_padded(q_THD, piece) for piece in pieces]
    parts: list[list[Attended]] = [[] for _ in pieces]

    def add(index: int, part: Attended) -> None:
        parts[index].append(part)
        if len(parts[index]) == MERGED_MAX:
            parts[index] = [merge(*zip(*parts[index], strict=True))]

    for start, stop in cut_keys(prefix_tokens, key_rows_max):
        k, v = prefix_keys(start, stop)
        run = run_cudnn if stop - start in KEY_ROWS else _run_flash
        for index, q in enumerate(queries):
            add(index, run(q, k, v, is_causal=False, scale=scale))
    for own, piece in enumerate(pieces):
        k, v = _padded(k_THD, piece), _padded(v_THV, piece)
        add(own, run_cudnn(queries[own], k, v, is_causal=True, scale=scale))
        for later in range(own + 1, len(pieces)):
            add(later, run_cudnn(queries[later], k, v, is_causal=False, scale=scale))
    outs = [
        (merge(*zip(*attended, strict=True)) if len(attended) > 1 else attended[0])[0]
        for attended in parts
    ]
    outs[-1] = outs[-1][: pieces[-1].stop - pieces[-1].start]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def cut_queries(tokens: int) -> list[QueryPiece]:
    """Cut queries into lengths of `QUERY_ROWS`; only the last piece is padded."""
    pieces, start = [], 0
    while start < tokens:
        left = tokens - start
        enclosing = min((rows for rows in QUERY_ROWS if rows >= left), default=None)
        whole = max((rows for rows in QUERY_ROWS if rows <= left), default=None)
        if enclosing is not None and (
            whole is None or enclosing - left <= PADDING_SHARE_MAX * tokens
        ):
            pieces.append(QueryPiece(start, tokens, enclosing))
            break
        rows = whole or QUERY_ROWS[-1]
        pieces.append(QueryPiece(start, start + rows, rows))
        start += rows
    return pieces


def cut_keys(tokens: int, rows_max: int = KEY_ROWS[0]) -> Iterator[tuple[int, int]]:
    """Yield ranges that cover [0, tokens): lengths of `KEY_ROWS`, longest first, then the rest."""
    start = 0
    for rows in KEY_ROWS:
        while rows <= rows_max and tokens - start >= rows:
            yield start, start + rows
            start += rows
    if start < tokens:
        yield start, tokens


def fits(q_THD: Tensor, value_dim: int) -> bool:
    """Whether split attention applies: enough queries, and a device on which cuDNN takes them."""
    if not q_THD.is_cuda or len(q_THD) < QUERIES_MIN:
        return False
    return _is_supported(q_THD.device, q_THD.dtype, q_THD.shape[-1], value_dim)


@torch.inference_mode()
def warm_up(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> None:
    """Have the graphs of all lengths built, where split attention will be used."""
    if device.type != "cuda":
        return
    if not _is_supported(device, dtype, shape.key_dim, shape.value_dim):
        return
    began = time.monotonic()
    width = max(shape.q_stride, shape.kv_heads * max(shape.key_dim, shape.value_dim))
    values = torch.zeros(KEY_ROWS[0] * width, device=device, dtype=dtype)

    def rows(count: int, heads: int, dim: int, stride: int) -> Tensor:
        return values.as_strided((count, heads, dim), (stride, dim, 1))

    graphs, parts = 0, []
    key_lengths = [rows for rows in KEY_ROWS if rows <= max(shape.key_rows_max, QUERY_ROWS[0])]
    for query_rows, key_rows in product(QUERY_ROWS, key_lengths):
        q = rows(query_rows, shape.heads, shape.key_dim, shape.q_stride)
        k = rows(key_rows, shape.kv_heads, shape.key_dim, shape.kv_heads * shape.key_dim)
        v = rows(key_rows, shape.kv_heads, shape.value_dim, shape.kv_heads * shape.value_dim)
        part = run_cudnn(q, k, v, is_causal=False, scale=shape.scale)
        if key_rows == query_rows:
            run_cudnn(q, k, v, is_causal=True, scale=shape.scale)
        graphs += 1 + (key_rows == query_rows)
        if query_rows == QUERY_ROWS[-1]:
            parts.append(part)
            if 2 <= len(parts) <= MERGED_MAX:
                merge(*zip(*parts, strict=True))
    torch.cuda.synchronize(device)
    logger.info("%d attention graphs ready in %.1f s", graphs, time.monotonic() - began)


@cache
def _is_supported(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Ask cuDNN once for each combination; the flash kernel serves where it declines."""
    if dtype == torch.float32 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    rows = QUERY_ROWS[-1]
    q = torch.zeros(rows, 1, key_dim, device=device, dtype=dtype)
    v = torch.zeros(rows, 1, value_dim, device=device, dtype=dtype)
    try:
        run_cudnn(q, q, v, is_causal=True, scale=1.0)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        logger.warning(
            "cuDNN declines attention of width %d and %d, the flash kernel is used: %s",
            key_dim,
            value_dim,
            str(error).partition("\n")[0],
        )
        return False
    return True


def _padded(x_THD: Tensor, piece: QueryPiece) -> Tensor:
    """Return a piece's rows and zeros behind them; strides stay, as graphs depend on them."""
    rows = x_THD[piece.start : piece.stop]
    if len(rows) == piece.rows:
        return rows
    stride = x_THD.stride(0)
    buffer = x_THD.new_zeros(piece.rows * stride)
    padded = buffer.as_strided((piece.rows, *x_THD.shape[1:]), x_THD.stride())
    padded[: len(rows)] = rows
    return padded


def run_cudnn(
    q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, is_causal: bool, scale: float
) -> Attended:
    """Attend to all keys, or to a square of which the lower half is seen."""
    if not q_THD.is_cuda:
        return _run_plain(q_THD, k_SHD, v_SHV, is_causal=is_causal, scale=scale)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_SHD, v_SHV))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out[0].transpose(0, 1), sums.reshape(q.shape[1], q.shape[2])


def _run_flash(
    q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, is_causal: bool, scale: float
) -> Attended:
    """The same for any number of keys; flash kernels take one width for keys and values."""
    if not q_THD.is_cuda:
        return _run_plain(q_THD, k_SHD, v_SHV, is_causal=is_causal, scale=scale)
    width = v_SHV.shape[-1]
    padded = F.pad(v_SHV, (0, k_SHD.shape[-1] - width))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_SHD, padded))
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return out[0].transpose(0, 1)[..., :width], sums[0]


def _run_plain(
    q_THD: Tensor, k_SHD: Tensor, v_SHV: Tensor, *, is_causal: bool, scale: float
) -> Attended:
    """The definition, which the tests of cutting and merging run on the CPU."""
    group = q_THD.shape[1] // k_SHD.shape[1]
    k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_SHD, v_SHV))
    scores_HTS = (q_THD.transpose(0, 1) @ k.transpose(1, 2)).float() * scale
    if is_causal:
        future = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=q_THD.device).triu(1)
        scores_HTS = scores_HTS.masked_fill(future, -torch.inf)
    out_HTV = scores_HTS.softmax(-1).to(v.dtype) @ v
    return out_HTV.transpose(0, 1), scores_HTS.logsumexp(-1)
