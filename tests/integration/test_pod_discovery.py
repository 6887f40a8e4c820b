"""A prefill worker under Kubernetes discovery: its pod is one instance, its ranks are none."""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
import pytest

from tests.integration.deployment import deployment, free_port, prefill_config, wait_until
from tests.integration.fake_kubernetes import fake_kubernetes
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

POD, UID, NAMESPACE = "wavepp-prefill-0", "uid-of-the-pod", "inference"


def test_a_pod_registers_once_and_leaves_in_order(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "llama", seed=5)
    port = free_port()
    with fake_kubernetes(NAMESPACE) as api, deployment(tmp_path) as deploy:
        worker = deploy.prefill(
            prefill_config(tmp_path / "model", 2),
            DYN_DISCOVERY_BACKEND="kubernetes",
            DYN_NAMESPACE=f"{NAMESPACE}-wavepp",
            DYN_SYSTEM_PORT=str(port),
            KUBECONFIG=str(api.kubeconfig(tmp_path / "kubeconfig")),
            POD_NAME=POD,
            POD_NAMESPACE=NAMESPACE,
            POD_UID=UID,
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
