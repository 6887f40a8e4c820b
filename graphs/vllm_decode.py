"""The decode worker of a pool that people already run: stock vLLM under Dynamo, on the CPU.

It lives in an environment of its own, because vLLM pins other versions of half of everything:
`make vllm-env` makes one.  Nothing of ours is imported there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from graphs.graph import Component
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.schema import VllmDecodeConfig
from wavepp_worker.model.spec import model_folder

SITE = Path(__file__).parent / "vllm_site"
CONNECTOR = {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer"}


def arguments(settings: VllmDecodeConfig, _file: str) -> tuple[str, ...]:
    """Return the arguments of `dynamo.vllm`."""
    model = settings.model
    words = [
        "--model", str(Path(model.path).expanduser()),
        "--served-model-name", served_name(settings),
        "--disaggregation-mode", "decode",
        "--dtype", model.dtype,
        "--block-size", str(settings.block_tokens),
        "--enforce-eager",
        "--kv-transfer-config", json.dumps(CONNECTOR),
    ]  # fmt: skip
    if model.context_tokens_max is not None:
        words += ["--max-model-len", str(model.context_tokens_max)]
    return (*words, *settings.extra_arguments)


def environment(settings: VllmDecodeConfig) -> dict[str, str]:
    """Return what vLLM's CPU backend and its connector read from the environment."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": settings.threads_bind,
        "PYTHONPATH": str(SITE),
        # dynamo.vllm fills it in for the pulling connector only.
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings.side_channel_port),
    }


def python(settings: VllmDecodeConfig) -> str:
    """Return the interpreter of vLLM's environment."""
    chosen = settings.python
    if not chosen:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        chosen = f"{cache}/wavepp/vllm/bin/python"
    return str(Path(chosen).expanduser())


def served_name(settings: VllmDecodeConfig) -> str:
    """Return the name in the OpenAI API: the chosen one, else the model folder's."""
    return settings.served_model_name or Path(settings.model.path).expanduser().resolve().name


def check(settings: VllmDecodeConfig) -> None:
    """Refuse to start without vLLM's environment or without the model."""
    model_folder(settings.model.path)
    if not os.access(python(settings), os.X_OK):
        raise ConfigError(
            f"VllmDecodeWorker.python ({python(settings)}): no such program; "
            "`make vllm-env` makes an environment with stock vLLM (4 GB)"
        )


VllmDecodeWorker = Component(
    name="VllmDecodeWorker",
    does="stock vLLM; takes the cache that the stages push, writes the answer",
    config_type=VllmDecodeConfig,
    module="dynamo.vllm",
    arguments=arguments,
    address=lambda s: (s.host, s.side_channel_port),
    model_name=served_name,
    check=check,
    python=python,
    environment=environment,
    workers=0,
)
