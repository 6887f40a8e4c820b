"""Rendered manifests: refused or accepted as a cluster would, and in step with what workers do."""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from dynamo.frontend.frontend_args import FrontendArgGroup

from graphs.deployment import deploy
from graphs.graph import Component, Graph
from graphs.kubernetes import (
    DRAIN_RESERVE_S,
    DYNAMO_VERSION,
    GRACE_S,
    OPERATOR_VARIABLES,
    Choices,
    manifests,
)
from graphs.render_command import KUSTOMIZATION
from tests.unit.graphs.admission import complaints
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.cli import main
from wavepp_worker.config.load import load_config, load_decode_config, parse_source

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
VLLM = "vllm-decode-cpu.yaml"  # its decode worker is another project's, with manifests of its own
EXAMPLES = sorted(path.parent for path in (CONFIGS / "kubernetes").glob(f"*/{KUSTOMIZATION}"))
DEMO, OVERLAY = str(CONFIGS / "smollm2-cpu.yaml"), str(CONFIGS / "etcd-nats.yaml")
IMAGE = "registry.example/wavepp:0.1.0"
GPUS = ("--PrefillWorker.cluster.devices=[]", "--DecodeWorker.device=cuda:0")
Print = pytest.CaptureFixture[str]


def render(capsys: Print, *words: str, claim: str = "models") -> list[dict[str, Any]]:
    claims = ["--model-claim", claim] if claim else []
    status = main(["render", "graphs.disagg", "--kubernetes", "--image", IMAGE, *claims, *words])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return list(yaml.safe_load_all(captured.out))


