"""What Dynamo is told, from the config and its own DYN_* variables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dynamo.common.constants import DisaggregationMode

from tests.unit.serving.scripted import make_config
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.schema import Config, ModelConfig
from wavepp_worker.serving.engine import WavePPEngine
from wavepp_worker.serving.registration import served_name, worker_config

VARIABLES = ("DYN_DISCOVERY_BACKEND", "DYN_REQUEST_PLANE", "DYN_EVENT_PLANE", "DYN_NAMESPACE")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "DYN_NAMESPACE_WORKER_SUFFIX"):
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_dynamos_own() -> None:
    worker = worker_config(make_config())
    assert (worker.namespace, worker.component, worker.endpoint) == (
        "dynamo",
        "prefill",
        "generate",
    )
    assert (worker.discovery_backend, worker.request_plane, worker.event_plane) == (
        "etcd", "tcp", "zmq",
    )  # fmt: skip
    assert worker.disaggregation_mode is DisaggregationMode.PREFILL


def test_planes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("file", "nats", "nats", "blue"), strict=True):
        monkeypatch.setenv(name, value)
    worker = worker_config(make_config())
    assert (worker.discovery_backend, worker.request_plane, worker.event_plane) == (
        "file", "nats", "nats",
    )  # fmt: skip
    assert worker.namespace == "blue"


def test_an_unknown_plane_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_EVENT_PLANE", "pigeon")
    with pytest.raises(ConfigError, match=r"DYN_EVENT_PLANE='pigeon'.*zmq"):
        worker_config(make_config())


def test_the_model_is_called_after_its_folder_unless_named() -> None:
    assert served_name(make_config()) == "tiny"
    assert served_name(Config(model=ModelConfig(path="/models/llama-8b/"))) == "llama-8b"


MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 300,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


async def test_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "worker.json"
    model = {"path": str(tmp_path), "load_format": "dummy"}
    path.write_text(json.dumps({"model": model, "cluster": {"stages": 3}}))
    arguments = ["--config", str(path), "--set"]
    engine, worker = await WavePPEngine.from_args([*arguments, "cluster.stages=4"])
    assert isinstance(engine, WavePPEngine)
    assert worker.model_name == str(tmp_path)
    with pytest.raises(ConfigError, match=r"cluster.stages \(5\)"):
        await WavePPEngine.from_args([*arguments, "cluster.stages=5"])  # the model has 4 layers
    with pytest.raises(ConfigError, match="no such folder"):
        await WavePPEngine.from_args([*arguments, "model.path=/nowhere/at/all"])


async def test_a_bad_file_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    path.write_text('{"model": {"path": "/m/x"}, "clutser": {}}')
    with pytest.raises(ConfigError, match="clutser"):
        await WavePPEngine.from_args(["--config", str(path)])
