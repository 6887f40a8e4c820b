"""Real LOOP processes over real sockets, driven by a scripted WAVE of each rank.

The first answer tokens are compared with transformers on the same seeded weights.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from transformers import LlamaConfig, LlamaForCausalLM

from wavepp_worker.config.derive import derive
from wavepp_worker.config.schema import Config
from wavepp_worker.model.load import DummySource
from wavepp_worker.model.spec import read_facts
from wavepp_worker.runtime.boot import Boot, loop_address, save_boot
from wavepp_worker.wire.mailbox import (
    FROM_LOOP,
    REPORTS,
    TO_LOOP,
    Alive,
    Drop,
    Fatal,
    Finished,
    Freed,
    Install,
    LoopInbound,
    LoopOutbound,
    LoopReady,
    LoopUp,
    Peers,
    Ready,
    ReportMessage,
    Shutdown,
    Stats,
    WaveDone,
    WindowReport,
)

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(170)]
B, M, SEED, LAYERS = 8, 32, 11, 4
START_S, ANSWER_S = 90.0, 30.0


def make_model(folder: Path) -> Path:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "max_position_embeddings": 512,
    }
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "float32", **shape}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference_answer(folder: Path, tokens: list[int]) -> tuple[int, float]:
    """What transformers says comes after `tokens`, with the same dummy weights."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    source = DummySource(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.get(name, tuple(parameter.shape)))
        scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    token = int(scores.argmax())
    return token, float(scores[token])


