"""Model description from a Hugging Face folder; no tensors, no torch.

Used twice: the serving process reads `ModelFacts` (and refuses an unusable folder before any rank
starts), every LOOP reads the `ModelSpec` from which it builds its stage.  Supported are dense
decoders with grouped-query attention, Llama, Qwen2 and Qwen3; Qwen3-MoE and MiniMax-M2, whose
layers have experts; DeepSeek-V3, whose attention caches latents; Qwen3-Next and Qwen3.5 (text),
most of whose layers are linear attention; Kimi Linear, and Kimi K3 (text).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import ceil_div
from wavepp_worker.config.derive import ModelFacts
from wavepp_worker.model import deepseek_v3, kimi_k3, kimi_linear, minimax_m2, qwen3_moe, qwen3_next
from wavepp_worker.model.checkpoint import (
    TensorEntry,
    check_tensors,
    read_index,
    strip_prefix,
    weights_digest,
)
from wavepp_worker.model.delta_spec import DeltaSpec
from wavepp_worker.model.mla_spec import MlaSpec, mla_shapes
from wavepp_worker.model.mlp_spec import SituSpec
from wavepp_worker.model.moe_spec import MoeSpec, moe_shapes

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "minimax_m2",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "kimi_k3",
]
HYBRIDS: Final[tuple[Family, ...]] = ("qwen3_next", "qwen3_5")
FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "KimiLinearForCausalLM": "kimi_linear",
    "KimiK3ForConditionalGeneration": "kimi_k3",
}
# Of the families whose head size does not default to hidden / heads.
HEAD_DIMS: Final[dict[Family, int]] = {
    "qwen3": 128,
    "minimax_m2": minimax_m2.HEAD_DIM,
    **dict.fromkeys(HYBRIDS, qwen3_next.HEAD_DIM),
}
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_FORMAT: Final = "wavepp-kv-1"  # changes whenever cached bytes would mean something else

Count = Annotated[int, Meta(ge=1)]


class RopeSpec(Struct, frozen=True, kw_only=True):
    """Rotary positions.  Fields named after kinds matter only for those."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context_tokens: int = 0  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    amplitude: float = 1.0  # yarn: what turns also grows by it
    fraction: float = 1.0  # of each head's dimensions, the first ones, turn


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Everything that the forward of one model depends on, besides its weights."""

    family: Family
    layers: int
    hidden: int
    intermediate: int
    vocab: int
    context_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    is_tied: bool  # the head is the embedding
    has_qk_norm: bool  # RMSNorm over each head of q and k, before the rotation, ...
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    dtype: str  # compute and cache type, a key of DTYPE_BYTES
    has_wide_qk_norm: bool = False  # ... or one over all heads of q together, and one of k
    moe: MoeSpec | None = None  # the layers with experts
    delta: DeltaSpec | None = None  # the linear-attention layers
    has_offset_norms: bool = False  # norm weights are stored as their distance from one
    has_attention_gate: bool = False  # q_proj also makes a gate for the attention's output
    mla: MlaSpec | None = None  # latent attention, in every layer
    situ: SituSpec | None = None  # activation of the dense MLPs and shared experts; None: SiLU
    residual_layers: int = 0  # attention residuals: layers of a running sum; 0: one throughout

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose feed-forward is experts."""
        return self.moe.layers if self.moe else ()

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a state instead of keys and values."""
        return self.delta.layers if self.delta else ()

    def starts_before(self, layer: int) -> int:
        """Return how many sums have been set aside before a layer, beside the running one."""
        return ceil_div(layer, self.residual_layers) if self.residual_layers else 0


class _Checkpoint(Struct, kw_only=True):
    """The part of config.json that is read; other keys are ignored."""

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None  # read where the family has one
    rotary_dim: Count | None = None  # read where the family turns a part of each head
    dtype: str | None = None
    torch_dtype: str | None = None


def read_facts(
    folder: str | Path, dtype: str = "auto", load_format: str = "safetensors", *, seed: int = 0
) -> ModelFacts:
    """Return what the plan needs to know of the model in `folder`, after checking the folder.

    With `load_format` "safetensors" every shard's header is read and compared with the file's
    size and with the tensors the model needs; weights themselves are only sampled, for the
    fingerprint.  With "dummy" only config.json is read and `seed` stands for the weights.

    Raises:
        ConfigError: no folder, no config.json, unsupported model, missing or truncated weights.
    """
    from wavepp_worker.model.work import layer_costs  # which counts by the shapes below

    spec = read_spec(folder, dtype)
    if load_format == "dummy":
        weights = f"dummy:{seed}".encode()
    else:
        index = read_tensors(folder, spec, 0, spec.layers)
        weights = weights_digest(index)
    identity = hashlib.sha256(CACHE_FORMAT.encode())
    identity.update(msgspec.json.encode(spec))
    identity.update(weights)
    return ModelFacts(
        family=spec.family,
        layers=spec.layers,
        hidden=spec.hidden,
        vocab=spec.vocab,
        context_tokens=spec.context_tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        latent_dim=spec.mla.row_dim if spec.mla else None,
        dtype=spec.dtype,
        dtype_bytes=DTYPE_BYTES[spec.dtype],
        fingerprint=identity.hexdigest()[:32],
        delta_layers=spec.delta_layers,
        layer_costs=layer_costs(spec),
        state_layer_bytes=spec.delta.layer_bytes(DTYPE_BYTES[spec.dtype]) if spec.delta else 0,
    )


def read_spec(folder: str | Path, dtype: str = "auto") -> ModelSpec:
    """Return the description of the model in `folder`; only config.json is read.

    Args:
        dtype: compute and cache type; "auto" takes the checkpoint's, float32 where it names none.

    Raises:
        ConfigError: no folder, no config.json, or a model this worker cannot run.
    """
    path = model_folder(folder) / "config.json"
    tree = _read_json(path)
    family = _family(tree, path)
    if family == "kimi_k3":
        tree = kimi_k3.text_part(tree)
    if family == "kimi_linear" and "model_max_length" in tree:
        tree = {"max_position_embeddings": tree["model_max_length"], **tree}
    try:
        raw = msgspec.convert(tree, _Checkpoint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    _refuse_unsupported(raw, path, family)
    heads = raw.num_attention_heads
    mla = _mla(family, tree, path)
    if mla is not None:
        raw.num_key_value_heads, raw.head_dim = heads, mla.key_dim
    kv_heads = raw.num_key_value_heads or heads
    head_dim = raw.head_dim or HEAD_DIMS.get(family, raw.hidden_size // heads)
    if heads % kv_heads:
        raise ConfigError(f"{path}: {heads} query heads cannot share {kv_heads} KV heads evenly")
    rope = _rope(raw, path, head_dim, family)
    if int(head_dim * rope.fraction) % 2:
        raise ConfigError(
            f"{path}: head_dim {head_dim}, of which {rope.fraction:g} turns, is odd; rotary "
            "positions need pairs"
        )
    return ModelSpec(
        family=family,
        layers=raw.num_hidden_layers,
        hidden=raw.hidden_size,
        intermediate=raw.intermediate_size,
        vocab=raw.vocab_size,
        context_tokens=raw.max_position_embeddings,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=raw.rms_norm_eps,
        rope=rope,
        is_tied=raw.tie_word_embeddings,
        has_qk_norm=family in ("qwen3", "qwen3_moe", "minimax_m2", *HYBRIDS),
        has_qkv_bias=family == "qwen2" or raw.attention_bias,
        has_out_bias=family != "qwen2" and raw.attention_bias,
        has_mlp_bias=family == "llama" and raw.mlp_bias,
        dtype=_dtype(raw, dtype, path),
        has_wide_qk_norm=family == "minimax_m2",
        moe=_moe(family, tree, path),
        delta=_delta(family, tree, path),
        has_offset_norms=family in HYBRIDS,
        has_attention_gate=family in HYBRIDS,
        mla=mla,
        situ=kimi_k3.read_situ(tree, path) if family == "kimi_k3" else None,
        residual_layers=kimi_k3.residual_layers(tree, path) if family == "kimi_k3" else 0,
    )


def read_tensors(
    folder: str | Path, spec: ModelSpec, first: int, stop: int
) -> dict[str, TensorEntry]:
    """Return all tensors of a checkpoint, after checking that a stage's are there.

    Raises:
        ConfigError: a tensor is missing or misshapen, or a shard is truncated.
    """
    index, shapes = read_index(model_folder(folder)), tensor_shapes(spec, first, stop)
    if spec.family == "kimi_linear":
        index = {kimi_linear.published_name(name): entry for name, entry in index.items()}
    if spec.family == "kimi_k3":
        index = strip_prefix(index, kimi_k3.TENSOR_PREFIX)
        check_tensors(index, shapes, may_be_longer=kimi_k3.is_padded)
    else:
        check_tensors(index, shapes)
    return index


def model_folder(folder: str | Path) -> Path:
    """Return `folder` with `~` expanded.

    Raises:
        ConfigError: there is no such folder.
    """
    path = Path(folder).expanduser()
    if path.is_dir():
        return path
    what = "is a file, not a folder" if path.exists() else "no such folder"
    raise ConfigError(
        f"model.path {str(folder)!r}: {what}; it must be a local Hugging Face folder with "
        "config.json and *.safetensors (nothing is downloaded at start)"
    )


def tensor_shapes(spec: ModelSpec, first: int, stop: int) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the checkpoint tensors of a stage with layers [first, stop)."""
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)

    if first == 0 or (stop == spec.layers and spec.is_tied):
        shapes["model.embed_tokens.weight"] = (spec.vocab, spec.hidden)
    for layer in range(first, stop):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (spec.hidden,)
        if spec.delta is not None and layer in spec.delta_layers:
            names = kimi_linear if spec.delta.decay_rank else qwen3_next
            shapes |= names.delta_shapes(block, spec.delta, spec.hidden)
        elif spec.mla is not None:
            shapes |= mla_shapes(block, spec.mla, spec.hidden, spec.heads)
        else:
            gated_rows = q_rows * (1 + spec.has_attention_gate)
            linear(f"{block}.self_attn.q_proj", gated_rows, spec.hidden, spec.has_qkv_bias)
            linear(f"{block}.self_attn.k_proj", kv_rows, spec.hidden, spec.has_qkv_bias)
            linear(f"{block}.self_attn.v_proj", kv_rows, spec.hidden, spec.has_qkv_bias)
            linear(f"{block}.self_attn.o_proj", spec.hidden, q_rows, spec.has_out_bias)
            if spec.has_qk_norm:
                is_wide, dim = spec.has_wide_qk_norm, spec.head_dim
                shapes[f"{block}.self_attn.q_norm.weight"] = (q_rows if is_wide else dim,)
                shapes[f"{block}.self_attn.k_norm.weight"] = (kv_rows if is_wide else dim,)
        if spec.residual_layers:
            shapes |= kimi_k3.residual_shapes(block, spec.hidden)
        shapes[f"{block}.post_attention_layernorm.weight"] = (spec.hidden,)
        if spec.moe is not None and layer in spec.moe_layers:
            shapes |= moe_shapes(block, spec.moe, spec.hidden)
        else:
            linear(f"{block}.mlp.gate_proj", spec.intermediate, spec.hidden, spec.has_mlp_bias)
            linear(f"{block}.mlp.up_proj", spec.intermediate, spec.hidden, spec.has_mlp_bias)
            linear(f"{block}.mlp.down_proj", spec.hidden, spec.intermediate, spec.has_mlp_bias)
    if stop == spec.layers:
        shapes["model.norm.weight"] = (spec.hidden,)
        if spec.residual_layers:
            shapes |= kimi_k3.mix_shapes("model.output_attn_res", spec.hidden)
        if not spec.is_tied:
            shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    return shapes


