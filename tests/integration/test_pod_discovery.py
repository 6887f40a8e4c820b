"""Kubernetes discovery against a small API server: a pod is one instance, readiness gates routing.

The ranks of a worker must not appear: Dynamo knows one instance per pod, by the pod's name.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import httpx
import pytest

from tests.integration.deployment import (
    decode_config,
    deployment,
    free_port,
    prefill_config,
    wait_until,
)
from tests.integration.fake_kubernetes import FakeKubernetes, fake_kubernetes
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

POD, DECODE_POD, NAMESPACE = "wavepp-prefill-0", "wavepp-decode-0", "inference"


def pod_env(api: FakeKubernetes, folder: Path, name: str) -> dict[str, str]:
    """Return what the operator sets in a pod."""
    return {
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_NAMESPACE": f"{NAMESPACE}-wavepp",
        "KUBECONFIG": str(api.kubeconfig(folder / f"kubeconfig-{name}")),
        "POD_NAME": name,
        "POD_NAMESPACE": NAMESPACE,
        "POD_UID": f"uid-{name}",
    }


def test_a_pod_registers_once_and_leaves_in_order(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", seed=5)
    port = free_port()
    with fake_kubernetes(NAMESPACE) as api, deployment(tmp_path) as deploy:
        worker = deploy.prefill(
            prefill_config(tmp_path / "model", 2),
            DYN_SYSTEM_PORT=str(port),
            **pod_env(api, tmp_path, POD),
        )

        def is_healthy() -> bool:
            deploy.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
            return False

        wait_until(is_healthy, 90, "the worker is healthy")
        wait_until(lambda: api.endpoints(POD), 10, "the pod has announced its endpoint")
        keys = api.endpoints(POD)
        assert any(f"{NAMESPACE}-wavepp/prefill/generate/" in key for key in keys), keys
        assert not [key for key in keys if key.split("/")[2] == "rank"], keys
        assert set(api.applied) == {POD}

        worker.popen.terminate()
        wait_until(
            lambda: not [key for key in api.endpoints(POD) if "/generate/" in key],
            10,
            "the pod has taken its endpoint back",
        )
        assert worker.popen.wait(60) == 0


def test_a_graph_serves_once_its_pods_are_ready(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", seed=5)
    with fake_kubernetes(NAMESPACE) as api, deployment(tmp_path) as deploy:
        deploy.prefill(prefill_config(tmp_path / "model", 2), **pod_env(api, tmp_path, POD))
        deploy.decode(decode_config(tmp_path / "model"), **pod_env(api, tmp_path, DECODE_POD))
        deploy.http_port = free_port()
        deploy.start(
            "frontend", "dynamo.frontend", "--http-host", "127.0.0.1",
            "--http-port", str(deploy.http_port), "--router-mode", "kv",
            **pod_env(api, tmp_path, "wavepp-frontend-0"),
        )  # fmt: skip
        url = f"http://127.0.0.1:{deploy.http_port}/v1"

        def models() -> list[str] | None:
            deploy.check_alive()
            with contextlib.suppress(httpx.HTTPError):
                listed = httpx.get(f"{url}/models", timeout=2).json().get("data", [])
                return [entry["id"] for entry in listed]
            return None

        wait_until(lambda: api.endpoints(POD) and api.endpoints(DECODE_POD), 90, "both announced")
        wait_until(lambda: models() is not None, 60, "the frontend answers")
        time.sleep(2)  # four times as long as Dynamo collects changes
        assert models() == []  # announced, but not ready: not routed

        api.set_pod(DECODE_POD, f"uid-{DECODE_POD}", is_ready=True)
        api.set_pod(POD, f"uid-{POD}", is_ready=True)
        deploy.wait_for_model("tiny")
        body = {"model": "tiny", "prompt": "hello " * 20, "max_tokens": 3}
        reply = httpx.post(f"{url}/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 3

        api.set_pod(DECODE_POD, f"uid-{DECODE_POD}", is_ready=False)
        api.set_pod(POD, f"uid-{POD}", is_ready=False)
        wait_until(lambda: models() == [], 15, "pods that are not ready are not routed any more")
