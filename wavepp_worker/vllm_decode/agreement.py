"""What this worker and its vLLM decode workers agree on, worked out before anything starts."""

from __future__ import annotations

import os

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts
from wavepp_worker.config.schema import Config
from wavepp_worker.vllm_decode.versions import (
    BlockLayout,
    Compatibility,
    block_layout,
    compatibility_hash,
    resolve_version,
)


class Agreement(Struct, frozen=True, kw_only=True):
    """The same on every stage of a worker."""

    layout: BlockLayout
    attention_backend: str
    kv_cache_layout: str
    block_tokens: int  # of decode
    compatibility_hash: str
    is_checked: bool  # whether decode's hash must be the same


def agree(config: Config, facts: ModelFacts) -> Agreement:
    """Return the terms of `decode_pool`.

    Raises:
        ConfigError: a vLLM version, attention backend or kind of model that is not supported.
    """
    pool = config.decode_pool
    if facts.latent_dim is not None or facts.delta_layers:
        raise ConfigError(
            f"decode_pool.kind vllm-push: {facts.family} does not keep keys and values in every "
            "layer; latents and recurrent states are not written to vLLM"
        )
    version = resolve_version(pool.vllm_version, decode_checks=pool.enforce_handshake_compat)
    return Agreement(
        layout=block_layout(version, pool.attention_backend),
        attention_backend=pool.attention_backend,
        kv_cache_layout=version.kv_cache_layout,
        block_tokens=pool.block_tokens or config.cache.block_tokens,
        compatibility_hash=compatibility_hash(
            Compatibility(
                vllm_version=pool.vllm_version,
                nixl_connector_version=version.connector_version,
                model=pool.model or os.path.expanduser(config.model.path),
                dtype=f"torch.{facts.dtype}",
                num_kv_heads=facts.kv_heads,
                head_size=facts.head_dim,
                num_hidden_layers=facts.layers,
                attn_backend_name=pool.attention_backend,
                transfer_mode="push",
            )
        ),
        is_checked=pool.enforce_handshake_compat,
    )


def region_name(layer: int) -> str:
    """Return vLLM's name of a layer's cache."""
    return f"model.layers.{layer}.self_attn.attn"
