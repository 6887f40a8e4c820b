"""Weights of one stage: only the tensors it needs, mapped from safetensors, or seeded dummies.

Dummy weights depend on the seed and the tensor's name alone, so every cut of a model, on every
device, has the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.model.attention_residual import ResidualWeights
from wavepp_worker.model.checkpoint import TensorEntry
from wavepp_worker.model.delta_layer import DeltaWeights
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.mla import MlaWeights
from wavepp_worker.model.mla_spec import MlaSpec, half_order
from wavepp_worker.model.moe import LatentWeights, MoeWeights
from wavepp_worker.model.moe_spec import MoeSpec
from wavepp_worker.model.qwen3_next import attention_input_order, delta_input_order, delta_inputs
from wavepp_worker.model.spec import ModelSpec, is_offset_norm, read_tensors, tensor_shapes
from wavepp_worker.model.stage import LayerWeights, StageModel, StageWeights
from wavepp_worker.model.warm_up import warm_up

DUMMY_NUMBERS: Final = 4_194_301  # prime, so that no width divides it: no two rows are alike
Progress = Callable[[int, int], None]  # (tensors loaded, tensors of this stage)


class TensorSource(Protocol):
    """Where checkpoint tensors come from."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, on the CPU, in any floating type."""


def load_stage(
    folder: str | Path,
    spec: ModelSpec,
    first: int,
    stop: int,
    *,
    device: torch.device | str = "cpu",
    load_format: str = "safetensors",
    seed: int = 0,
    progress: Progress | None = None,
) -> StageModel:
    """Return layers [first, stop) of the model, in `spec.dtype` on `device`.

    Stage 0 also gets the embedding, the stage that ends at `spec.layers` the norm and the head.

    Args:
        load_format: "safetensors", or "dummy" for random weights from `seed` (no weights read).
        progress: called after every tensor.

    Raises:
        ConfigError: a tensor is missing or misshapen, or a shard is truncated.
    """
    check(0 <= first < stop <= spec.layers, "not a stage of this model", first=first, stop=stop)
    shapes = tensor_shapes(spec, first, stop)
    source: TensorSource
    if load_format == "dummy":
        source = DummySource(seed, {name for name in shapes if is_offset_norm(spec, name)})
    else:
        index = read_tensors(folder, spec, first, stop)
        source = SafetensorsSource({name: index[name] for name in shapes})
    builder = _StageBuilder(spec, shapes, source, torch.device(device), progress)
    model = StageModel(spec, first, builder.build(first, stop))
    warm_up(model)
    return model


class SafetensorsSource:
    """Tensors mapped from shards; pages are read when a tensor is copied to the device."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._open: dict[Path, Any] = {}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor without padding rows; `shape` was checked against the header before."""
        entry = self._entries[name]
        shard = entry.shard
        if shard not in self._open:
            self._open[shard] = safe_open(str(shard), framework="pt", device="cpu")
        tensor: Tensor = self._open[shard].get_tensor(entry.name)
        return tensor[: shape[0]]


