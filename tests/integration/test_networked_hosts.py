"""A worker of three stages on three hosts, each its own network namespace; services on a fourth.

The worker's sockets, etcd, NATS and the hand-off to decode cross a real (virtual) network, whose
links are cut and healed here.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deployment import (
    Deployment,
    Process,
    decode_config,
    deployment,
    is_alive,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.integration.network import Network, network
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.integration.test_services import listens
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl, pytest.mark.services, pytest.mark.slow]

STAGES, SERVICES = 3, 4  # host 4 runs etcd, NATS and decode
ETCD, NATS, JOIN = 2379, 4222, 7100  # each host has all ports to itself
LOST_S = 5.0  # within which a cut is noticed, and after that all processes have ended


class Cluster:
    """Processes on the hosts of a network."""

    def __init__(self, net: Network, deploy: Deployment, folder: Path) -> None:
        self.net, self.deploy, self.lives = net, deploy, 0
        self.model = folder / "model"
        make_tiny_model(self.model, "llama", seed=STAGES)
        self.hosts: dict[int, Process] = {}

    def start(self) -> None:
        """Start one life of the worker, a stage on each host."""
        self.lives += 1
        for host in range(1, STAGES + 1):
            self.hosts[host] = self._start(host)
        self.wait_for("ready: worker=")

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        def is_there() -> bool:
            self.deploy.check_alive()
            return text in self.hosts[1].log.read_text()

        wait_until(is_there, timeout_s, text)

    def family(self) -> dict[int, list[int]]:
        """Return all pids of the worker by host."""
        return {host: [p.pid, *p.children()] for host, p in self.hosts.items()}

    def until_ended(self, pids: list[int], within_s: float) -> float:
        """Return how long it took until all of `pids` ended."""
        began = time.monotonic()
        wait_until(lambda: not [pid for pid in pids if is_alive(pid)], within_s, "no process left")
        return time.monotonic() - began

    def forget(self) -> None:
        """Take the worker's processes, which have ended, off the deployment's list."""
        for process in self.hosts.values():
            assert process.popen.poll() is not None, process.name
            self.deploy.processes.remove(process)

    def _start(self, host: int) -> Process:
        config: dict[str, Any] = prefill_config(
            self.model, STAGES,
            cluster={"first_host_stages": 1, "group": "spread", "join_port": JOIN,
                     "host": self.net.address(host)},
        )  # fmt: skip
        name = f"host{host}-{self.lives}"
        path = self.deploy.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        folder = self.deploy.folder / name
        folder.mkdir()
        if host == 1:
            command = ["components.prefill_worker", "--config", str(path)]
        else:
            command = ["wavepp_worker", "rank", "-f", str(path), "--ranks", str(host - 1),
                       "--leader", f"{self.net.address(1)}:{JOIN}"]  # fmt: skip
        return self.deploy.start_inside(self.net.inside(host), name, *command, TMPDIR=str(folder))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield three hosts with nothing on them, and a fourth with etcd, NATS and decode."""
    if not (shutil.which("etcd") and shutil.which("nats-server")):
        pytest.skip("etcd and nats-server are not installed; `make test` installs them as root")
    with network(SERVICES) as net:
        at = net.address(SERVICES)
        etcd = f"http://{at}:{ETCD}"
        commands = (
            ("etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", etcd,
             "--advertise-client-urls", etcd),
            ("nats-server", "-a", at, "-p", str(NATS), "-js", "-sd", str(tmp_path / "nats")),
        )  # fmt: skip
        with (tmp_path / "services.log").open("wb") as log:
            services = [
                subprocess.Popen((*net.inside(SERVICES), *c), stdout=log, stderr=subprocess.STDOUT)
                for c in commands
            ]
            try:
                wait_until(lambda: listens(ETCD, at) and listens(NATS, at), 20, "services listen")
                planes = {
                    "DYN_DISCOVERY_BACKEND": "etcd", "DYN_REQUEST_PLANE": "nats",
                    "DYN_EVENT_PLANE": "nats", "ETCD_ENDPOINTS": etcd,
                    "NATS_SERVER": f"nats://{at}:{NATS}",
                    "UCX_TLS": "tcp,self",  # hosts share no memory, though namespaces would
                }  # fmt: skip
                with deployment(tmp_path, **planes) as deploy:
                    cluster = Cluster(net, deploy, tmp_path)
                    path = deploy.folder / "decode.json"
                    path.write_text(json.dumps(decode_config(cluster.model)))
                    deploy.start_inside(
                        net.inside(SERVICES), "decode",
                        "components.decode_worker", "--config", str(path),
                    )  # fmt: skip
                    yield cluster
            finally:
                for service in services:
                    service.terminate()
                for service in services:
                    service.wait(10)


async def answers(cluster: Cluster, seed: int) -> None:
    """Fail unless the worker answers as transformers do."""
    model = reference(cluster.model)
    async with pipeline(cluster.deploy) as pipe:
        for length in (33, 150):
            prompt = prompt_of(length, seed=seed)
            assert (await pipe.generate(prompt, 4))[0] == greedy(model, prompt, 4)


@pytest.mark.parametrize("victim", [1, 3])
async def test_a_cut_link_ends_the_worker_and_a_new_life_answers(
    cluster: Cluster, victim: int
) -> None:
    """FS-08 over a network: no process of the old life is left when the new one starts."""
    cluster.start()
    await answers(cluster, seed=1)
    pids = [pid for host in cluster.family().values() for pid in host]
    began = time.monotonic()
    cluster.net.cut(victim)
    witness = cluster.hosts[1 if victim != 1 else 2]
    wait_until(lambda: "was lost: " in witness.log.read_text(), LOST_S, "the cut is noticed")
    noticed_s = time.monotonic() - began
    ended_s = noticed_s + cluster.until_ended(pids, LOST_S)  # the host cut off ends by itself
    print(f"host {victim} cut: noticed after {noticed_s:.2f} s, all ended after {ended_s:.2f} s")
    for process in cluster.hosts.values():
        assert process.popen.wait(5) == 1, process.tail()
    cluster.forget()
    cluster.net.heal(victim)
    old = cluster.hosts[1].log.read_text().split("ranks started: epoch=")[1].split()[0]
    cluster.start()
    assert f"ranks started: epoch={old} " not in cluster.hosts[1].log.read_text()
    await answers_of_the_new_life(cluster)


async def answers_of_the_new_life(cluster: Cluster) -> None:
    """Wait until discovery forgot the old life, then compare answers."""
    async with pipeline(cluster.deploy) as pipe:
        deadline = time.monotonic() + 20
        while len(pipe.prefill_ids()) != 1:
            assert time.monotonic() < deadline, pipe.prefill_ids()
            await asyncio.sleep(0.2)
    await answers(cluster, seed=3)
