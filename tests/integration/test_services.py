"""The same deployment on etcd and NATS instead of files, TCP and ZeroMQ."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.deployment import (
    decode_config,
    deployment,
    free_port,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl, pytest.mark.services]


def listens(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


@pytest.fixture
def services(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start etcd and NATS on free ports; yield the DYN_* settings that use them."""
    if not (shutil.which("etcd") and shutil.which("nats-server")):
        pytest.skip("etcd and nats-server are not installed; `make test` installs them as root")
    client, peer, nats = free_port(), free_port(), free_port()
    commands = [
        ["etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", f"http://127.0.0.1:{client}",
         "--advertise-client-urls", f"http://127.0.0.1:{client}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
         "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}", "--initial-cluster", f"default=http://127.0.0.1:{peer}"],
        ["nats-server", "-a", "127.0.0.1", "-p", str(nats), "-js", "-sd", str(tmp_path / "nats")],
    ]  # fmt: skip
    log = (tmp_path / "services.log").open("wb")
    processes = [subprocess.Popen(c, stdout=log, stderr=subprocess.STDOUT) for c in commands]
    try:
        wait_until(lambda: listens(client) and listens(nats), 20, "etcd and NATS listen")
        yield {
            "DYN_DISCOVERY_BACKEND": "etcd",
            "DYN_REQUEST_PLANE": "nats",
            "DYN_EVENT_PLANE": "nats",
            "ETCD_ENDPOINTS": f"http://127.0.0.1:{client}",
            "NATS_SERVER": f"nats://127.0.0.1:{nats}",
        }
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)
        log.close()


async def test_the_same_answers_on_etcd_and_nats(tmp_path: Path, services: dict[str, str]) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder, "qwen3", seed=2)
    prompt = prompt_of(90, seed=4)
    want = greedy(reference(folder), prompt, 6)
    with deployment(tmp_path, **services) as deploy:
        deploy.prefill(prefill_config(folder, 2))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            assert await pipe.generate(prompt, 6) == (want, 0)
            assert await pipe.generate(prompt, 6) == (want, 80)


async def test_rounds_over_dynamo_endpoints(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(folder, "llama", seed=2)
    prompt = prompt_of(90, seed=5)
    want = greedy(reference(folder), prompt, 6)
    with deployment(tmp_path) as deploy:
        deploy.prefill(prefill_config(folder, 3, transport={"rounds": "dynamo"}))
        deploy.decode(decode_config(folder))
        async with pipeline(deploy) as pipe:
            assert await pipe.generate(prompt, 6) == (want, 0)
            assert await pipe.generate(prompt, 6) == (want, 80)
