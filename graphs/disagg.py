"""Disaggregated serving: Dynamo's frontend with its KV router, WavePP prefill, reference decode.

client ─HTTP─▶ Frontend ─▶ PrefillWorker (P stages, 2P + 1 processes) ─NIXL─▶ DecodeWorker
                      └──────────────────────────────────────────────────────▶

With `PrefillWorker.decode_pool.kind: vllm-push`, VllmDecodeWorker stands in DecodeWorker's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from graphs.graph import Component, Pod, ServiceArgs, Settings
from graphs.vllm_decode import VllmDecodeWorker
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import (
    Config,
    DecodeConfig,
    FrontendConfig,
    ModelConfig,
    VllmDecodeConfig,
    first_host_ranks,
)
from wavepp_worker.model.spec import model_folder, read_facts

OPERATOR_HTTP_PORT = 8000  # its Service, container port and probes of a frontend


def served_name(chosen: str, model: ModelConfig) -> str:
    """Return the name in the OpenAI API: the chosen one, else the model folder's."""
    return chosen or Path(model.path).expanduser().resolve().name


def frontend_arguments(settings: FrontendConfig, _file: str) -> tuple[str, ...]:
    """Return the arguments of `python -m dynamo.frontend`."""
    return (
        "--http-host", settings.host,
        "--http-port", str(settings.port),
        "--router-mode", settings.router_mode,
        "--migration-limit", str(settings.migration_limit),
    )  # fmt: skip


def config_argument(_settings: Settings, file: str) -> tuple[str, ...]:
    """Return the arguments of a worker of ours."""
    return ("--config", file)


def frontend_pod(settings: FrontendConfig) -> Pod:
    """Return the frontend as Dynamo's operator expects it: on every address, port 8000."""
    everywhere = msgspec.structs.replace(settings, host="0.0.0.0", port=OPERATOR_HTTP_PORT)
    return Pod(name="Frontend", kind="frontend", settings=everywhere)


def prefill_pod(settings: Config) -> Pod:
    """Return one worker: P stages in one pod, reachable by decode at the pod's address.

    Raises:
        ConfigError: some stages would run on other hosts.
    """
    cluster = settings.cluster
    if first_host_ranks(cluster) < cluster.stages:
        raise ConfigError(
            "cluster.first_host_stages: a prefill worker over several pods is not supported yet"
        )
    devices = cluster.devices or ("cuda",) * cluster.stages
    return Pod(
        name=settings.serving.component,
        kind="prefill",
        settings=settings,
        gpus=sum(device.startswith("cuda") for device in devices),
        cpus=cluster.stages * (cluster.threads + 1) + 1,  # LOOP and WAVE per stage; serving
        arguments=("--set", "cluster.host=$(POD_IP)"),
        start_s=cluster.start_timeout_s,
        silence_s=max(settings.executor.stall_timeout_s, settings.transport.collective_timeout_s),
        drain_s=settings.transfer.hold_s,
    )


def decode_pod(settings: DecodeConfig) -> Pod:
    """Return one reference decode worker."""
    return Pod(
        name=settings.component,
        kind="decode",
        settings=settings,
        gpus=int(settings.device in ("", "cuda") or settings.device.startswith("cuda:")),
        cpus=settings.threads + 1,
    )


def check_prefill(settings: Config) -> None:
    """Refuse a model folder that cannot be used, or a model that cannot be cut as configured."""
    model = settings.model
    facts = read_facts(model.path, model.dtype, model.load_format, seed=model.seed)
    derive(settings, facts)
    check_tokenizer(model)


def check_decode(settings: DecodeConfig) -> None:
    """Refuse a model folder that cannot be used."""
    model = settings.model
    read_facts(model.path, model.dtype, model.load_format, seed=model.seed)
    check_tokenizer(model)


def check_tokenizer(model: ModelConfig) -> None:
    """Refuse a folder without a tokenizer: Dynamo's frontend would ask for it again and again."""
    folder = model_folder(model.path)
    path = folder / "tokenizer.json"
    if not path.exists():
        if any(folder.glob("*.tiktoken")) or (folder / "tiktoken.model").exists():
            return
        raise ConfigError(f"{path}: not found; Dynamo's frontend needs the model's tokenizer")
    try:
        msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a JSON object: {error}") from error