def is_offset_norm(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor is a norm's weight, stored as its distance from one."""
    is_norm = name.endswith("norm.weight") and ".linear_attn." not in name
    return is_norm and spec.has_offset_norms


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; model.path must hold a config.json") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a JSON object: {error}") from error


def _family(tree: dict[str, Any], path: Path) -> Family:
    if kimi_k3.is_k3(tree):
        return "kimi_k3"
    names = tree.get("architectures")
    for name in names if isinstance(names, list) else []:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError(
        f"{path}: architectures {names!r} is not supported; supported: {', '.join(FAMILIES)}"
    )


def _refuse_unsupported(raw: _Checkpoint, path: Path, family: Family) -> None:
    """Refuse what would load and then compute something else than the model's authors meant."""
    activation = "situ" if family == "kimi_k3" else "silu"
    if raw.hidden_act != activation:
        raise ConfigError(
            f"{path}: hidden_act {raw.hidden_act!r} is not supported, only {activation!r}"
        )
    if raw.quantization_config:
        how = raw.quantization_config.get("format") or raw.quantization_config.get("quant_method")
        raise ConfigError(
            f"{path}: quantized checkpoints ({how}) are not supported; convert the weights to "
            "bfloat16 first"
        )
    if raw.use_sliding_window or "sliding_attention" in (raw.layer_types or ()):
        raise ConfigError(f"{path}: sliding-window attention is not supported")