class Rank:
    """One LOOP process and the WAVE end of its mailbox."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], boot_path: Path, boot: Boot, rank: int
    ):
        self.rank = rank
        self.mailbox = context.socket(zmq.PAIR)
        self.mailbox.linger = 0
        self.mailbox.bind(loop_address(boot.run_dir, rank))
        command = [sys.executable, "-m", "wavepp_worker.runtime.loop_process"]
        command += ["--boot", str(boot_path), "--rank", str(rank)]
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.done: dict[int, int] = {}  # rid -> end position
        self.freed: list[int] = []

    def send(self, message: LoopInbound) -> None:
        self.mailbox.send(TO_LOOP.encode(message), zmq.DONTWAIT)

    def receive(self, timeout_s: float) -> LoopOutbound:
        assert self.mailbox.poll(int(timeout_s * 1e3)), f"rank {self.rank} says nothing"
        return FROM_LOOP.decode(self.mailbox.recv())

    def drain(self) -> None:
        while self.mailbox.poll(0):
            match FROM_LOOP.decode(self.mailbox.recv()):
                case WaveDone(ends=ends):
                    for rid, end in ends:
                        assert rid not in self.freed
                        assert end > self.done.get(rid, 0)
                        self.done[rid] = end
                case Freed(rid=rid):
                    assert rid not in self.freed
                    self.freed.append(rid)
                case Alive():
                    pass
                case other:
                    pytest.fail(f"unexpected {other}")


class Worker:
    """All LOOP processes of a worker, with serving's and every WAVE's end of their sockets."""

    def __init__(self, tmp: Path, stages: int, overrides: dict[str, object] | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.model = tmp / "model" if (tmp / "model").exists() else make_model(tmp / "model")
        tree: dict[str, object] = {
            "model": {"path": str(self.model), "load_format": "dummy", "seed": SEED},
            "cluster": {"stages": stages, "devices": ["cpu"] * stages},
            "cache": {"block_tokens": B, "device_tokens": 64 * B},
            "planner": {"wave_tokens_max": M},
            "transfer": {"hold_s": 1.0},
            "obs": {"stats_interval_s": 0.05},
        }
        for section, values in (overrides or {}).items():
            tree[section] = {**tree.get(section, {}), **values}  # type: ignore[dict-item]
        config = msgspec.convert(tree, Config)
        facts = read_facts(self.model, load_format="dummy", seed=SEED)
        self.reports = self.context.socket(zmq.PULL)
        port = self.reports.bind_to_random_port("tcp://127.0.0.1")
        boot = Boot(
            config=config,
            plan=derive(config, facts),
            facts=facts,
            epoch=3,
            group="test",
            run_dir=str(tmp),
            report_address=f"tcp://127.0.0.1:{port}",
            namespace="test",
            parent_pid=os.getpid(),
        )
        save_boot(boot, tmp / "boot.json")
        self.ranks = [Rank(self.context, tmp / "boot.json", boot, s) for s in range(stages)]
        self.ino = 0
        self.finished: dict[int, Finished] = {}
        self.ready: dict[int, dict[int, Ready]] = {}
        self.stats: dict[int, dict[str, float]] = {}
        self.fatal: list[Fatal] = []

    def start(self) -> None:
        ups = []
        for rank in self.ranks:
            up = rank.receive(START_S)
            assert isinstance(up, LoopUp)
            ups.append(up)
        peers = Peers(tuple(up.wave_address for up in ups), ups[0].store_address)
        for rank in self.ranks:
            rank.send(peers)
        for rank in self.ranks:
            assert rank.receive(START_S) == LoopReady((WindowReport("attention", 64),))

    def install(self, rid: int, tokens: list[int], table: list[int], endpoint: int = 0) -> int:
        """Admit a request on every rank; return its ino."""
        self.install_first(rid, tokens, table, endpoint)
        self.install_rest(rid, tokens, table, endpoint)
        return self.ino

    def install_first(self, rid: int, tokens: list[int], table: list[int], endpoint: int) -> None:
        """Admit on rank 0 only: its schedule overtakes the other ranks' Installs."""
        self.ino += 1
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        install = Install(self.ino, rid, len(tokens), endpoint, (tuple(table),), tokens=packed)
        self.ranks[0].send(install)

    def install_rest(self, rid: int, tokens: list[int], table: list[int], endpoint: int) -> None:
        for rank in self.ranks[1:]:
            rank.send(Install(self.ino, rid, len(tokens), endpoint, (tuple(table),)))

    def take(self) -> None:
        while self.reports.poll(0):
            self._take(REPORTS.decode(self.reports.recv()))
        for rank in self.ranks:
            rank.drain()

    def _take(self, report: ReportMessage) -> None:
        match report:
            case Finished():
                assert report.rid not in self.finished
                self.finished[report.rid] = report
            case Ready():
                self.ready.setdefault(report.rid, {})[report.rank] = report
            case Stats():
                self.stats[report.rank] = report.values
            case Fatal():
                self.fatal.append(report)
            case other:
                pytest.fail(f"unexpected {other}")

    def await_(self, what: str, condition: object, timeout_s: float = ANSWER_S) -> None:
        deadline = time.monotonic() + timeout_s
        poller = zmq.Poller()
        for source in (self.reports, *(rank.mailbox for rank in self.ranks)):
            poller.register(source, zmq.POLLIN)
        while True:
            self.take()
            if condition():  # type: ignore[operator]
                return
            assert not self.fatal, self.fatal
            assert time.monotonic() < deadline, f"{what} did not happen"
            poller.poll(100)

    def is_complete(self, rid: int) -> bool:
        return rid in self.finished and len(self.ready.get(rid, {})) == len(self.ranks)

    def is_freed(self, rid: int) -> bool:
        return all(rid in rank.freed for rank in self.ranks)

    def stop(self) -> None:
        for rank in self.ranks:
            rank.send(Shutdown("test"))
        assert [rank.process.wait(20) for rank in self.ranks] == [0] * len(self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.process.wait(10)
        self.context.destroy(linger=0)


@pytest.fixture
def open_worker(tmp_path: Path) -> Iterator[object]:
    workers: list[Worker] = []

    def build(stages: int, **overrides: object) -> Worker:
        workers.append(Worker(tmp_path, stages, overrides))
        return workers[-1]

    yield build
    for worker in workers:
        worker.close()


def prompt(length: int, salt: int) -> list[int]:
    return [(31 * index + 17 * salt + index * index) % 257 for index in range(length)]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_first_tokens_equal_transformers(open_worker, stages: int) -> None:  # type: ignore[no-untyped-def]
    worker = open_worker(stages)
    worker.start()
    long, short = prompt(75, 1), prompt(13, 2)
    reusing = long[:64] + prompt(9, 3)
    tables = {1: list(range(10)), 2: [20, 30], 3: [*range(8), 40, 41]}
    worker.install(1, long, tables[1])  # three waves: 32 + 32 + 11
    worker.install(2, short, tables[2])
    worker.await_("the cold prompts", lambda: worker.is_complete(1) and worker.is_complete(2))
    worker.install_first(3, reusing, tables[3], 64)
    worker.await_("rank 0's part", lambda: 3 in worker.ranks[0].done)
    worker.install_rest(3, reusing, tables[3], 64)
    worker.await_("the reusing prompt", lambda: worker.is_complete(3))
    for rid, tokens in ((1, long), (2, short), (3, reusing)):
        token, logprob = reference_answer(worker.model, tokens)
        answer = worker.finished[rid]
        assert (answer.token, answer.endpoint) == (token, 64 if rid == 3 else 0)
        assert answer.logprob == pytest.approx(logprob, abs=1e-3)
        for rank in worker.ranks:
            assert rank.done[rid] == len(tokens)
        layers = [worker.ready[rid][s].handoff.layers for s in range(stages)]
        assert [first for first, _ in layers] == [0, *(stop for _, stop in layers[:-1])]
        assert layers[-1][1] == LAYERS
    holds = {worker.ready[rid][s].handoff.hold for rid in (1, 2, 3) for s in range(stages)}
    assert len(holds) == 3 * stages
    # Nobody reads: every hold ends at its deadline.
    worker.await_("the end of the holds", lambda: all(map(worker.is_freed, (1, 2, 3))))
    computed = len(long) + len(short) + len(reusing) - 64
    worker.await_(
        "the last counters",
        lambda: all(
            worker.stats.get(s, {}).get("wavepp_tokens_computed_total") == computed
            and worker.stats[s]["wavepp_installed_requests"] == 0
            for s in range(stages)
        ),
    )
    assert worker.stats[0]["wavepp_ring_waves"] == 0
    assert all(worker.stats[s]["wavepp_forward_seconds_total"] > 0 for s in range(stages))
    worker.stop()


def test_cancelled_requests_are_freed_everywhere(open_worker) -> None:  # type: ignore[no-untyped-def]
    worker = open_worker(2, transfer={"hold_s": 1000.0})
    worker.start()
    running, held = prompt(400, 4), prompt(20, 5)
    ino = worker.install(1, running, list(range(50)))
    worker.ranks[0].send(Drop(1, ino))
    ino = worker.install(2, held, [60, 61, 62])
    worker.await_("the hold", lambda: worker.is_complete(2))
    worker.ranks[0].send(Drop(2, ino))
    worker.await_("both freed", lambda: worker.is_freed(1) and worker.is_freed(2))
    assert 1 not in worker.finished
    assert all(rank.done.get(1, 0) < 400 for rank in worker.ranks)
    worker.stop()


def test_an_install_out_of_order_ends_the_process_with_a_report(open_worker) -> None:  # type: ignore[no-untyped-def]
    worker = open_worker(1)
    worker.start()
    worker.ino = 4
    worker.install(1, prompt(8, 1), [0])
    assert worker.ranks[0].process.wait(30) == 1
    worker.take()
    (fatal,) = worker.fatal
    assert (fatal.rank, fatal.role) == (0, "loop")
    assert "InvariantError: Installs come in order" in fatal.text


def test_a_failed_start_is_reported_in_plain_words(open_worker) -> None:  # type: ignore[no-untyped-def]
    worker = open_worker(1, cache={"device_tokens": 8 << 44})
    up = worker.ranks[0].receive(START_S)
    worker.ranks[0].send(Peers((up.wave_address,), ""))
    assert worker.ranks[0].process.wait(START_S) == 1
    worker.take()
    (fatal,) = worker.fatal
    assert fatal.text.startswith("stage 0: out of memory on cpu while allocating a cache of ")


def test_shutdown_before_the_peers_are_known(open_worker) -> None:  # type: ignore[no-untyped-def]
    worker = open_worker(1)
    worker.ranks[0].receive(START_S)
    worker.ranks[0].send(Shutdown("early"))
    assert worker.ranks[0].process.wait(30) == 0
