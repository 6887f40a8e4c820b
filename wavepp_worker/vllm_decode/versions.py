"""Which vLLM versions we can speak to, and the hash by which decode recognises a compatible peer.

Pure.  vLLM's connector is tied to one release: its messages, its layouts and its compatibility
hash change between releases, so a version that is not in `VERSIONS` is refused.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Final, Literal

from msgspec import Struct

from wavepp_worker.base.errors import ConfigError

TransferMode = Literal["pull", "push"]


class BlockLayout(StrEnum):
    """How one head of one block lies in decode's memory: B tokens, D dims, keys K, values V."""

    TOKEN_MAJOR = "token_major"  # [B][K of the token | V of the token]
    KEYS_TRANSPOSED = "keys_transposed"  # [D][B] of K, then [B][D] of V


class VllmVersion(Struct, frozen=True):
    """What follows from one vLLM version."""

    connector_version: int
    kv_cache_layout: str  # what the metadata call the order of a region's dimensions
    backends: dict[str, BlockLayout]  # by decode's attention backend; others are refused


VERSIONS: Final = {
    # CPU_ATTN: the packing of x86 without AMX.  AMX with bfloat16, and Arm, pack otherwise.
    "0.31.0": VllmVersion(13, "LBHNC", {"CPU_ATTN": BlockLayout.KEYS_TRANSPOSED}),
}
NEWEST: Final = "0.31.0"


def resolve_version(version: str, *, decode_checks: bool = True) -> VllmVersion:
    """Return what is known of a vLLM version; the newest known one if decode does not check.

    Args:
        version: `vllm.__version__` of the decode worker, any local suffix included.
        decode_checks: False if decode runs with `enforce_handshake_compat: false`.

    Raises:
        ConfigError: the version is unknown and decode would refuse us anyway.
    """
    known = VERSIONS.get(version)
    if known is not None:
        return known
    if decode_checks:
        raise ConfigError(
            f"vLLM {version!r} is not supported, only {', '.join(VERSIONS)}; decode may take the "
            "cache all the same with enforce_handshake_compat: false"
        )
    return VERSIONS[NEWEST]


def block_layout(version: VllmVersion, backend: str) -> BlockLayout:
    """Return the layout that an attention backend of decode expects from a writer.

    Raises:
        ConfigError: this backend's layout is not known.
    """
    layout = version.backends.get(backend)
    if layout is None:
        raise ConfigError(
            f"the cache layout of vLLM's attention backend {backend!r} is not supported, only "
            f"{', '.join(version.backends)}"
        )
    return layout


class Compatibility(Struct, frozen=True, kw_only=True):
    """What must be equal on both sides; the compatibility hash covers exactly these."""

    vllm_version: str
    nixl_connector_version: int
    model: str  # the literal string given to vLLM: for a folder, the same path on both sides
    dtype: str  # with torch's prefix, e.g. "torch.float32"
    num_kv_heads: int
    head_size: int
    num_hidden_layers: int
    attn_backend_name: str
    transfer_mode: TransferMode
    cache_dtype: str = "auto"
    is_hma_enabled: bool = True
    speculative_config: None = None


def compatibility_hash(facts: Compatibility) -> str:
    """Return the hash that decode compares with its own."""
    factors = {name: getattr(facts, name) for name in facts.__struct_fields__}
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