def _moe(family: Family, tree: dict[str, Any], path: Path) -> MoeSpec | None:
    readers: dict[Family, Callable[[dict[str, Any], Path], MoeSpec | None]] = {
        "qwen3_moe": qwen3_moe.read_moe,
        "minimax_m2": minimax_m2.read_moe,
        "qwen3_next": qwen3_next.read_moe,
        "deepseek_v3": deepseek_v3.read_moe,
        "kimi_linear": kimi_linear.read_moe,
        "kimi_k3": kimi_k3.read_moe,
    }
    return readers[family](tree, path) if family in readers else None


def _mla(family: Family, tree: dict[str, Any], path: Path) -> MlaSpec | None:
    readers: dict[Family, Callable[[dict[str, Any], Path], MlaSpec]] = {
        "deepseek_v3": deepseek_v3.read_mla,
        "kimi_linear": kimi_linear.read_mla,
        "kimi_k3": kimi_k3.read_mla,
    }
    return readers[family](tree, path) if family in readers else None


def _delta(family: Family, tree: dict[str, Any], path: Path) -> DeltaSpec | None:
    if family in HYBRIDS:
        return qwen3_next.read_delta(tree, path, is_next=family == "qwen3_next")
    if family == "kimi_linear":
        return kimi_linear.read_delta(tree, path)
    return kimi_k3.read_delta(tree, path) if family == "kimi_k3" else None


