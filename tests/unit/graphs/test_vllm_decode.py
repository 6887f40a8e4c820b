"""A graph whose decode workers are stock vLLM: what is started, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from graphs.vllm_decode import SITE, check, python
from tests.unit.graphs.test_deployment import deployed, plans, refusal
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.schema import ModelConfig, VllmDecodeConfig

BASE = """
Common: {model: {path: /m/tiny, dtype: float32, context_tokens_max: 2048}}
PrefillWorker: {common-configs: [model], cache: {block_tokens: 64},
  decode_pool: {kind: vllm-push, block_tokens: 32}}
DecodeWorker: {ServiceArgs: {workers: 0}}
VllmDecodeWorker: {common-configs: [model], python: /v/bin/python, side_channel_port: 7001,
  threads_bind: 0-1, extra_arguments: [--seed, "3"], ServiceArgs: {workers: 1}}
"""


def test_vllm_runs_on_its_own_interpreter_beside_ours() -> None:
    by_name = {plan.name: plan for plan in plans(BASE)}
    assert set(by_name) == {"Frontend", "PrefillWorker", "VllmDecodeWorker"}
    assert by_name["PrefillWorker"].command[0] == sys.executable
    plan = by_name["VllmDecodeWorker"]
    assert plan.command[:3] == ("/v/bin/python", "-m", "dynamo.vllm")
    words = dict(zip(plan.command[3::2], plan.command[4::2], strict=False))
    assert plan.command[-2:] == ("--seed", "3")
    assert (words["--model"], words["--block-size"]) == ("/m/tiny", "32")
    assert (words["--dtype"], words["--disaggregation-mode"]) == ("float32", "decode")
    transfer = json.loads(plan.command[plan.command.index("--kv-transfer-config") + 1])
    assert transfer == {"kv_connector": "NixlPushConnector", "kv_role": "kv_consumer"}
    assert plan.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    assert plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7001"
    assert plan.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert plan.env["PYTHONPATH"] == str(SITE)
    assert (SITE / "sitecustomize.py").is_file()
    assert deployed(BASE).model_names() == ("tiny",)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: vllm-push, ", "", "set PrefillWorker.decode_pool.kind to vllm-push"),
        ("VllmDecodeWorker: {", "VllmDecodeWorker: {block_tokens: 64, ", "must equal"),
        ("VllmDecodeWorker: {", "VllmDecodeWorker: {served_model_name: x, ", '"tiny" but'),
        ("VllmDecodeWorker: {", "VllmDecodeWorker: {model: {dtype: bfloat16}, ", "dtype"),
        ("DecodeWorker: {ServiceArgs: {workers: 0}}", "DecodeWorker: {common-configs: [model]}",
         "cannot take what is pushed"),
    ],
)  # fmt: skip
def test_what_cannot_work_together_is_refused(old: str, new: str, words: str) -> None:
    assert words in refusal(BASE.replace(old, new, 1))


def test_a_missing_environment_is_named_with_its_remedy(tmp_path: Path) -> None:
    settings = VllmDecodeConfig(model=ModelConfig(path=str(tmp_path)), python=str(tmp_path / "no"))
    with pytest.raises(ConfigError, match=r"no\): no such program; .*make vllm-env"):
        check(settings)


def test_the_default_environment_is_the_one_that_make_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = VllmDecodeConfig(model=ModelConfig(path="/m"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert python(settings) == "/c/wavepp/vllm/bin/python"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert python(settings) == str(Path("~/.cache/wavepp/vllm/bin/python").expanduser())


def test_a_component_without_processes_needs_no_settings() -> None:
    deployment = deployed(BASE)
    assert "DecodeWorker" not in deployment.settings
    assert [c.name for c in deployment.graph.components] == [
        "VllmDecodeWorker", "PrefillWorker", "Frontend",
    ]  # fmt: skip