def refusal(capsys: Print, *words: str, claim: str = "models") -> str:
    claims = ["--model-claim", claim] if claim else []
    words = ("render", "graphs.disagg", "--kubernetes", "--image", IMAGE, *claims, *words)
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def of_kind(documents: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(document for document in documents if document["kind"] == kind)


def components(documents: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    spec = of_kind(documents, "DynamoGraphDeployment")["spec"]
    return {component["type"]: component for component in spec["components"]}


def container(component: dict[str, Any]) -> dict[str, Any]:
    (only,) = component["podTemplate"]["spec"]["containers"]
    return only


def env_of(documents: Sequence[dict[str, Any]], kind: str) -> dict[str, str]:
    own = container(components(documents)[kind])["env"]
    shared = of_kind(documents, "DynamoGraphDeployment")["spec"]["env"]
    return {item["name"]: item.get("value", "") for item in (*shared, *own)}


def combinations() -> list[tuple[str, ...]]:
    """Every shipped configuration, alone or over the demo if it is an overlay; every option."""
    files = [
        ("-f", str(path)) if "PrefillWorker" in (yaml.safe_load(path.read_text()) or {})
        else ("-f", DEMO, "-f", str(path))
        for path in sorted(CONFIGS.glob("*.yaml")) if path.name != VLLM
    ]  # fmt: skip
    options = (
        (),
        GPUS,
        ("--pod-monitor", "-n", "inference", "--service-account", "a", "--pull-secret", "s"),
        ("--PrefillWorker.ServiceArgs.resources.memory=64Gi", "--no-dashboard", *GPUS),
    )
    return [(*file, *option) for file, option in itertools.product(files, options)]


def test_a_stock_vllm_worker_is_not_rendered(capsys: Print) -> None:
    assert "VllmDecodeWorker" in refusal(capsys, "-f", str(CONFIGS / VLLM))


@pytest.mark.parametrize("words", combinations(), ids=lambda words: " ".join(words)[-60:])
def test_every_shipped_configuration_is_accepted(capsys: Print, words: tuple[str, ...]) -> None:
    documents = render(capsys, *words)
    assert len(documents) == 3 + ("--pod-monitor" in words) - ("--no-dashboard" in words)
    for document in documents:
        assert complaints(document) == [], document["kind"]


Break = Callable[[dict[str, Any]], None]


def first_main(graph: dict[str, Any]) -> dict[str, Any]:
    return container(graph["spec"]["components"][0])


BROKEN: dict[str, tuple[Break, str]] = {
    "version": (lambda g: g.update(apiVersion="nvidia.com/v1alpha1"), "not nvidia.com/v1alpha1"),
    "unknown key": (lambda g: g["spec"].update(componets=[]), "componets"),
    "no name": (lambda g: g["spec"]["components"][0].pop("name"), "'name' is a required"),
    "type": (lambda g: g["spec"]["components"][0].update(type="prefil"), "'prefil' is not one of"),
    "replicas": (lambda g: g["spec"]["components"][0].update(replicas="1"), "not of type"),
    "framework": (lambda g: g["spec"].update(backendFramework="wavepp"), "'wavepp' is not one of"),
    "nodes": (lambda g: g["spec"]["components"][1].update(multinode={"nodeCount": 1}), "minimum"),
    "version text": (
        lambda g: g["spec"]["components"][0].update(runtimeVersionOverride="latest"), "match"),
    "env number": (lambda g: first_main(g)["env"].append({"name": "A", "value": 1}), "not of type"),
    "probe": (lambda g: first_main(g).update(livenessProbe={"httpGet": {"path": "/live"}}), "port"),
    "cel: two of a name": (
        lambda g: g["spec"]["components"][1].update(name="FRONTEND"), "unique case-insensitively"),
    "cel: restart": (lambda g: g["spec"].update(restart={"id": "x"}), "must be unset on create"),
    "cel: sidecar": (
        lambda g: g["spec"]["components"][0]["podTemplate"]["spec"]["containers"].append(
            {"name": "side"}),
        "sidecar containers must specify"),
    "cel: available": (
        lambda g: g["spec"]["components"][1].update(minAvailable=2), "less than or equal"),
    "admission: main": (lambda g: first_main(g).update(name="worker"), "no container main"),
    "admission: tag": (
        lambda g: g["spec"]["components"][1].pop("runtimeVersionOverride")
        and container(g["spec"]["components"][1]).update(image="r/wavepp:latest"),
        "runtimeVersionOverride is needed"),
    "admission: frontend sidecar": (
        lambda g: g["spec"]["components"][1].update(frontendSidecar="x"), "names no container"),
    "pod: unknown key": (
        lambda g: g["spec"]["components"][0]["podTemplate"]["spec"].update(nodeSelectr={}),
        "nodeSelectr"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_manifests_are_refused(capsys: Print, name: str) -> None:
    graph = of_kind(render(capsys, "-f", DEMO), "DynamoGraphDeployment")
    assert complaints(graph) == []
    broken = copy.deepcopy(graph)
    change, expected = BROKEN[name]
    change(broken)
    found = complaints(broken)
    assert any(expected in text for text in found), found


def test_broken_config_maps_and_monitors_are_refused(capsys: Print) -> None:
    documents = render(capsys, "-f", DEMO, "--pod-monitor")
    config, monitor = of_kind(documents, "ConfigMap"), of_kind(documents, "PodMonitor")
    config["data"]["a"] = 1
    monitor["spec"]["podMetricsEndpoints"][0]["prot"] = "system"
    assert complaints(config)
    assert complaints(monitor)


# ── in step with the worker ──────────────────────────────────────────────────────────────────


def test_names_are_those_under_which_the_workers_register(capsys: Print) -> None:
    words = ("--PrefillWorker.serving.component=ours", "--DecodeWorker.component=theirs")
    for choice, names in (((), ("prefill", "decode")), (words, ("ours", "theirs"))):
        documents = render(capsys, "-f", DEMO, *choice)
        found = components(documents)
        assert (found["prefill"]["name"], found["decode"]["name"]) == names
        settings = of_kind(documents, "ConfigMap")["data"]
        prefill = json.loads(settings["PrefillWorker.json"])
        decode = json.loads(settings["DecodeWorker.json"])
        assert prefill.get("serving", {}).get("component", "prefill") == names[0]
        assert decode.get("component", "decode") == names[1]


def test_workers_read_their_settings_as_they_are_mounted(capsys: Print, tmp_path: Path) -> None:
    documents = render(capsys, "-f", DEMO, *GPUS)
    for kind, load in (("prefill", load_config), ("decode", load_decode_config)):
        main_container = container(components(documents)[kind])
        (option, file, *sets) = main_container["args"]
        folder = next(
            mount["mountPath"]
            for mount in main_container["volumeMounts"]
            if mount["name"] == "wavepp-config"
        )
        assert option == "--config"
        assert str(Path(file).parent) == folder
        local = tmp_path / Path(file).name
        local.write_text(of_kind(documents, "ConfigMap")["data"][local.name])
        values = [word.replace("$(POD_IP)", "10.1.2.3") for word in sets if word != "--set"]
        config = load(local, values)
        assert config.model.path == "/models/smollm2-135m-instruct"
        if kind == "prefill":
            assert config.cluster.host == "10.1.2.3"
            assert (config.cache.block_tokens, config.planner.wave_tokens_max) == (16, 512)
        else:
            assert (config.block_tokens, config.device) == (16, "cuda:0")


def test_commands_name_modules_that_exist(capsys: Print) -> None:
    for component in components(render(capsys, "-f", DEMO)).values():
        python, flag, module = container(component)["command"]
        assert (python, flag) == ("python3", "-m")
        assert importlib.util.find_spec(module), module


def test_the_frontend_takes_its_arguments_and_the_operators_port(capsys: Print) -> None:
    words = container(components(render(capsys, "-f", DEMO, "--Frontend.port=9"))["frontend"])
    parser = argparse.ArgumentParser()
    FrontendArgGroup().add_arguments(parser)
    options = parser.parse_args(words["args"])
    assert (options.http_host, options.http_port, options.router_mode) == ("0.0.0.0", 8000, "kv")


@functools.cache
def words_of_dynamo() -> bytes:
    """Return everything that could name a variable in the packaged Dynamo."""
    spec = importlib.util.find_spec("dynamo._core")
    assert spec and spec.origin
    folder = Path(spec.origin).parent
    sources = (path.read_bytes() for path in folder.glob("common/**/*.py"))
    return b"\n".join([Path(spec.origin).read_bytes(), *sources])


@pytest.mark.parametrize("kind", ["frontend", "prefill", "decode"])
def test_dynamo_knows_the_variables_and_the_operators_own_are_left_to_it(
    capsys: Print, kind: str
) -> None:
    names = set(env_of(render(capsys, "-f", DEMO, "-f", OVERLAY), kind))
    for name in names - {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "POD_IP"}:
        assert name.encode() in words_of_dynamo(), name
    assert names & {*OPERATOR_VARIABLES} <= {"POD_IP"}


def test_the_version_is_the_packaged_one(capsys: Print) -> None:
    assert importlib.metadata.version("ai-dynamo-runtime") == DYNAMO_VERSION
    for component in components(render(capsys, "-f", DEMO)).values():
        assert component["runtimeVersionOverride"] == DYNAMO_VERSION


# ── probes and the end ───────────────────────────────────────────────────────────────────────


def patience_s(probe: dict[str, Any]) -> float:
    return float(probe["periodSeconds"] * probe["failureThreshold"])


def test_probes_come_after_the_workers_own_alarms(capsys: Print) -> None:
    words = ("--PrefillWorker.cluster.start_timeout_s=1800",)
    words += ("--PrefillWorker.transport.collective_timeout_s=300",)
    for choice, start_s, silence_s in (((), 600, 120), (words, 1800, 300)):
        prefill = container(components(render(capsys, "-f", DEMO, *choice))["prefill"])
        assert patience_s(prefill["startupProbe"]) > start_s
        assert patience_s(prefill["livenessProbe"]) > silence_s
        assert prefill["livenessProbe"]["failureThreshold"] > 1
        assert patience_s(prefill["readinessProbe"]) <= 15
        paths = [
            prefill[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
        ]
        assert [path["path"] for path in paths] == ["/live", "/live", "/health"]
        assert {path["port"] for path in paths} == {"system"}


def test_a_pod_outlives_its_drain_and_the_drain_outlives_the_holds(capsys: Print) -> None:
    documents = render(capsys, "-f", DEMO, "--drain-s", "90")
    stop = {
        kind: component["podTemplate"]["spec"]["terminationGracePeriodSeconds"]
        for kind, component in components(documents).items()
    }
    env = env_of(documents, "prefill")
    waits = [
        float(env[name])
        for name in (
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
            "DYN_PREFILL_DRAIN_TIMEOUT_S",
            "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS",
        )
    ]
    assert waits == [GRACE_S, 90, 90]
    assert stop["prefill"] > sum(waits)
    assert stop["decode"] > GRACE_S + 90
    assert stop["frontend"] > GRACE_S
    least = math.ceil(30.5) + DRAIN_RESERVE_S
    hold = "--PrefillWorker.transfer.hold_s=30.5"
    assert f"at least {least} is needed" in refusal(
        capsys, "-f", DEMO, hold, "--drain-s", str(least - 1)
    )
    render(capsys, "-f", DEMO, hold, "--drain-s", str(least))


# ── resources and volumes ────────────────────────────────────────────────────────────────────


def test_one_gpu_per_stage_and_one_processor_per_process(capsys: Print) -> None:
    found = components(render(capsys, "-f", DEMO, *GPUS, "--PrefillWorker.cluster.stages=4"))
    resources = container(found["prefill"])["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "4"}
    assert resources["requests"] == {"cpu": "9", "nvidia.com/gpu": "4"}
    assert container(found["decode"])["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert found["prefill"]["sharedMemorySize"] == "8Gi"
    for component in components(render(capsys, "-f", DEMO)).values():
        assert "limits" not in container(component)["resources"]


def test_chosen_resources_win_over_derived_ones(capsys: Print) -> None:
    chosen = {"gpu": 8, "cpu": 32, "memory": "400Gi"}
    words = [f"--PrefillWorker.ServiceArgs.resources.{k}={v}" for k, v in chosen.items()]
    resources = container(components(render(capsys, "-f", DEMO, *words))["prefill"])["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "8", "cpu": "32", "memory": "400Gi"}
    assert resources["requests"] == resources["limits"]


def test_workers_become_replicas_and_envs_reach_the_container(capsys: Print) -> None:
    words = (
        "--PrefillWorker.ServiceArgs.workers=3",
        "--PrefillWorker.ServiceArgs.envs.DYN_LOG=info",
    )
    documents = render(capsys, "-f", DEMO, *words)
    assert components(documents)["prefill"]["replicas"] == 3
    assert env_of(documents, "prefill")["DYN_LOG"] == "info"


def test_a_changed_configuration_replaces_only_its_own_pods(capsys: Print) -> None:
    def annotations(*words: str) -> dict[str, Any]:
        found = components(render(capsys, "-f", DEMO, *words))
        return {kind: c["podTemplate"].get("metadata") for kind, c in found.items()}

    before, after = annotations(), annotations("--PrefillWorker.admission.batch_requests_max=3")
    assert before["prefill"] != after["prefill"]
    assert before["decode"] == after["decode"] is not None
    assert before["frontend"] is after["frontend"] is None


def test_models_come_from_the_claim_or_an_absolute_path(capsys: Print) -> None:
    for component in components(render(capsys, "-f", DEMO)).values():
        assert component["podTemplate"]["spec"]["volumes"][-1]["persistentVolumeClaim"] == {
            "claimName": "models",
            "readOnly": True,
        }
    text = refusal(capsys, "-f", DEMO, claim="")
    assert "Worker.model.path (~/.cache/wavepp/smollm2-135m-instruct)" in text
    assert "--model-claim" in text
    documents = render(capsys, "-f", DEMO, "--Common.model.path=/opt/m", claim="")
    settings = json.loads(of_kind(documents, "ConfigMap")["data"]["PrefillWorker.json"])
    assert settings["model"] == {"path": "/opt/m"}
    assert "volumes" not in components(documents)["frontend"]["podTemplate"]["spec"]


def test_planes_follow_the_configuration(capsys: Print) -> None:
    graph = of_kind(render(capsys, "-f", DEMO), "DynamoGraphDeployment")
    assert "annotations" not in graph["metadata"]
    documents = render(capsys, "-f", DEMO, "-f", OVERLAY)
    graph = of_kind(documents, "DynamoGraphDeployment")
    assert graph["metadata"]["annotations"] == {"nvidia.com/dynamo-discovery-backend": "etcd"}
    env = env_of(documents, "prefill")
    assert env["ETCD_ENDPOINTS"] == "http://127.0.0.1:2379"
    assert (env["DYN_REQUEST_PLANE"], env["DYN_EVENT_PLANE"]) == ("nats", "nats")


def test_our_monitor_replaces_the_platforms(capsys: Print) -> None:
    documents = render(capsys, "-f", DEMO, "--pod-monitor", "--name", "disagg")
    graph, monitor = of_kind(documents, "DynamoGraphDeployment"), of_kind(documents, "PodMonitor")
    assert graph["metadata"]["annotations"] == {"nvidia.com/enable-metrics": "false"}
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "nvidia.com/dynamo-graph-deployment-name": graph["metadata"]["name"]
    }


# ── refusals, the folder ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--nodes", "2"), "--nodes 2: a prefill worker over several pods is not supported yet"),
        (
            (
                "--PrefillWorker.cluster.first_host_stages=1",
                "--PrefillWorker.cluster.group=g",
                "--PrefillWorker.cluster.join_port=7000",
            ),
            "cluster.first_host_stages: a prefill worker over several pods is not supported",
        ),
        (("--name", "Wave"), '--name "Wave": at most 30 of a-z'),
        (("--name", "a" * 31), "at most 30"),
        (("--PrefillWorker.cache.block_token=1",), 'did you mean "block_tokens"?'),
        (("--PrefillWorker.ServiceArgs.envs.DYN_NAMESPACE=x",), "envs.DYN_NAMESPACE: Dynamo's"),
        (("-f", "nowhere.yaml"), "nowhere.yaml"),
        (("--dashboard", "nowhere.json"), "--dashboard nowhere.json"),
        (("-o", "/dev/null/x"), "-o /dev/null/x: Not a directory"),
    ],
)
def test_refusals_name_their_cause(capsys: Print, words: tuple[str, ...], expected: str) -> None:
    assert expected in refusal(capsys, "-f", DEMO, *words)


def test_a_mistake_in_a_file_is_told_with_its_line(capsys: Print, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("PrefillWorker:\n  cluster:\n    stages: many\n")
    assert f"{file}:3: PrefillWorker.cluster.stages" in refusal(capsys, "-f", DEMO, "-f", str(file))


def test_an_unknown_graph_is_refused(capsys: Print) -> None:
    assert main(["render", "graphs.nothing", "--kubernetes", "--image", IMAGE]) == 2
    assert "graphs.nothing: no such module" in capsys.readouterr().err


def test_a_component_that_knows_no_cluster_is_refused() -> None:
    class Nothing(msgspec.Struct):
        """No settings."""

    lonely = Component(
        name="Lonely", does="x", config_type=Nothing, module="x", arguments=lambda _s, _f: ()
    )
    graph = Graph(
        spec="x", components=(lonely,), section_names=("Lonely",), relate=lambda _s, _a: None
    )
    deployment = deploy(graph, parse_source("Lonely: {}", "x.yaml"))
    with pytest.raises(ConfigError, match="Lonely: does not say how it runs in a cluster"):
        manifests(deployment, Choices(image=IMAGE))


def command_of(folder: Path) -> list[str]:
    """Return the command that an example's page names."""
    lines = (folder / "README.md").read_text().splitlines()
    return shlex.split(next(line for line in lines if line.startswith("wavepp render")))[1:]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_examples_are_what_their_command_writes(
    folder: Path, tmp_path: Path, capsys: Print, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = command_of(folder)
    assert words[-2:] == ["-o", str(folder.relative_to(ROOT))]
    assert main([*words[:-1], str(tmp_path)]) == 0
    capsys.readouterr()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_text() for path in folder.glob("*.yaml")}
    assert written == shipped
    resources = yaml.safe_load(shipped[KUSTOMIZATION])["resources"]
    assert {*resources, KUSTOMIZATION} == set(shipped)
    for name in resources:
        assert complaints(yaml.safe_load(shipped[name])) == []


def test_there_are_examples() -> None:
    assert [folder.name for folder in EXAMPLES] == ["smollm2-cpu", "smollm2-two-gpus"]


def test_the_code_that_renders_is_pure() -> None:
    nodes = list(ast.walk(ast.parse((ROOT / "graphs" / "kubernetes.py").read_text())))
    found = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    found |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert not found & {"os", "pathlib", "time", "socket", "subprocess", "yaml", "random"}