PrefillWorker = Component(
    name="PrefillWorker",
    does="prefills prompts in pipeline stages",
    config_type=Config,
    module="components.prefill_worker",
    arguments=config_argument,
    model_name=lambda s: served_name(s.serving.served_model_name, s.model),
    check=check_prefill,
    pod=prefill_pod,
)

DecodeWorker = Component(
    name="DecodeWorker",
    does="pulls the cache through NIXL and writes the answer",
    config_type=DecodeConfig,
    module="components.decode_worker",
    arguments=config_argument,
    model_name=lambda s: served_name(s.served_model_name, s.model),
    check=check_decode,
    pod=decode_pod,
)

Frontend = Component(
    name="Frontend",
    does="OpenAI API, tokenizer, KV router",
    config_type=FrontendConfig,
    module="dynamo.frontend",
    arguments=frontend_arguments,
    address=lambda s: (s.host, s.port),
    pod=frontend_pod,
    is_frontend=True,
    needs=(DecodeWorker, VllmDecodeWorker, PrefillWorker),
)


def relate(settings: Mapping[str, Settings], args: Mapping[str, ServiceArgs]) -> None:
    """Refuse settings of several components that cannot work together.

    Raises:
        ConfigError: names both paths.
    """
    prefill: Config | None = settings.get("PrefillWorker")
    decode: DecodeConfig | None = settings.get("DecodeWorker")
    if prefill:
        gpus, stages = args["PrefillWorker"].resources.gpu, first_host_ranks(prefill.cluster)
        key = "first_host_stages" if stages < prefill.cluster.stages else "stages"
        if 0 < gpus < stages and not prefill.cluster.devices:
            raise ConfigError(
                f"PrefillWorker.ServiceArgs.resources.gpu ({gpus}) is less than "
                f"PrefillWorker.cluster.{key} ({stages}): each stage needs a device of its own"
            )
    if prefill:
        _relate_pool(prefill, decode, settings.get("VllmDecodeWorker"))
    if not (prefill and decode):
        return
    if prefill.cache.block_tokens != decode.block_tokens:
        raise ConfigError(
            f"DecodeWorker.block_tokens ({decode.block_tokens}) must equal "
            f"PrefillWorker.cache.block_tokens ({prefill.cache.block_tokens})"
        )
    names = PrefillWorker.model_name(prefill), DecodeWorker.model_name(decode)
    if names[0] != names[1]:
        raise ConfigError(
            f'PrefillWorker serves the model as "{names[0]}" but DecodeWorker as "{names[1]}": '
            "set PrefillWorker.serving.served_model_name and DecodeWorker.served_model_name alike"
        )
    if prefill.model.dtype != decode.model.dtype:
        raise ConfigError(
            f"PrefillWorker.model.dtype ({prefill.model.dtype}) must equal "
            f"DecodeWorker.model.dtype ({decode.model.dtype}): the cache is copied as it is"
        )


def _relate_pool(
    prefill: Config, decode: DecodeConfig | None, vllm: VllmDecodeConfig | None
) -> None:
    """Refuse decode workers that do not take what the stages hand off."""
    pushes = prefill.decode_pool.kind == "vllm-push"
    if pushes and decode:
        raise ConfigError(
            "PrefillWorker.decode_pool.kind (vllm-push): DecodeWorker cannot take what is pushed; "
            "set DecodeWorker.ServiceArgs.workers to 0 and VllmDecodeWorker's to 1"
        )
    if vllm is None:
        return
    if not pushes:
        raise ConfigError(
            "VllmDecodeWorker takes pushed prompts only: set PrefillWorker.decode_pool.kind to "
            "vllm-push"
        )
    theirs = prefill.decode_pool.block_tokens or prefill.cache.block_tokens
    if theirs != vllm.block_tokens:
        raise ConfigError(
            f"VllmDecodeWorker.block_tokens ({vllm.block_tokens}) must equal "
            f"PrefillWorker.decode_pool.block_tokens ({theirs}; default: cache.block_tokens)"
        )
    if prefill.model.dtype != vllm.model.dtype:
        raise ConfigError(
            f"PrefillWorker.model.dtype ({prefill.model.dtype}) must equal "
            f"VllmDecodeWorker.model.dtype ({vllm.model.dtype})"
        )
    names = PrefillWorker.model_name(prefill), VllmDecodeWorker.model_name(vllm)
    if names[0] != names[1]:
        raise ConfigError(
            f'PrefillWorker serves the model as "{names[0]}" but VllmDecodeWorker as "{names[1]}"'
        )
