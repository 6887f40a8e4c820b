"""One stage's forward: embeds (first), runs its layers, computes logits (last).

Stages exchange a named set of tensors, declared by `input_spec`, so that a model whose boundary
carries more than one hidden state fits later.  The last layer of the last stage computes its
attention output and feed-forward only for rows that want a token: nothing else reads them.

Legend: T tokens in the wave, C hidden, H heads, D head dim, L answer rows, V vocabulary.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.base.errors import check
from wavepp_worker.model.attention import attend
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import WaveBatch
from wavepp_worker.model.spec import ModelSpec, RopeSpec

TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; projections that read the same input are fused along their output rows."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, D]: q_norm repeated, then k_norm repeated
    out: Tensor
    out_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """All tensors of a stage, on its device."""

    embedding: Tensor | None  # first stage
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None  # last stage
    head: Tensor | None  # last stage


class StageModel:
    """Layers [first, stop) of a model."""

    def __init__(self, spec: ModelSpec, first: int, weights: StageWeights) -> None:
        self.spec = spec
        self.first = first
        self.stop = first + len(weights.layers)
        self.is_first = first == 0
        self.is_last = self.stop == spec.layers
        self.dtype = weights.layers[0].qkv.dtype
        self.device = weights.layers[0].qkv.device
        self._weights = weights
        self._frequencies = rotary_frequencies(spec.rope, spec.head_dim).to(self.device)

    def input_spec(self, tokens: int) -> dict[str, TensorSpec]:
        """Return name → (shape, dtype) of the inputs of a wave of `tokens` tokens.

        A stage's outputs, unless it is the last, are the next stage's inputs.
        """
        if self.is_first:
            return {"tokens": ((tokens,), torch.int64)}
        return {"hidden": ((tokens, self.spec.hidden), self.dtype)}

    def make_store(self, blocks: int, block_tokens: int, host_blocks: int = 0) -> KvStore:
        """Return a zeroed pool of `blocks` blocks on this stage's device, and one on the host."""
        return KvStore(
            layers=len(self._weights.layers),
            blocks=blocks,
            kv_heads=self.spec.kv_heads,
            block_tokens=block_tokens,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            host_blocks=host_blocks,
        )

    @torch.inference_mode()
    def forward(
        self, batch: WaveBatch, inputs: Mapping[str, Tensor], store: KvStore
    ) -> dict[str, Tensor]:
        """Run a wave; its keys and values are in `store` afterwards.

        Args:
            inputs: as `input_spec` says; the first stage's "tokens" is `batch.tokens_T`.

        Returns:
            {"hidden": [T, C] of the stage's dtype}; on the last stage {"logits": f32 [L, V]}, row i
            belonging to chunk `batch.answers[i]`.
        """
        weights = self._weights
        if weights.embedding is not None and self.is_first:
            x = F.embedding(inputs["tokens"], weights.embedding)
        else:
            x = inputs["hidden"]
        check(len(x) == batch.token_count, "inputs and batch differ in tokens", rows=len(x))
        angles = batch.positions_T[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)
        final = len(weights.layers) - 1 if self.is_last else -1
        for index, layer in enumerate(weights.layers):
            x = self._layer(
                layer, x, (cos, sin), batch, store=store, index=index, is_final=index == final
            )
        if weights.norm is None or weights.head is None:
            return {"hidden": x}
        x = F.rms_norm(x, (self.spec.hidden,), weights.norm, self.spec.norm_eps)
        return {"logits": F.linear(x, weights.head).float()}

    def _layer(
        self,
        layer: LayerWeights,
        x_TC: Tensor,
        rotation_T1D: tuple[Tensor, Tensor],
        batch: WaveBatch,
        *,
        store: KvStore,
        index: int,
        is_final: bool,
    ) -> Tensor:
        spec = self.spec
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        h = F.rms_norm(x_TC, (spec.hidden,), layer.attention_norm, spec.norm_eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (dim,), None, spec.norm_eps) * layer.qk_norm
        cos_T1D, sin_T1D = rotation_T1D
        low, high = qk.chunk(2, dim=-1)
        qk = torch.cat((low * cos_T1D - high * sin_T1D, high * cos_T1D + low * sin_T1D), dim=-1)
        q, k = qk[:, :heads], qk[:, heads:]
        store.write(index, batch.blocks_T, batch.offsets_T, k, v)
        spans = batch.spans
        if is_final:
            spans, q, x_TC = batch.answer_spans, q[batch.answer_rows_L], x_TC[batch.answer_rows_L]
        attended = attend(q, k, v, spans, store=store, layer=index)
        x_TC = x_TC + F.linear(attended, layer.out, layer.out_bias)
        h = F.rms_norm(x_TC, (spec.hidden,), layer.ffn_norm, spec.norm_eps)
        gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x_TC + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Return f32 [D / 2] angles per position; dimension i turns together with i + D / 2."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Wavelengths much shorter than the original context stay, much longer ones are
        # stretched by `factor`, those between are blended.
        turns = rope.original_context_tokens * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * frequencies / rope.factor
    return frequencies
