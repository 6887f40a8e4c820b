"""Who is let in by the first host, and how a lost host shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.config.derive import ModelFacts, derive
from wavepp_worker.config.schema import ClusterConfig, Config, ModelConfig, PlannerConfig
from wavepp_worker.runtime.host_door import HostDoor
from wavepp_worker.runtime.host_line import HostLine, differences, shared_digests
from wavepp_worker.serving.rank_command import read_address, read_ranks
from wavepp_worker.wire.hosts import LINE_BYTES_MAX, End, Join, Lost, Refused, Welcome

FACTS = ModelFacts(
    family="llama",
    layers=6,
    hidden=64,
    vocab=1000,
    context_tokens=4096,
    kv_heads=2,
    head_dim=16,
    dtype="float32",
    dtype_bytes=4,
    fingerprint="f",
)
DIGESTS = {"planner": "aa", "version": "1"}
WELCOME = Welcome(epoch=7, namespace="n", report_address="tcp://127.0.0.1:1")


def make_join(**changes: Any) -> Join:
    join = Join(group="g", epoch=0, ranks=(2,), host="127.0.0.2", digests=DIGESTS)
    return msgspec.structs.replace(join, **changes)


class Desk:
    """An open door and what it told."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.door = HostDoor(WELCOME, "g", DIGESTS, {1, 2}, self.lost.set_result)

    async def connect(self) -> tuple[HostLine, asyncio.StreamWriter]:
        assert self.door._server is not None
        port = self.door._server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        return HostLine(reader, writer), writer

    async def until_lost(self) -> str:
        return await asyncio.wait_for(self.lost, 5)


@asynccontextmanager
async def opened() -> AsyncIterator[Desk]:
    desk = Desk()
    await desk.door.open("127.0.0.1", 0)
    try:
        yield desk
    finally:
        await desk.door.close(0.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": "other"}, "the group id is not this worker's"),
        ({"epoch": 6}, "epoch 6 is over: the first host runs epoch 7"),
        ({"epoch": 8}, "epoch 8 is over: the first host runs epoch 7"),
        ({"digests": DIGESTS | {"planner": "bb"}}, "planner: aa on the first host, bb here"),
        ({"digests": {}}, "version: 1 on the first host, nothing here"),
        ({"ranks": (0,)}, "it waits for ranks [1, 2]"),
        ({"ranks": (1, 1)}, "ranks [1, 1] cannot join"),
        ({"ranks": ()}, "ranks [] cannot join"),
    ],
)
async def test_refusals_name_both_sides(changes: dict[str, Any], words: str) -> None:
    async with opened() as desk:
        line, _ = await desk.connect()
        line.send(make_join(**changes))
        answer = await line.receive()
        assert isinstance(answer, Refused)
        assert words in answer.reason
        line.close()
        assert not desk.lost.done()


async def test_a_host_joins_once_and_its_end_is_told() -> None:
    async with opened() as desk:
        line, _ = await desk.connect()
        line.send(make_join(epoch=7))
        assert await line.receive() == WELCOME
        again, _ = await desk.connect()
        again.send(make_join())
        assert "it waits for ranks [1]" in str(await again.receive())
        line.send(Lost("no power"))
        assert await desk.until_lost() == "host 127.0.0.2 (ranks 2) was lost: no power"
        line.close()
        again.close()


async def test_an_ordered_end_is_told_and_is_no_loss() -> None:
    async with opened() as desk:
        line, _ = await desk.connect()
        line.send(make_join())
        assert await line.receive() == WELCOME
        desk.door.end("done", failed=False)
        assert await line.receive() == End("done", failed=False)
        line.close()
        await desk.door.close(5.0)
        assert not desk.lost.done()


@pytest.mark.parametrize(
    "noise", [b"\n", b"\xff\xfe\n", b'{"type":"join"}\n', b"[" * 5000 + b"\n", b"x" * 99_999]
)
async def test_noise_is_dropped_and_the_door_stays_open(noise: bytes) -> None:
    async with opened() as desk:
        _, writer = await desk.connect()
        writer.write(noise)
        line, _ = await desk.connect()
        line.send(make_join())
        assert await line.receive() == WELCOME
        line.close()
        writer.close()


async def test_noise_of_a_host_that_joined_is_a_loss() -> None:
    async with opened() as desk:
        line, writer = await desk.connect()
        line.send(make_join())
        assert await line.receive() == WELCOME
        writer.write(b"x" * (2 * LINE_BYTES_MAX + 1))
        assert "its message is too long" in await desk.until_lost()
        line.close()


def test_digests_differ_in_what_must_be_equal_only() -> None:
    def digests(host: str = "127.0.0.1", path: str = "m", waves: int = 64, **cluster: Any) -> Any:
        config = Config(
            model=ModelConfig(path=path),
            cluster=ClusterConfig(stages=2, host=host, **cluster),
            planner=PlannerConfig(wave_tokens_max=waves),
        )
        return shared_digests(config, derive(config, FACTS))

    assert differences(digests(), digests(host="127.0.0.2", path="/x", threads=4)) == ""
    differing = differences(digests(), digests(waves=128))
    assert [part.split(":")[0] for part in differing.split("; ")] == ["planner", "weights and plan"]


@pytest.mark.parametrize(("text", "ranks"), [("2", (2,)), ("1-3", (1, 2, 3))])
def test_ranks_are_read(text: str, ranks: tuple[int, ...]) -> None:
    assert read_ranks(text, 1, 4) == ranks


@pytest.mark.parametrize("text", ["", "x", "0", "0-1", "3-2", "4", "1-4", "1,2"])
def test_other_ranks_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks"):
        read_ranks(text, 1, 4)


def test_addresses_are_read() -> None:
    assert read_address("10.0.0.1:7100") == ("10.0.0.1", 7100)
    assert read_address("[::1]:7100") == ("::1", 7100)
    for text in ("7100", "a:", "a:0", "a:65536", ":1"):
        with pytest.raises(ConfigError, match="--leader"):
            read_address(text)
