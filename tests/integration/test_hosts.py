"""One worker on two hosts: two addresses of this machine, separate process trees and folders."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deployment import (
    Deployment,
    Process,
    decode_config,
    deployment,
    free_port,
    is_alive,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.integration.test_greedy import greedy, prompt_of, reference
from tests.numerics.tiny import make_tiny_model

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

LOST_S = 5.0  # within which a lost host must have ended the worker everywhere


class Hosts:
    """The first host at 127.0.0.1 and others at 127.0.0.2."""

    def __init__(self, deploy: Deployment, folder: Path, stages: int, first: int) -> None:
        self.deploy, self.port = deploy, free_port()
        self.model = folder / "model"
        make_tiny_model(self.model, "llama", seed=stages)
        cluster = {"first_host_stages": first, "group": "spread", "join_port": self.port}
        self.config = prefill_config(self.model, stages, cluster=cluster)
        self.first: Process | None = None
        self.others = 0

    def start_first(self) -> Process:
        self.first = self.deploy.prefill(self.config, **self._folder("first"))
        return self.first

    def start_other(self, ranks: str, *args: str, **sections: dict[str, Any]) -> Process:
        self.others += 1
        name = f"other{self.others}"
        config = {**self.config}
        for section, values in {"cluster": {}, **sections}.items():
            config[section] = {**config.get(section, {}), **values}
        config["cluster"]["host"] = "127.0.0.2"
        path = self.deploy.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        leader = f"127.0.0.1:{self.port}"
        return self.deploy.start(
            name, "wavepp_worker", "rank", "-f", str(path), "--ranks", ranks,
            "--leader", leader, *args, **self._folder(name),
        )  # fmt: skip

    def until_ready(self) -> None:
        assert self.first is not None
        first = self.first

        def is_ready() -> bool:
            self.deploy.check_alive()
            return "ready: worker=" in first.log.read_text()

        wait_until(is_ready, 60, "the worker is ready")

    def run_folders(self) -> list[Path]:
        return list(self.deploy.folder.glob("*/wavepp-run-*"))

    def _folder(self, name: str) -> dict[str, str]:
        folder = self.deploy.folder / name
        folder.mkdir()
        return {"TMPDIR": str(folder)}


def ended(process: Process, within_s: float) -> int:
    return process.popen.wait(within_s)


@pytest.mark.parametrize(("stages", "first"), [(2, 1), (3, 2)])
async def test_two_hosts_answer_as_transformers_and_end_in_order(
    tmp_path: Path, stages: int, first: int
) -> None:
    with deployment(tmp_path) as deploy:
        hosts = Hosts(deploy, tmp_path, stages, first)
        model = reference(hosts.model)
        other = hosts.start_other(str(first))  # before the first host: it waits
        leader = hosts.start_first()
        decode = deploy.decode(decode_config(hosts.model))
        async with pipeline(deploy) as pipe:
            for length in (1, 33, 150):
                prompt = prompt_of(length, seed=1)
                want = greedy(model, prompt, 4)
                assert (await pipe.generate(prompt, 4))[0] == want
                assert (await pipe.generate(prompt, 4)) == (want, (length - 1) // 16 * 16)
        assert decode.stop() == 0
        family = [*leader.children(), *other.children()]
        assert len(other.children()) == 2 * (stages - first)
        os.kill(leader.pid, signal.SIGINT)
        assert ended(other, 15) == 0, other.tail()
        assert ended(leader, 15) == 0, leader.tail()
        assert "the worker ends" in other.log.read_text()
        assert not [pid for pid in family if is_alive(pid)]
        assert not hosts.run_folders()


def test_only_a_host_of_this_life_and_configuration_joins(tmp_path: Path) -> None:
    with deployment(tmp_path) as deploy:
        hosts = Hosts(deploy, tmp_path, 2, 1)
        leader = hosts.start_first()
        stale = hosts.start_other("1", "--epoch", "17")
        differs = hosts.start_other("1", planner={"wave_tokens_max": 128})
        stranger = hosts.start_other("1", "--group-id", "guess")
        for process in (stale, differs, stranger):
            assert ended(process, 30) == 2, process.tail()
            deploy.processes.remove(process)
        epoch = leader.log.read_text().split("ranks started: epoch=")[1].split()[0]
        assert f"epoch 17 is over: the first host runs epoch {epoch}" in stale.tail()
        assert "configurations differ: planner: " in differs.tail()
        assert "the group id is not this worker's" in stranger.tail()
        hosts.start_other("1", "--epoch", epoch)
        hosts.until_ready()
        late = hosts.start_other("1")
        assert ended(late, 30) == 2
        deploy.processes.remove(late)
        assert f"ranks [1] cannot join epoch {epoch}: it waits for ranks []" in late.tail()
        assert leader.popen.poll() is None


@pytest.mark.parametrize("victim", ["other", "first", "asked"])
def test_a_lost_host_ends_the_worker_everywhere(tmp_path: Path, victim: str) -> None:
    """FS-08: kill -9 of either supervisor, and a second host that is asked to stop."""
    with deployment(tmp_path) as deploy:
        hosts = Hosts(deploy, tmp_path, 2, 1)
        leader, other = hosts.start_first(), hosts.start_other("1")
        hosts.until_ready()
        family = [*leader.children(), *other.children()]
        killed, left = (leader, other) if victim == "first" else (other, leader)
        os.kill(killed.pid, signal.SIGINT if victim == "asked" else signal.SIGKILL)
        began = time.monotonic()
        assert ended(left, LOST_S) == 1, left.tail()
        wait_until(
            lambda: not [pid for pid in family if is_alive(pid)],
            LOST_S - (time.monotonic() - began),
            "no orphan",
        )
        text = left.log.read_text()
        if victim == "first":
            assert f"the first host 127.0.0.1:{hosts.port} was lost: its connection ended" in text
        elif victim == "other":
            assert "worker failed: host 127.0.0.2 (ranks 1) was lost: its connection ended" in text
        else:
            assert ended(killed, LOST_S) == 0
            assert "host 127.0.0.2 (ranks 1) was lost: it was asked to stop (SIGINT)" in text


def test_a_frozen_host_ends_the_worker(tmp_path: Path) -> None:
    with deployment(tmp_path) as deploy:
        hosts = Hosts(deploy, tmp_path, 2, 1)
        leader, other = hosts.start_first(), hosts.start_other("1")
        hosts.until_ready()
        began = time.monotonic()
        os.kill(other.pid, signal.SIGSTOP)
        try:
            lost = "worker failed: host 127.0.0.2 (ranks 1) was lost: it said nothing for 4 s"
            wait_until(lambda: lost in leader.log.read_text(), LOST_S, "the frozen host is lost")
            assert time.monotonic() - began > 2.5
            assert ended(leader, LOST_S) == 1
        finally:
            os.kill(other.pid, signal.SIGCONT)
        assert ended(other, LOST_S) == 1, other.tail()
