"""One stage's forward: embeds (first), runs its layers, computes logits (last).

Stages exchange a named set of tensors, declared by `input_spec`, so that a model whose boundary
carries more than one hidden state fits later.  The last layer of the last stage computes its
attention output and feed-forward only for rows that want a token: nothing else reads them.

Legend: T tokens in the wave, C hidden, H heads, D head dim, L answer rows, V vocabulary.
"""

# ruff: noqa: N803 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.model.attention import attend
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import WaveBatch
from wavepp_worker.model.mla import MlaWeights, latent_attention
from wavepp_worker.model.moe import MoeWeights, experts_forward
from wavepp_worker.model.rotary import rotary_frequencies, rotate
from wavepp_worker.model.spec import ModelSpec

TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; projections that read the same input are fused along their output rows."""

    attention_norm: Tensor
    qkv: Tensor  # of latent attention: (compressed) q, latent, shared key
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, D]: of q, then of k; repeated if per head
    out: Tensor
    out_bias: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor | None  # the MLP; beside experts the shared ones, None without any
    gate_up_bias: Tensor | None
    down: Tensor | None
    down_bias: Tensor | None
    moe: MoeWeights | None = None  # the layer's experts
    mla: MlaWeights | None = None  # the rest of latent attention


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
        turning = spec.mla.rope_dim if spec.mla else spec.head_dim
        self._frequencies = rotary_frequencies(spec.rope, turning).to(self.device)

    def input_spec(self, tokens: int) -> dict[str, TensorSpec]:
        """Return name → (shape, dtype) of the inputs of a wave of `tokens` tokens.

        A stage's outputs, unless it is the last, are the next stage's inputs.
        """
        if self.is_first:
            return {"tokens": ((tokens,), torch.int64)}
        return {"hidden": ((tokens, self.spec.hidden), self.dtype)}

    def make_store(self, blocks: int, block_tokens: int, host_blocks: int = 0) -> KvStore:
        """Return a zeroed pool of `blocks` blocks on this stage's device, and one on the host."""
        spec = self.spec
        return KvStore(
            layers=len(self._weights.layers),
            blocks=blocks,
            planes=1 if spec.mla else 2,
            kv_heads=1 if spec.mla else spec.kv_heads,
            block_tokens=block_tokens,
            head_dim=spec.mla.row_dim if spec.mla else spec.head_dim,
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
        cos, sin = (
            (part[:, None] * self.spec.rope.amplitude).to(self.dtype)
            for part in (angles.cos(), angles.sin())
        )
        final = len(weights.layers) - 1 if self.is_last else -1
        for index, layer in enumerate(weights.layers):
            h, is_final = self._norm(x, layer.attention_norm), index == final
            mixed = self._attention(
                layer, h, (cos, sin), batch, store=store, place=index, is_final=is_final
            )
            if is_final:
                x = x[batch.answer_rows_L]
            x = x + F.linear(mixed, layer.out, layer.out_bias)
            x = x + self._feed_forward(layer, self._norm(x, layer.ffn_norm))
        if weights.norm is None or weights.head is None:
            return {"hidden": x}
        x = self._norm(x, weights.norm)
        return {"logits": F.linear(x, weights.head).float()}

    def _attention(
        self,
        layer: LayerWeights,
        h_TC: Tensor,
        rotation_T1D: tuple[Tensor, Tensor],
        batch: WaveBatch,
        *,
        store: KvStore,
        place: int,
        is_final: bool,
    ) -> Tensor:
        """Return the attention output [T, H * D], of the final layer [L, H * D]."""
        spec = self.spec
        if layer.mla is not None and spec.mla is not None:
            return latent_attention(
                F.linear(h_TC, layer.qkv),
                layer.mla,
                spec.mla,
                rotation_T1D,
                batch,
                store=store,
                layer=place,
                is_final=is_final,
            )
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        qkv = F.linear(h_TC, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = self._qk_norm(qk) * layer.qk_norm
        qk = rotate(qk, rotation_T1D)
        q, k = qk[:, :heads], qk[:, heads:]
        store.write(place, batch.blocks_T, batch.offsets_T, k, v)
        spans = batch.spans
        if is_final:
            spans, q = batch.answer_spans, q[batch.answer_rows_L]
        return attend(q, k, v, spans, store=store, layer=place)

    def _qk_norm(self, qk_THD: Tensor) -> Tensor:
        """Divide by the root mean square: of each head, or of all of q and of all of k."""
        spec = self.spec
        if not spec.has_wide_qk_norm:
            return F.rms_norm(qk_THD, (spec.head_dim,), None, spec.norm_eps)
        parts = qk_THD[:, : spec.heads], qk_THD[:, spec.heads :]
        return torch.cat(
            [F.rms_norm(part, part.shape[1:], None, spec.norm_eps) for part in parts], 1
        )

    def _feed_forward(self, layer: LayerWeights, h_TC: Tensor) -> Tensor:
        """Return what the MLP, or the experts with the shared ones, add to each row."""
        added = None
        if layer.gate_up is not None and layer.down is not None:
            gate, up = F.linear(h_TC, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            added = F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        if layer.moe is not None and self.spec.moe is not None:
            routed = experts_forward(h_TC, layer.moe, self.spec.moe)
            added = routed if added is None else routed + added
        if added is None:
            raise InvariantError("a layer has an MLP or experts")
        return added

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return RMSNorm over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)
