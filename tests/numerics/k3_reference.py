"""Kimi K3 written from its equations in fp64: the oracle of a family that transformers lacks.

Nothing is shared with the code under test: names and shapes of tensors are stated again, states go
forward token by token, attention expands every key and value, every expert runs on every token.

    x = mix(prefix, blocks) ;  at a block's start: blocks += [prefix], prefix = 0
    prefix += Attention(Norm(x)) ;  prefix += FFN(Norm(mix(prefix, blocks)))
    logits = W Norm(mix(prefix, blocks))

Names and shapes are those of the published checkpoint, experts unpacked.

Legend: T tokens, C hidden, H heads, K key dim, V value dim, N blocks and prefix.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

PREFIX = "language_model."
LATENT_EPS = 1e-6  # of the norms within the attention
UNIT_EPS = 1e-6
A_LOG_ENTRIES = 128  # heads are padded to a multiple of it


def k3_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny model: five layers in three blocks, the first one dense.

    Args:
        changes: keys of `text_config` to replace.
    """
    text = {
        "model_type": "kimi_linear",
        "vocab_size": 262,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        # At 1e-6 a head whose output happens to be tiny has its rounding blown up by its norm,
        # and the epsilon of another norm would not show.
        "rms_norm_eps": 1e-2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "attn_res_block_size": 2,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 3,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5],
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "num_experts": 8,
        "num_experts_per_token": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 40,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": text | changes,
    }