def _rope(raw: _Checkpoint, path: Path, head_dim: int, family: Family) -> RopeSpec:
    """Read both spellings: `rope_parameters` (new) and `rope_theta` with `rope_scaling` (old)."""
    scaling = raw.rope_parameters or raw.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ConfigError(
            f"{path}: rope scaling {kind!r} is not supported; supported: default, linear, llama3, "
            "yarn"
        )
    fraction, theta = 1.0, 10_000.0
    if family == "minimax_m2":
        # Published checkpoints have `rotary_dim`, what transformers writes has the fraction.
        fraction = min(1.0, (raw.rotary_dim or head_dim) / head_dim)
        fraction = scaling.get("partial_rotary_factor", fraction)
        theta = minimax_m2.ROPE_THETA
    elif family in HYBRIDS:
        fraction = raw.partial_rotary_factor or qwen3_next.ROTARY_FRACTION
        fraction = scaling.get("partial_rotary_factor", fraction)
    elif family in ("kimi_linear", "kimi_k3"):
        fraction = 0.0  # no positions
    elif scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: partial_rotary_factor is not supported")
    fields = {
        "kind": kind,
        "theta": scaling.get("rope_theta", raw.rope_theta or theta),
        "fraction": fraction,
    }
    if kind != "default":
        fields["factor"] = scaling.get("factor")
    if kind == "llama3":
        fields["low_freq_factor"] = scaling.get("low_freq_factor")
        fields["high_freq_factor"] = scaling.get("high_freq_factor")
        fields["original_context_tokens"] = scaling.get("original_max_position_embeddings")
    if kind == "yarn":
        fields |= _yarn(scaling, path)
    try:
        return msgspec.convert(fields, RopeSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: rope scaling {kind!r}: {error}") from error


def _yarn(scaling: dict[str, Any], path: Path) -> dict[str, Any]:
    if not scaling.get("truncate", True):
        raise ConfigError(f"{path}: rope scaling 'yarn' with truncate: false is not supported")
    factor, amplitude = scaling.get("factor"), scaling.get("attention_factor")
    if amplitude is None and isinstance(factor, int | float) and factor > 0:
        growth = max(0.0, 0.1 * math.log(factor))
        up, down = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if not (up and down):
            up, down = 1.0, 0.0
        amplitude = (up * growth + 1.0) / (down * growth + 1.0)
    return {
        "original_context_tokens": scaling.get("original_max_position_embeddings"),
        "beta_fast": scaling.get("beta_fast") or 32.0,
        "beta_slow": scaling.get("beta_slow") or 1.0,
        "amplitude": amplitude,
    }


def _dtype(raw: _Checkpoint, wanted: str, path: Path) -> str:
    named = raw.dtype or raw.torch_dtype or "float32"
    dtype = named.removeprefix("torch.") if wanted == "auto" else wanted
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{path}: dtype {dtype!r} is not supported; set model.dtype to one of "
            f"{', '.join(DTYPE_BYTES)}"
        )
    return dtype