class DummySource:
    """Random weights that keep activations near one: unit norms, matrices scaled by fan-in.

    Tensors are cut from one bank of normal numbers, each from a place of its own: drawing every
    weight of a large model anew takes minutes.
    """

    def __init__(self, seed: int, offset_norms: Container[str] = ()) -> None:
        self._seed = seed
        self._offset_norms = offset_norms
        self._bank = torch.randn(DUMMY_NUMBERS, generator=torch.Generator().manual_seed(seed))

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of this name; equal for equal seed, name and shape."""
        if name.endswith("norm.weight"):
            return torch.full(shape, 0.0 if name in self._offset_norms else 1.0)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        start = int.from_bytes(digest[:8], "little") % DUMMY_NUMBERS
        scale = 0.02 if len(shape) == 1 else shape[-1] ** -0.5
        count = math.prod(shape)
        rounds = (start + count - 1) // DUMMY_NUMBERS
        numbers = torch.cat((self._bank[start:], *[self._bank] * rounds))[:count]
        return numbers.view(shape) * scale


class _StageBuilder:
    """Copies tensors from a source into the fused layout, one at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        shapes: dict[str, tuple[int, ...]],
        source: TensorSource,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._spec = spec
        self._shapes = shapes
        self._source = source
        self._device = device
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._progress = progress
        self._loaded_count = 0

    def build(self, first: int, stop: int) -> StageWeights:
        spec = self._spec
        embedding = norm = head = output_query = None
        if "model.embed_tokens.weight" in self._shapes:
            embedding = self._fused("model.embed_tokens.weight")
        layers = tuple(self._layer(index) for index in range(first, stop))
        if stop == spec.layers:
            norm = self._norm("model.norm.weight")
            head = embedding if spec.is_tied else self._fused("lm_head.weight")
            if spec.residual_layers:
                output_query = self._query("model.output_attn_res")
        return StageWeights(
            embedding=embedding if first == 0 else None,
            layers=layers,
            norm=norm,
            head=head,
            output_query=output_query,
        )

    def _layer(self, index: int) -> LayerWeights:
        spec, block = self._spec, f"model.layers.{index}"
        attention = f"{block}.self_attn"
        if index in spec.delta_layers:
            mixer = self._delta(block)
        elif spec.mla is not None:
            mixer = self._latent(attention, spec.mla)
        else:
            mixer = self._attention(attention)
        residual = None
        if spec.residual_layers:
            residual = ResidualWeights(
                attention=self._query(f"{block}.self_attention_res"),
                ffn=self._query(f"{block}.mlp_res"),
            )
        return LayerWeights(
            attention_norm=self._norm(f"{block}.input_layernorm.weight"),
            **mixer,
            ffn_norm=self._norm(f"{block}.post_attention_layernorm.weight"),
            **self._feed_forward(block, index),
            residual=residual,
        )

    def _latent(self, attention: str, mla: MlaSpec) -> dict[str, Any]:
        heads = self._spec.heads
        q_order = half_order(mla, heads, mla.nope_dim)
        row_order = half_order(mla, 1, mla.kv_rank)
        q_norm = q_up = None
        if mla.q_rank is None:
            first, order = "q_proj", q_order
        else:
            first, order = "q_a_proj", list(range(mla.q_rank))
            q_norm = self._fused(f"{attention}.q_a_layernorm.weight")
            q_up = self._weight([f"{attention}.q_b_proj"])[q_order]
        inputs = [first, "kv_a_proj_with_mqa", *(["g_proj"] if mla.has_gate else [])]
        rows = self._weight([f"{attention}.{name}" for name in inputs])
        gates = range(len(order) + len(row_order), len(rows))
        kv_norm = self._fused(f"{attention}.kv_a_layernorm.weight")
        kv_up = self._weight([f"{attention}.kv_b_proj"]).view(heads, -1, mla.kv_rank)
        return {
            "qkv": rows[[*order, *(len(order) + row for row in row_order), *gates]],
            "qkv_bias": None,
            "qk_norm": None,
            "out": self._weight([f"{attention}.o_proj"]),
            "out_bias": None,
            "mla": MlaWeights(
                q_norm=q_norm,
                q_up=q_up,
                kv_norm=kv_norm,
                key_up=kv_up[:, : mla.nope_dim],
                value_up=kv_up[:, mla.nope_dim :],
            ),
        }

    def _feed_forward(self, block: str, index: int) -> dict[str, Any]:
        spec, moe = self._spec, self._spec.moe
        if moe is None or index not in moe.layers:
            return self._mlp(f"{block}.mlp", has_bias=spec.has_mlp_bias)
        layer = f"{block}.{moe.names.layer}"
        parts: dict[str, Any] = {"gate_up": None, "down": None}
        if moe.shared_width:
            parts = self._mlp(f"{layer}.{moe.names.shared}", has_bias=False)
        return {"gate_up_bias": None, "down_bias": None} | parts | {"moe": self._moe(layer, moe)}

    def _mlp(self, mlp: str, *, has_bias: bool) -> dict[str, Any]:
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        return {
            "gate_up": self._weight(gate_up),
            "gate_up_bias": self._bias(gate_up, has_bias),
            "down": self._weight([f"{mlp}.down_proj"]),
            "down_bias": self._bias([f"{mlp}.down_proj"], has_bias),
        }

    def _moe(self, layer: str, moe: MoeSpec) -> MoeWeights:
        spec, names = self._spec, moe.names
        experts = [f"{layer}.experts.{expert}" for expert in range(moe.experts)]
        gate_up = [f"{expert}.{part}" for expert in experts for part in (names.gate, names.up)]
        down = [f"{expert}.{names.down}" for expert in experts]
        bias = None
        if moe.has_selection_bias:
            bias = self._fused(f"{layer}.{names.selection_bias}", dtype=torch.float32)
        # Sigmoid scores crowd near one, where 16 bits do not tell experts apart.
        router_dtype = torch.float32 if moe.scores == "sigmoid" else self._dtype
        rows, latent = moe.latent or spec.hidden, None
        if moe.latent:
            latent = LatentWeights(
                down=self._weight([f"{layer}.{names.latent_down}"]),
                norm=self._fused(f"{layer}.{names.latent_norm}.weight"),
                up=self._weight([f"{layer}.{names.latent_up}"]),
            )
        return MoeWeights(
            router=self._fused(f"{layer}.{names.router}.weight", dtype=router_dtype),
            selection_bias=bias,
            gate_up=self._weight(gate_up).view(moe.experts, 2 * moe.width, rows),
            down=self._weight(down).view(moe.experts, rows, moe.width),
            shared_gate=self._weight([f"{layer}.{names.shared_gate}"])
            if moe.has_shared_gate
            else None,
            latent=latent,
        )

    def _attention(self, attention: str) -> dict[str, Any]:
        spec = self._spec
        modules = [f"{attention}.{part}_proj" for part in ("q", "k", "v")]
        qkv, bias = self._weight(modules), self._bias(modules, spec.has_qkv_bias)
        if spec.has_attention_gate:
            order = attention_input_order(spec.heads, spec.kv_heads, spec.head_dim)
            qkv, bias = qkv[order], None if bias is None else bias[order]
        qk_norm = None
        if spec.has_qk_norm:
            q_norm, k_norm = (
                self._norm(f"{attention}.{part}_norm.weight").view(-1, spec.head_dim)
                for part in ("q", "k")
            )
            qk_norm = torch.cat((q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)))
        return {
            "qkv": qkv,
            "qkv_bias": bias,
            "qk_norm": qk_norm,
            "out": self._weight([f"{attention}.o_proj"]),
            "out_bias": self._bias([f"{attention}.o_proj"], spec.has_out_bias),
        }

    def _delta(self, block: str) -> dict[str, Any]:
        spec, layer = self._spec.delta, f"{block}.linear_attn"
        if spec is None:
            raise InvariantError("a model with delta layers describes them")
        if spec.decay_rank:
            return self._channel_delta(f"{block}.self_attn", spec)
        inputs = self._weight([f"{layer}.{name}" for name in delta_inputs(spec)])
        return {
            "qkv": inputs[delta_input_order(spec)],
            "qkv_bias": None,
            "qk_norm": None,
            "out": self._weight([f"{layer}.out_proj"]),
            "out_bias": None,
            "delta": DeltaWeights(
                convolution=self._weight([f"{layer}.conv1d"])[:, 0],
                a_log=self._fused(f"{layer}.A_log", dtype=torch.float32),
                decay_bias=self._fused(f"{layer}.dt_bias", dtype=torch.float32)[:, None],
                norm=self._norm(f"{layer}.norm.weight"),
            ),
        }

    def _channel_delta(self, layer: str, delta: DeltaSpec) -> dict[str, Any]:
        """Return a delta layer with a decay per channel; what it computes in f32 stays f32."""
        gate = "g_a_proj" if delta.gate_rank else "g_proj"
        inputs = ("q_proj", "k_proj", "v_proj", gate, "b_proj", "f_a_proj")
        filters = [f"{layer}.{part}_conv1d.weight" for part in "qkv"]
        bias = self._fused(f"{layer}.dt_bias", dtype=torch.float32)
        return {
            "qkv": self._weight([f"{layer}.{name}" for name in inputs]),
            "qkv_bias": None,
            "qk_norm": None,
            "out": self._weight([f"{layer}.o_proj"]),
            "out_bias": None,
            "delta": DeltaWeights(
                convolution=self._fused(*filters, dtype=torch.float32)[:, 0],
                a_log=self._fused(f"{layer}.A_log", dtype=torch.float32).flatten(),
                decay_bias=bias.view(delta.value_heads, -1),
                norm=self._fused(f"{layer}.o_norm.weight", dtype=torch.float32),
                decay_up=self._weight([f"{layer}.f_b_proj"]),
                gate_up=self._weight([f"{layer}.g_b_proj"]) if delta.gate_rank else None,
            ),
        }

    def _query(self, name: str) -> Tensor:
        """Return the weights of a mix, f32 [C]."""
        norm = self._fused(f"{name}_norm.weight", dtype=torch.float32)
        return norm * self._fused(f"{name}_proj.weight", dtype=torch.float32)[0]

    def _norm(self, name: str) -> Tensor:
        """Return a norm's weight; f32 if it is stored as the distance from one."""
        if is_offset_norm(self._spec, name):
            return self._fused(name, dtype=torch.float32) + 1.0
        return self._fused(name)

    def _weight(self, modules: Sequence[str]) -> Tensor:
        return self._fused(*(f"{module}.weight" for module in modules))

    def _bias(self, modules: Sequence[str], is_present: bool) -> Tensor | None:
        return self._fused(*(f"{module}.bias" for module in modules)) if is_present else None

    def _fused(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the named tensors, stacked along their rows, on the stage's device.

        Args:
            dtype: default: the stage's.
        """
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((rows, *shapes[0][1:]), dtype=dtype or self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            fused[start : start + shape[0]].copy_(self._source.get(name, shape))
            start += shape[0]
            self._loaded_count += 1
            if self._progress is not None:
                self._progress(self._loaded_count, len(self._shapes))
        return fused
