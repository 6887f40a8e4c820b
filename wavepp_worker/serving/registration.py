"""How the worker introduces itself to Dynamo."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo.common.backend import EngineConfig, LlmRegistration, WorkerConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import Plan
from wavepp_worker.config.schema import Config, ModelConfig

REQUEST_PLANES = ("tcp", "nats")
EVENT_PLANES = ("zmq", "nats")


def model_folder(model: ModelConfig) -> Path:
    """Return the model's folder with `~` expanded."""
    return Path(model.path).expanduser()


def served_name(config: Config) -> str:
    """Return the model's name in the OpenAI API."""
    return config.serving.served_model_name or model_folder(config.model).resolve().name


def worker_config(config: Config) -> WorkerConfig:
    """Return Dynamo's own settings; the planes come from its DYN_* variables.

    Raises:
        ConfigError: a plane that Dynamo does not have.
    """
    return WorkerConfig(
        namespace=get_worker_namespace(),
        component=config.serving.component,
        endpoint=config.serving.endpoint,
        model_name=str(model_folder(config.model)),
        served_model_name=served_name(config),
        discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
        request_plane=_plane("DYN_REQUEST_PLANE", REQUEST_PLANES),
        event_plane=_plane("DYN_EVENT_PLANE", EVENT_PLANES),
        disaggregation_mode=DisaggregationMode.PREFILL,
    )


def engine_config(config: Config, plan: Plan, cache_tokens: int) -> EngineConfig:
    """Return what the router and the frontend need to know.

    Args:
        cache_tokens: cache of the smallest stage, as the ranks allocated it.
    """
    return EngineConfig(
        model=str(model_folder(config.model)),
        served_model_name=served_name(config),
        runtime_data={
            "wavepp_stages": len(plan.stages),
            "wavepp_fingerprint": plan.fingerprint,
        },
        llm=LlmRegistration(
            context_length=plan.context_tokens,
            kv_cache_block_size=plan.block_tokens,
            total_kv_blocks=cache_tokens // plan.block_tokens,
            max_num_seqs=config.admission.queue_requests_max,
            max_num_batched_tokens=plan.wave_tokens_max,
            data_parallel_size=1,
        ),
    )


def _plane(variable: str, known: tuple[str, ...]) -> str:
    value = os.environ.get(variable) or known[0]
    if value not in known:
        raise ConfigError(f"{variable}={value!r}: must be one of {', '.join(known)}")
    return value