def k3_shapes(tree: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor of the language model."""
    text = tree["text_config"]
    hidden = text["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "lm_head.weight": (text["vocab_size"], hidden),
    }
    for layer in range(text["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{name}.weight"] = (hidden,)
        for name in ("self_attention_res", "mlp_res"):
            shapes[f"{block}.{name}_norm.weight"] = (hidden,)
            shapes[f"{block}.{name}_proj.weight"] = (1, hidden)
        mixer = _kda_shapes(text) if _is_kda(text, layer) else _mla_shapes(text)
        ffn = _mlp_shapes("mlp", hidden, text["intermediate_size"])
        if layer >= text["first_k_dense_replace"]:
            ffn = _moe_shapes(text)
        shapes |= {f"{block}.self_attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"{block}.{name}": shape for name, shape in ffn.items()}
    return {PREFIX + name: shape for name, shape in shapes.items()}


def k3_tensors(tree: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Return random fp32 weights large enough that a mistake anywhere shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    heads = tree["text_config"]["linear_attn_config"]["num_heads"]
    tensors = {}
    for name, shape in k3_shapes(tree).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.1 * values
        elif name.endswith(".A_log"):
            values = 0.5 * values
            values[heads:] = 9.0  # padding, which must not be read
        elif name.endswith(".dt_bias"):
            # From decays slow enough to keep the whole prompt to ones that forget at once.
            values = 2.0 * values - 5.0
        elif name.endswith("e_score_correction_bias"):
            values = 0.2 * values
        else:
            values = values * shape[-1] ** -0.5
        tensors[name] = values
    return tensors


class K3Reference:
    """The model of a folder, one shot, no cache; the interface of `pipeline.Oracle`."""

    def __init__(self, folder: Path) -> None:
        self._text = json.loads((folder / "config.json").read_text())["text_config"]
        self._tensors: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            self._tensors |= {
                name.removeprefix(PREFIX): tensor.double()
                for name, tensor in load_file(shard).items()
            }

    def logits(self, prompt: Sequence[int]) -> Tensor:
        """Return f32 [tokens, vocabulary]."""
        return self._run(prompt).logits.float()

    def states(self, prompt: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return layer -> (recurrent state [H, K, V], last conv inputs [R, C]) after `prompt`."""
        return {
            layer: (state.float(), tail.float())
            for layer, (state, tail) in self._run(prompt).states.items()
        }

    def boundary(self, prompt: Sequence[int], layer: int) -> tuple[Tensor, list[Tensor]]:
        """Return the prefix and the blocks before a layer, f64 [T, C] each."""
        return self._run(prompt).boundaries[layer]

    def routing_margin(self, prompt: Sequence[int]) -> float:
        """Return the least gap between the last expert that was chosen and the first that was not.

        Where it is far above rounding, no other way to compute chooses other experts.
        """
        return self._run(prompt).margin

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` most likely next tokens, each computed from the whole text."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(prompt) :]

    def _run(self, prompt: Sequence[int]) -> _Run:
        return _Run(self._text, self._tensors, prompt)


class _Run:
    """One forward and what it left behind."""

    def __init__(
        self, text: Mapping[str, Any], tensors: Mapping[str, Tensor], prompt: Sequence[int]
    ) -> None:
        self._text = text
        self._tensors = tensors
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        self.boundaries: list[tuple[Tensor, list[Tensor]]] = []
        self.margin = math.inf
        prefix = self._get("model.embed_tokens")[list(prompt)]
        blocks: list[Tensor] = []
        for layer in range(text["num_hidden_layers"]):
            self.boundaries.append((prefix, list(blocks)))
            prefix = self._layer(layer, prefix, blocks)
        x = self._mix(prefix, blocks, "model.output_attn_res")
        self.logits = self._norm(x, "model.norm") @ self._get("lm_head").T

    def _layer(self, layer: int, prefix: Tensor, blocks: list[Tensor]) -> Tensor:
        name = f"model.layers.{layer}"
        x = self._mix(prefix, blocks, f"{name}.self_attention_res") if blocks else prefix
        if layer % self._text["attn_res_block_size"] == 0:
            blocks.append(prefix)
            prefix = torch.zeros_like(prefix)
        normed = self._norm(x, f"{name}.input_layernorm")
        mixer = self._kda if _is_kda(self._text, layer) else self._mla
        prefix = prefix + mixer(layer, f"{name}.self_attn", normed)
        x = self._mix(prefix, blocks, f"{name}.mlp_res")
        normed = self._norm(x, f"{name}.post_attention_layernorm")
        if layer >= self._text["first_k_dense_replace"]:
            return prefix + self._experts(f"{name}.block_sparse_moe", normed)
        return prefix + self._mlp(f"{name}.mlp", normed)

    def _mix(self, prefix: Tensor, blocks: Sequence[Tensor], name: str) -> Tensor:
        """Return per token the softmax-weighted sum of the blocks and the prefix."""
        vectors = torch.stack([*blocks, prefix])
        rms = (vectors.square().mean(-1) + self._text["rms_norm_eps"]).sqrt()
        weight = self._get(f"{name}_norm") * self._get(f"{name}_proj")[0]
        shares = (vectors @ weight / rms).softmax(dim=0)
        return torch.einsum("nt,ntc->tc", shares, vectors)

    def _kda(self, layer: int, name: str, x: Tensor) -> Tensor:
        linear = self._text["linear_attn_config"]
        heads, dim, kernel = (
            linear[key] for key in ("num_heads", "head_dim", "short_conv_kernel_size")
        )
        rows = [x @ self._get(f"{name}.{part}_proj").T for part in "qkv"]
        filters = [self._get(f"{name}.{part}_conv1d")[:, 0] for part in "qkv"]
        padded = torch.cat((x.new_zeros(kernel - 1, 3 * heads * dim), torch.cat(rows, dim=1)))
        mixed = sum(
            padded[shift : shift + len(x)] * torch.cat(filters)[:, shift] for shift in range(kernel)
        )
        q, k, v = (mixed * mixed.sigmoid()).view(len(x), 3, heads, dim).unbind(1)
        q, k = (part / (part.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt() for part in (q, k))
        steepness = self._get(f"{name}.A_log", "")[:heads].exp()[:, None]
        raw_gate = (x @ self._get(f"{name}.f_a_proj").T) @ self._get(f"{name}.f_b_proj").T
        bias = self._get(f"{name}.dt_bias", "")
        decay = (
            linear["gate_lower_bound"]
            * (steepness * (raw_gate + bias).view(len(x), heads, dim)).sigmoid()
        ).exp()
        beta = (x @ self._get(f"{name}.b_proj").T).sigmoid()
        state, outputs = x.new_zeros(heads, dim, dim), []
        for token in range(len(x)):
            state = state * decay[token, :, :, None]
            held = torch.einsum("hkv,hk->hv", state, k[token])
            change = beta[token, :, None] * (v[token] - held)
            state = state + torch.einsum("hk,hv->hkv", k[token], change)
            outputs.append(torch.einsum("hkv,hk->hv", state, q[token] * dim**-0.5))
        self.states[layer] = (state, padded[len(x) :])
        out = self._norm(torch.stack(outputs), f"{name}.o_norm")
        gate = (x @ self._get(f"{name}.g_proj").T).sigmoid()
        return (out.flatten(1) * gate) @ self._get(f"{name}.o_proj").T

    def _mla(self, _layer: int, name: str, x: Tensor) -> Tensor:
        text = self._text
        heads, rank = text["num_attention_heads"], text["kv_lora_rank"]
        nope, rope = text["qk_nope_head_dim"], text["qk_rope_head_dim"]
        low = self._norm(x @ self._get(f"{name}.q_a_proj").T, f"{name}.q_a_layernorm", LATENT_EPS)
        q = (low @ self._get(f"{name}.q_b_proj").T).view(len(x), heads, nope + rope)
        rows = x @ self._get(f"{name}.kv_a_proj_with_mqa").T
        latent = self._norm(rows[:, :rank], f"{name}.kv_a_layernorm", LATENT_EPS)
        both = (latent @ self._get(f"{name}.kv_b_proj").T).view(len(x), heads, -1)
        shared = rows[:, None, rank:].expand(-1, heads, -1)
        k, v = torch.cat((both[..., :nope], shared), dim=-1), both[..., nope:]
        scores = torch.einsum("thd,shd->hts", q, k) * (nope + rope) ** -0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        out = torch.einsum("hts,shv->thv", shares, v).flatten(1)
        gate = (x @ self._get(f"{name}.g_proj").T).sigmoid()
        return (out * gate) @ self._get(f"{name}.o_proj").T

    def _experts(self, name: str, x: Tensor) -> Tensor:
        """Run every expert on every token; those that were not chosen weigh nothing."""
        text = self._text
        scores = (x @ self._get(f"{name}.gate").T).sigmoid()
        ranked = scores + self._get(f"{name}.gate.e_score_correction_bias", "")
        falling = ranked.sort(dim=-1, descending=True).values
        last, first_out = falling[:, text["num_experts_per_token"] - 1 :][:, :2].unbind(1)
        self.margin = min(self.margin, float((last - first_out).min()))
        weights = torch.where(ranked >= last[:, None], scores, 0.0)
        weights = weights / weights.sum(-1, keepdim=True) * text["routed_scaling_factor"]
        low = x @ self._get(f"{name}.routed_expert_down_proj").T
        mixed = sum(
            weights[:, expert, None] * self._expert(f"{name}.experts.{expert}", low)
            for expert in range(text["num_experts"])
        )
        normed = self._norm(mixed, f"{name}.routed_expert_norm")
        routed = normed @ self._get(f"{name}.routed_expert_up_proj").T
        return routed + self._mlp(f"{name}.shared_experts", x)

    def _expert(self, name: str, x: Tensor) -> Tensor:
        gate, up = x @ self._get(f"{name}.w1").T, x @ self._get(f"{name}.w3").T
        return self._situ(gate, up) @ self._get(f"{name}.w2").T

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = x @ self._get(f"{name}.gate_proj").T, x @ self._get(f"{name}.up_proj").T
        return self._situ(gate, up) @ self._get(f"{name}.down_proj").T

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        first, second = (self._text[f"activation_situ_{part}"] for part in ("beta", "linear_beta"))
        return first * (gate / first).tanh() * gate.sigmoid() * second * (up / second).tanh()

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self._text["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self._get(name)

    def _get(self, name: str, suffix: str = ".weight") -> Tensor:
        return self._tensors[name + suffix]


def _is_kda(text: Mapping[str, Any], layer: int) -> bool:
    return layer + 1 in text["linear_attn_config"]["kda_layers"]


def _kda_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    linear, hidden = text["linear_attn_config"], text["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width = heads * dim
    return {
        **{f"{part}_proj.weight": (width, hidden) for part in ("q", "k", "v", "g")},
        **{f"{part}_conv1d.weight": (width, 1, linear["short_conv_kernel_size"]) for part in "qkv"},
        "f_a_proj.weight": (dim, hidden),
        "f_b_proj.weight": (width, dim),
        "b_proj.weight": (heads, hidden),
        "A_log": (-(-heads // A_LOG_ENTRIES) * A_LOG_ENTRIES,),
        "dt_bias": (width,),
        "o_norm.weight": (dim,),
        "o_proj.weight": (hidden, width),
    }


def _mla_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = (
        text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    q_rank, rank = text["q_lora_rank"], text["kv_lora_rank"]
    return {
        "q_a_proj.weight": (q_rank, hidden),
        "q_a_layernorm.weight": (q_rank,),
        "q_b_proj.weight": (heads * (nope + rope), q_rank),
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "g_proj.weight": (heads * value, hidden),
        "o_proj.weight": (hidden, heads * value),
    }


def _moe_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, latent = text["hidden_size"], text["routed_expert_hidden_size"]
    width, experts = text["moe_intermediate_size"], text["num_experts"]
    name = "block_sparse_moe"
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.gate.weight": (experts, hidden),
        f"{name}.gate.e_score_correction_bias": (experts,),
        f"{name}.routed_expert_down_proj.weight": (latent, hidden),
        f"{name}.routed_expert_norm.weight": (latent,),
        f"{name}.routed_expert_up_proj.weight": (hidden, latent),
    }
    for expert in range(experts):
        for part, shape in _expert_shapes(latent, width):
            shapes[f"{name}.experts.{expert}.{part}.weight"] = shape
    shared = _mlp_shapes(f"{name}.shared_experts", hidden, text["num_shared_experts"] * width)
    return shapes | shared


def _expert_shapes(latent: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from (("w1", (width, latent)), ("w2", (latent, width)), ("w3", (width, latent)))


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.gate_proj.weight": (width, hidden),
        f"{name}.up_proj.weight": (width, hidden),
        f"{name}.down_proj.weight": (hidden, width),
    }
