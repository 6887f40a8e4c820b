"""How fast a device computes what a stage must, at best: the floor of a wave's time.

    floor = dense products / rate + experts' products / rate + attention / rate + state / rate

Rates are measured on the same device in the same run, by the kernels that the stage itself would
choose, on shapes that fill it.  Norms, rotations, routing, gathers and launches have no place in
the floor: they are what the gap between floor and time consists of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from msgspec import Struct

from wavepp_worker.model.attention import causal
from wavepp_worker.model.moe import grouped_linear
from wavepp_worker.model.spec import ModelSpec
from wavepp_worker.model.split_attention import fits, run_cudnn
from wavepp_worker.model.work import Work

SECONDS = 0.5  # of each, about
ROWS = 16_384
_cuda: Any = torch.cuda  # Event has no type annotations


class Ceilings(Struct, frozen=True, kw_only=True):
    """Measured rates in TFLOP/s; 0: the stage has no such work."""

    dense: float
    experts: float
    attention: float

    def floor_s(self, work: Work, tokens: int, context: int) -> float:
        """Return the least time of a wave of one chunk behind `context` tokens."""
        pairs = tokens * context + tokens * (tokens + 1) // 2
        dense = work.dense_token * tokens + work.expand_token * (context + tokens)
        parts = (
            (dense, self.dense),
            (work.expert_token * tokens, self.experts),
            (work.pair * pairs, self.attention),
        )
        return sum(flop / rate for flop, rate in parts if flop) / 1e12


def measure_ceilings(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Return this device's rates for the model's shapes."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, weight = draw(ROWS, 4096), draw(24_576, 4096)
    dense = _rate(lambda: x @ weight.T, 2 * ROWS * 4096 * 24_576)
    experts = 0.0
    if spec.moe is not None:
        moe, rows = spec.moe, ROWS * spec.moe.chosen // spec.moe.experts
        stops = torch.arange(1, moe.experts + 1, device=device, dtype=torch.int32) * rows
        weights = draw(moe.experts, 2 * moe.width, spec.hidden)
        flop = 2 * rows * moe.experts * 2 * moe.width * spec.hidden
        y = draw(rows * moe.experts, spec.hidden)
        experts = _rate(lambda: grouped_linear(y, weights, stops), flop)
    key = spec.mla.key_dim if spec.mla else spec.head_dim
    value = spec.mla.value_dim if spec.mla else spec.head_dim
    kv_heads = spec.heads if spec.mla else spec.kv_heads
    q, k, v = draw(ROWS, spec.heads, key), draw(ROWS, kv_heads, key), draw(ROWS, kv_heads, value)
    pair_flop = 2 * spec.heads * (key + value)
    if fits(q, value):
        # Without a mask the kernel is at its best.
        pairs = ROWS * ROWS
        attend: Callable[[], object] = partial(run_cudnn, q, k, v, is_causal=False, scale=key**-0.5)
    else:
        pairs = ROWS * (ROWS + 1) // 2
        attend = partial(causal, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    attention = _rate(attend, pair_flop * pairs)
    return Ceilings(dense=dense, experts=experts, attention=attention)


@torch.inference_mode()
def _rate(run: Callable[[], object], flop: int) -> float:
    """Return TFLOP/s, sustained: a device under load clocks lower than in a short burst."""
    run()
    began, ended = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    count = max(3, int(SECONDS * 500e12 / flop))
    began.record()
    for _ in range(count):
        run()
    ended.record()
    torch.cuda.synchronize()
    elapsed_ms: float = began.elapsed_time(ended)
    return count * flop / elapsed_ms / 1e9
