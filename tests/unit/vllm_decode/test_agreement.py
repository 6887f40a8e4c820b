"""What is refused before a worker starts, and what the terms follow from."""

from __future__ import annotations

from typing import Any

import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts
from wavepp_worker.config.schema import CacheConfig, Config, DecodePoolConfig, ModelConfig
from wavepp_worker.vllm_decode.agreement import agree
from wavepp_worker.vllm_decode.versions import Compatibility, compatibility_hash


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "family": "llama",
        "layers": 4,
        "hidden": 64,
        "vocab": 257,
        "context_tokens": 512,
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "dtype_bytes": 4,
        "fingerprint": "f",
    }
    return ModelFacts(**values | changes)


def config(**pool: Any) -> Config:
    return Config(
        model=ModelConfig(path="~/tiny"),
        cache=CacheConfig(block_tokens=64),
        decode_pool=DecodePoolConfig(kind="vllm-push", **pool),
    )


def expected(model: str) -> str:
    return compatibility_hash(
        Compatibility(
            vllm_version="0.31.0",
            nixl_connector_version=13,
            model=model,
            dtype="torch.float32",
            num_kv_heads=2,
            head_size=16,
            num_hidden_layers=4,
            attn_backend_name="CPU_ATTN",
            transfer_mode="push",
        )
    )


def test_the_hash_is_of_decodes_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    assert agree(config(), facts()).compatibility_hash == expected("/home/x/tiny")
    assert agree(config(model="org/tiny"), facts()).compatibility_hash == expected("org/tiny")


def test_decodes_block_is_ours_unless_told() -> None:
    assert agree(config(), facts()).block_tokens == 64
    assert agree(config(block_tokens=32), facts()).block_tokens == 32


@pytest.mark.parametrize(
    ("pool", "changes", "message"),
    [
        ({"vllm_version": "0.32.0"}, {}, "vLLM '0.32.0' is not supported"),
        ({"attention_backend": "FLASH_ATTN"}, {}, "attention backend 'FLASH_ATTN'"),
        ({}, {"latent_dim": 576}, "latents and recurrent states"),
        ({}, {"delta_layers": (1,)}, "latents and recurrent states"),
    ],
)
def test_what_cannot_be_written_is_refused(
    pool: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        agree(config(**pool), facts(**changes))


def test_an_unknown_version_is_taken_if_decode_does_not_compare() -> None:
    terms = agree(config(vllm_version="0.32.0", enforce_handshake_compat=False), facts())
    assert not terms.is_checked
