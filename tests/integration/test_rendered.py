"""What `wavepp render` prints, run as a kubelet would: command, settings, environment, probes, end.

Only the cluster is missing: pods are processes, their addresses are loopback ones, discovery is by
files, and the frontend listens on a free port.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
import yaml

from tests.integration.deployment import (
    Deployment,
    Process,
    deployment,
    free_port,
    is_alive,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model
from wavepp_worker.cli import main

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

NAMESPACE, SUFFIX = "inference-wavepp", "5f3a"
POD_IP = "127.0.0.2"
GRAPH_FILE = """
Common: {{model: {{path: {model}, dtype: float32}}}}
PrefillWorker:
  common-configs: [model]
  cluster: {{stages: 2, devices: [cpu, cpu]}}
  cache: {{block_tokens: 16, device_tokens: 2048}}
  planner: {{wave_tokens_max: 64}}
  serving: {{served_model_name: tiny}}
DecodeWorker:
  common-configs: [model]
  device: cpu
  block_tokens: 16
  served_model_name: tiny
"""


class Pods:
    """The pods of a rendered folder, as processes."""

    def __init__(self, deploy: Deployment, folder: Path) -> None:
        self._deploy, self._folder = deploy, folder
        graph = yaml.safe_load((folder / "graph.yaml").read_text())
        self.shared = graph["spec"]["env"]
        self.components = {c["type"]: c for c in graph["spec"]["components"]}
        self.ports = {kind: free_port() for kind in self.components}
        for name, text in yaml.safe_load((folder / "config.yaml").read_text())["data"].items():
            (folder / name).write_text(text)

    def container(self, kind: str) -> dict[str, Any]:
        (only,) = self.components[kind]["podTemplate"]["spec"]["containers"]
        return dict(only)

    def start(self, kind: str) -> Process:
        container = self.container(kind)
        python, flag, module = container["command"]
        assert (python, flag) == ("python3", "-m")
        env = {
            item["name"]: item.get("value", POD_IP) for item in (*self.shared, *container["env"])
        }
        words = [
            word.replace("$(POD_IP)", env.get("POD_IP", "$(POD_IP)"))
            .replace("/etc/wavepp", str(self._folder))
            .replace("8000", str(self.ports["frontend"]))
            for word in container["args"]
        ]
        return self._deploy.start(kind, module, *words, **self._operator_env(kind), **env)

    def _operator_env(self, kind: str) -> dict[str, str]:
        if kind == "frontend":
            return {"DYN_NAMESPACE_PREFIX": NAMESPACE, "DYN_NAMESPACE": NAMESPACE}
        return {
            "DYN_NAMESPACE": NAMESPACE,
            "DYN_NAMESPACE_WORKER_SUFFIX": SUFFIX,
            "DYN_COMPONENT": kind,
            "DYN_SYSTEM_ENABLED": "true",
            "DYN_SYSTEM_PORT": str(self.ports[kind]),
            "DYN_HEALTH_CHECK_ENABLED": "false",
            "DYN_FORWARDPASS_METRIC_PORT": "20380",
            "NIXL_TELEMETRY_ENABLE": "n",
        }

    def passes(self, kind: str, probe: str) -> bool:
        action = self.container(kind)[probe]["httpGet"]
        assert action["port"] == "system"
        with contextlib.suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{self.ports[kind]}{action['path']}"
            return httpx.get(url, timeout=self.container(kind)[probe]["timeoutSeconds"]).is_success
        return False


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pods, Deployment]]:
    folder = tmp_path_factory.mktemp("rendered")
    make_tiny_model(folder / "model", "llama", seed=5)
    file = folder / "graph-file.yaml"
    file.write_text(GRAPH_FILE.format(model=folder / "model"))
    words = ["graphs.disagg", "-f", str(file), "--kubernetes", "--image", "i:1.0.0"]
    assert main(["render", *words, "-o", str(folder)]) == 0
    with deployment(folder) as deploy:
        found = Pods(deploy, folder)
        for kind in ("decode", "prefill", "frontend"):
            found.start(kind)
        deploy.http_port = found.ports["frontend"]
        deploy.wait_for_model("tiny")
        yield found, deploy


def test_the_graph_answers_over_the_pods_address(pods: tuple[Pods, Deployment]) -> None:
    _found, deploy = pods
    body = {"model": "tiny", "prompt": "hello " * 40, "max_tokens": 4}
    url = f"http://127.0.0.1:{deploy.http_port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 4
    # Hand-offs are fetched at the pod's address, not at a loopback one that decode cannot reach.
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1].partition(":")[0] for row in rows if row[3] == "0A"}
    assert "0200007F" in listening


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_worker_passes_its_probes(pods: tuple[Pods, Deployment], kind: str) -> None:
    found, _deploy = pods
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert found.passes(kind, probe), probe


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_worker_registers_and_is_scraped_by_its_rendered_name(
    pods: tuple[Pods, Deployment], kind: str
) -> None:
    found, deploy = pods
    name = found.components[kind]["name"]
    stored = [unquote(str(path)) for path in Path(deploy.env["DYN_FILE_KV"]).rglob("*")]
    where = f"namespace/{NAMESPACE}-{SUFFIX}/component/{name}/endpoint/generate"
    plain = f"{NAMESPACE}-{SUFFIX}/{name}/generate"
    assert any(where in path or plain in path for path in stored), stored
    page = httpx.get(f"http://127.0.0.1:{found.ports[kind]}/metrics", timeout=5).text
    assert f'dynamo_component="{name}"' in page
    assert "wavepp_" in page or kind == "decode"


def test_a_pods_end_takes_less_than_its_grace_period(pods: tuple[Pods, Deployment]) -> None:
    found, deploy = pods
    worker = next(process for process in deploy.processes if process.name == "prefill")
    family = worker.children()
    assert len(family) == 4
    template = found.components["prefill"]["podTemplate"]["spec"]
    begun = time.monotonic()
    worker.popen.terminate()
    wait_until(lambda: not found.passes("prefill", "readinessProbe"), 5, "it is not ready any more")
    assert worker.popen.wait(60) == 0
    assert time.monotonic() - begun < min(30, template["terminationGracePeriodSeconds"])
    assert not [pid for pid in family if is_alive(pid)]
