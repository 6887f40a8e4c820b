"""One stage's forward: embeds (first), runs its layers, computes logits (last).

Stages exchange a named set of tensors, declared by `input_spec`: a hidden state; with attention
residuals the running sum is that, and the sums set aside, "blocks", come beside it.  The last layer
of the last stage computes its attention output and feed-forward only for rows that want a token:
nothing else reads them.

Legend: T tokens in the wave, C hidden, H heads, D head dim, L answer rows, V vocabulary.
"""

# ruff: noqa: N803, N806 - shape suffixes are upper case
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.model.attention import attend
from wavepp_worker.model.attention_residual import ResidualWeights, Stream
from wavepp_worker.model.delta_layer import DeltaWeights, delta_layer
from wavepp_worker.model.fused import norm_and_turn
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import WaveBatch
from wavepp_worker.model.mla import MlaWeights, latent_attention
from wavepp_worker.model.mlp import gated
from wavepp_worker.model.moe import MoeWeights, experts_forward
from wavepp_worker.model.rotary import rotary_frequencies
from wavepp_worker.model.spec import ModelSpec
from wavepp_worker.model.state_store import StateStore

TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape, dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; projections that read the same input are fused along their output rows.

    Norm weights are f32 where they are stored as their distance from one.
    """

    attention_norm: Tensor
    # q, k, v, and the gate of a gated attention; of latent attention (compressed) q, latent,
    # shared key; of a delta layer all its inputs.
    qkv: Tensor
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
    delta: DeltaWeights | None = None  # a linear-attention layer
    mla: MlaWeights | None = None  # the rest of latent attention
    residual: ResidualWeights | None = None  # how the layer's inputs are mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWeights:
    """All tensors of a stage, on its device."""

    embedding: Tensor | None  # first stage
    layers: tuple[LayerWeights, ...]
    norm: Tensor | None  # last stage
    head: Tensor | None  # last stage
    output_query: Tensor | None = None  # last stage with attention residuals: mixes what is normed


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
        # Index of each layer among those of its kind, as its store numbers them.
        is_delta = [layer.delta is not None for layer in weights.layers]
        self._places = [is_delta[:index].count(kind) for index, kind in enumerate(is_delta)]
        self.delta_count = sum(is_delta)
        self.has_attention = not all(is_delta)

    def input_spec(self, tokens: int) -> dict[str, TensorSpec]:
        """Return name → (shape, dtype) of the inputs of a wave of `tokens` tokens.

        A stage's outputs, unless it is the last, are the next stage's inputs.
        """
        if self.is_first:
            return {"tokens": ((tokens,), torch.int64)}
        hidden, starts = self.spec.hidden, self.spec.starts_before(self.first)
        inputs: dict[str, TensorSpec] = {"hidden": ((tokens, hidden), self.dtype)}
        if starts:
            inputs["blocks"] = ((starts, tokens, hidden), self.dtype)
        return inputs

    def make_store(self, blocks: int, block_tokens: int, host_blocks: int = 0) -> KvStore:
        """Return a zeroed pool of `blocks` blocks on this stage's device, and one on the host."""
        spec = self.spec
        return KvStore(
            layers=len(self._weights.layers) - self.delta_count,
            blocks=blocks,
            planes=1 if spec.mla else 2,
            kv_heads=1 if spec.mla else spec.kv_heads,
            block_tokens=block_tokens,
            head_dim=spec.mla.row_dim if spec.mla else spec.head_dim,
            dtype=self.dtype,
            device=self.device,
            host_blocks=host_blocks,
        )

    def make_states(self, slots: int, host_slots: int = 0) -> StateStore | None:
        """Return zeroed slots for working states and snapshots; None without delta layers."""
        if self.spec.delta is None or not self.delta_count:
            return None
        return StateStore(
            self.spec.delta,
            layers=self.delta_count,
            slots=slots,
            dtype=self.dtype,
            device=self.device,
            host_slots=host_slots,
        )

    @torch.inference_mode()
    def forward(
        self,
        batch: WaveBatch,
        inputs: Mapping[str, Tensor],
        store: KvStore,
        states: StateStore | None = None,
    ) -> dict[str, Tensor]:
        """Run a wave; its keys, values and states are in the stores afterwards.

        Args:
            inputs: as `input_spec` says; the first stage's "tokens" is `batch.tokens_T`.
            states: from `make_states`; the working states are those before the wave's chunks.

        Returns:
            {"hidden": [T, C] of the stage's dtype}, with attention residuals also
            {"blocks": [N, T, C]}; on the last stage {"logits": f32 [L, V]}, row i
            belonging to chunk `batch.answers[i]`.
        """
        weights = self._weights
        if weights.embedding is not None and self.is_first:
            x = F.embedding(inputs["tokens"], weights.embedding)
        else:
            x = inputs["hidden"]
        check(len(x) == batch.token_count, "inputs and batch differ in tokens", rows=len(x))
        starts = inputs["blocks"].unbind() if self.first and self.spec.residual_layers else ()
        stream = Stream(x, starts, self.spec.norm_eps)
        angles = batch.positions_T[:, None].float() * self._frequencies
        cos, sin = (
            (part[:, None] * self.spec.rope.amplitude).to(self.dtype)
            for part in (angles.cos(), angles.sin())
        )
        final = len(weights.layers) - 1 if self.is_last else -1
        for index, layer in enumerate(weights.layers):
            residual, place, is_final = layer.residual, self._places[index], index == final
            h = stream.normed(residual.attention if residual else None, layer.attention_norm)
            if layer.delta is None:
                mixed = self._attention(
                    layer, h, (cos, sin), batch, store=store, place=place, is_final=is_final
                )
            else:
                mixed = self._delta(layer, layer.delta, h, batch, states=states, place=place)
                if is_final:
                    mixed = mixed[batch.answer_rows_L]
            if is_final:
                stream.keep(batch.answer_rows_L)
            out = F.linear(mixed, layer.out, layer.out_bias)
            stream.add(out, begins_group=self._begins_group(index))
            h = stream.normed(residual.ffn if residual else None, layer.ffn_norm)
            stream.add(self._feed_forward(layer, h))
        if weights.norm is None or weights.head is None:
            outputs = {"hidden": stream.sum_TC}
            return outputs | ({"blocks": torch.stack(stream.starts_TC)} if stream.starts_TC else {})
        x = stream.normed(weights.output_query, weights.norm)
        return {"logits": F.linear(x, weights.head).float()}

    def _begins_group(self, index: int) -> bool:
        """Whether a layer of this stage begins a running sum of attention residuals."""
        layers = self.spec.residual_layers
        return layers > 0 and (self.first + index) % layers == 0

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
        rows = F.linear(h_TC, layer.qkv, layer.qkv_bias)
        qkv, gate_TX = torch.split(
            rows, [(heads + 2 * kv_heads) * dim, heads * dim * spec.has_attention_gate], dim=-1
        )
        qkv = qkv.view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None and spec.has_wide_qk_norm:
            qk = (self._wide_norm(qk) * layer.qk_norm).to(qk.dtype)
            qk = norm_and_turn(qk, None, rotation_T1D, spec.norm_eps)
        else:
            qk = norm_and_turn(qk, layer.qk_norm, rotation_T1D, spec.norm_eps)
        q, k = qk[:, :heads], qk[:, heads:]
        store.write(place, batch.blocks_T, batch.offsets_T, k, v)
        spans = batch.spans
        if is_final:
            spans, q = batch.answer_spans, q[batch.answer_rows_L]
            gate_TX = gate_TX[batch.answer_rows_L]
        attended = attend(q, k, v, spans, store=store, layer=place)
        return attended * gate_TX.sigmoid() if spec.has_attention_gate else attended

    def _delta(
        self,
        layer: LayerWeights,
        delta: DeltaWeights,
        h_TC: Tensor,
        batch: WaveBatch,
        *,
        states: StateStore | None,
        place: int,
    ) -> Tensor:
        """Return [T, H * V] of a delta layer; every row's state counts, whoever wants a token."""
        spec = self.spec.delta
        if spec is None or states is None:
            raise InvariantError("a delta layer has a state store")
        check(len(batch.state_spans) > 0, "chunks of this stage come with states")
        return delta_layer(
            F.linear(h_TC, layer.qkv),
            delta,
            spec,
            batch.state_spans,
            norm_eps=self.spec.norm_eps,
            store=states,
            layer=place,
        )

    def _wide_norm(self, qk_THD: Tensor) -> Tensor:
        """Divide by the root mean square of all of q and of all of k."""
        spec = self.spec
        parts = qk_THD[:, : spec.heads], qk_THD[:, spec.heads :]
        return torch.cat(
            [F.rms_norm(part, part.shape[1:], None, spec.norm_eps) for part in parts], 1
        )

    def _feed_forward(self, layer: LayerWeights, h_TC: Tensor) -> Tensor:
        """Return what the MLP, or the experts with the shared ones, add to each row."""
        added = None
        if layer.gate_up is not None and layer.down is not None:
            gate_up = F.linear(h_TC, layer.gate_up, layer.gate_up_bias)
            added = F.linear(gated(gate_up, self.spec.situ), layer.down, layer.down_bias)
        if layer.moe is not None and layer.moe.shared_gate is not None and added is not None:
            added = added * F.linear(h_TC, layer.moe.shared_gate).sigmoid()
        if layer.moe is not None and self.spec.moe is not None:
            routed = experts_forward(h_TC, layer.moe, self.spec.moe)
            added = routed if added is None else routed + added
        if added is None:
            raise InvariantError("a layer has an MLP or experts")
        return added
