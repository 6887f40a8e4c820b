"""Hand-offs between processes through real NIXL: every byte, and every way to fail."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch
import zmq

from tests.integration.exporter_process import REPO, Exporter, make_store
from wavepp_worker.base.errors import TransferError
from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.transfer.desk_link import DeskLink
from wavepp_worker.transfer.desk_wire import DESK_VERSION, Close, Expired, Open, Opened, Refused
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.transfer.reader import StateReader
from wavepp_worker.wire.mailbox import StageHandoff

pytestmark = pytest.mark.nixl

BLOCK_TOKENS, FINGERPRINT = 16, "model-a"
CUTS = {1: ((0, 6),), 2: ((0, 3), (3, 6)), 3: ((0, 1), (1, 4), (4, 6))}


def wanted() -> bool:
    return True


@contextmanager
def make_reader(
    layers: int, *, blocks: int = 48, hold_s: float = 30.0, **changes: object
) -> Iterator[tuple[StateReader, torch.Tensor]]:
    store = make_store(layers, blocks, BLOCK_TOKENS, seed=-1)
    facts: dict[str, object] = {
        "layers": layers,
        "block_tokens": BLOCK_TOKENS,
        "dtype": "float32",
        "fingerprint": FINGERPRINT,
    }
    reader = StateReader(TransferConfig(hold_s=hold_s), store, **(facts | changes))  # type: ignore[arg-type]
    try:
        yield reader, store.pool
    finally:
        reader.close()


def hold(exporter: Exporter, rid: int, table: Sequence[int], tokens: int) -> StageHandoff:
    stage, layers, address, name = exporter.ask("hold", rid=rid, table=list(table), tokens=tokens)
    return StageHandoff(stage, tuple(layers), address, name)


def make_handoff(tokens: int, *stages: StageHandoff, **changes: object) -> Handoff:
    fields: dict[str, object] = {
        "fingerprint": FINGERPRINT,
        "prompt_tokens": tokens,
        "block_tokens": BLOCK_TOKENS,
        "first_token": 7,
        "stages": stages,
    }
    handoff = Handoff(**(fields | changes))  # type: ignore[arg-type]
    return Handoff.from_params(json.loads(json.dumps(handoff.to_params())))


@pytest.mark.parametrize("transports", ["default", "tcp"])
@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_the_reader_sees_exactly_the_exporters_bytes(
    stages: int, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FS-65: uneven cuts; each layer is covered once."""
    if transports == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    chance = random.Random(stages)
    with ExitStack() as stack:
        cut = CUTS[stages]
        exporters = [stack.enter_context(Exporter(s, cut[s])) for s in range(stages)]
        reader, pool = stack.enter_context(make_reader(6))
        expected = pool.clone()
        for rid in (1, 2):  # the second one finds every exporter known
            tokens = 11 * BLOCK_TOKENS + 5
            tables = [chance.sample(range(32), 12) for _ in exporters]
            handoff = make_handoff(
                tokens, *(hold(e, rid, t, tokens) for e, t in zip(exporters, tables, strict=True))
            )
            mine = chance.sample(range(24), 12) if rid == 1 else chance.sample(range(24, 48), 12)
            await reader.fetch(handoff, mine, wanted)
            for exporter, table in zip(exporters, tables, strict=True):
                first, stop = exporter.layers
                source = exporter.pool()
                for there, here in zip(table, mine, strict=True):
                    expected[here, first:stop] = source[there]
        assert torch.equal(pool, expected)
        for exporter in exporters:
            assert exporter.ask("ended") == [1, 2]
            assert exporter.ask("stats")["wavepp_holds_read_total"] == 2
        assert reader.stats()["wavepp_fetches_total"] == 2


async def test_a_long_read_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavepp_worker.transfer.fetch.PIECE_BYTES", 3 * 2 * 2 * 2 * 16 * 8 * 4)
    with Exporter() as exporter, make_reader(2) as (reader, pool):
        table = list(range(31, 11, -1))
        handoff = make_handoff(320, hold(exporter, 1, table, 320))
        await reader.fetch(handoff, range(20), wanted)
        assert torch.equal(pool[:20], exporter.pool()[table])


async def test_a_hold_is_read_once() -> None:
    with Exporter() as exporter, make_reader(2) as (reader, _), make_reader(2) as (second, _):
        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))
        results = await asyncio.gather(
            reader.fetch(handoff, [0, 1], wanted),
            second.fetch(handoff, [0, 1], wanted),
            return_exceptions=True,
        )
        failed = [result for result in results if result is not None]
        assert len(failed) == 1 and isinstance(failed[0], TransferError)
        with pytest.raises(TransferError, match="unknown, has expired or was cancelled"):
            await reader.fetch(handoff, [0, 1], wanted)
        assert exporter.ask("ended") == [1]


async def test_a_repeated_open_is_refused_while_the_first_read_goes_on() -> None:
    with Exporter() as exporter, make_reader(2) as (reader, pool):
        stage = hold(exporter, 1, [3, 4], 20)
        link = DeskLink(zmq.Context.instance(), stage.control_address)
        try:
            assert isinstance(open_hold(link, stage, "mine"), Opened)
            with pytest.raises(TransferError, match="already opened"):
                await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
            assert isinstance(open_hold(link, stage, "mine"), Refused)
            assert exporter.ask("ended") == []
        finally:
            link.close()
        assert torch.count_nonzero(pool) == 0


@pytest.mark.parametrize("ending", ["cancelled", "expired", "unknown"])
async def test_a_hold_that_is_not_there_is_refused(ending: str) -> None:
    """FS-62"""
    with Exporter(hold_s=30.0) as exporter, make_reader(2) as (reader, pool):
        stage = hold(exporter, 1, [3, 4], 20)
        if ending == "cancelled":
            exporter.ask("release", rid=1)
        elif ending == "expired":
            exporter.ask("advance", seconds=30.1)
        else:
            stage = StageHandoff(0, (0, 2), stage.control_address, "guess")
        with pytest.raises(TransferError, match="unknown, has expired or was cancelled"):
            await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
        assert torch.count_nonzero(pool) == 0
        exporter.wait_for("ended", [] if ending == "unknown" else [1])


async def test_a_read_that_outlives_its_hold_is_discarded() -> None:
    """FS-62, S16: slots are reused while the read runs; without the notice nobody would know."""
    with Exporter() as exporter, make_reader(2) as (reader, _):
        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))

        def hold_ends_just_before_the_read() -> bool:
            if exporter.ask("ended") == []:
                exporter.ask("advance", seconds=31.0)
                exporter.wait_for("ended", [1])
                exporter.ask("overwrite")
            return True

        with pytest.raises(TransferError, match="hold ended before the read did"):
            await reader.fetch(handoff, [0, 1], hold_ends_just_before_the_read)
        assert exporter.ask("stats")["wavepp_holds_read_total"] == 0


async def test_one_expired_stage_spoils_the_whole_fetch() -> None:
    """FS-62, FS-65: ready only when every stage's part is complete."""
    with (
        Exporter(0, (0, 1)) as first,
        Exporter(1, (1, 2)) as second,
        make_reader(2) as (reader, _),
    ):
        stages = [hold(first, 1, [3, 4], 20), hold(second, 1, [5, 6], 20)]

        def second_ends() -> bool:
            if second.ask("ended") == []:
                second.ask("advance", seconds=31.0)
                second.wait_for("ended", [1])
            return True

        with pytest.raises(TransferError, match="stage 1: the hold ended"):
            await reader.fetch(make_handoff(20, *stages), [0, 1], second_ends)
        first.wait_for("ended", [1])


async def test_a_long_read_renews_its_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """FS-62"""
    monkeypatch.setattr("wavepp_worker.transfer.fetch.PIECE_BYTES", 1)  # one block a piece
    with Exporter(hold_s=12.0) as exporter, make_reader(2, hold_s=12.0) as (reader, pool):
        looks = 0

        def dawdle() -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                time.sleep(4.1)  # more than a third of the hold, so the reader renews
            elif looks == 2:
                exporter.ask("advance", seconds=8.5)  # more than is left without the renewal
            return True

        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))
        await reader.fetch(handoff, [0, 1], dawdle)
        assert looks >= 2
        assert torch.equal(pool[:2], exporter.pool()[[3, 4]])


async def test_a_fetch_that_nobody_wants_ends_and_frees() -> None:
    with Exporter() as exporter, make_reader(2) as (reader, _):
        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))
        with pytest.raises(TransferError, match="no longer wanted"):
            await reader.fetch(handoff, [0, 1], lambda: False)
        exporter.wait_for("ended", [1])


async def test_a_declined_hold_ends_at_once() -> None:
    """FS-61"""
    with Exporter() as exporter, make_reader(2) as (reader, _):
        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))
        await reader.decline(handoff)
        exporter.wait_for("ended", [1])
        assert exporter.ask("stats")["wavepp_holds_declined_total"] == 1


async def test_workers_that_do_not_fit_are_told_why() -> None:
    """FS-66"""
    with Exporter() as exporter, make_reader(2) as (reader, _):
        stage = hold(exporter, 1, [3, 4], 20)
        cases: list[tuple[Callable[[], Handoff], str]] = [
            (lambda: make_handoff(20, stage, fingerprint="model-b"), "weights or cache format"),
            (lambda: make_handoff(20, stage, block_tokens=32), "block size is 32 tokens"),
            (lambda: make_handoff(20, StageHandoff(0, (0, 1), "tcp://x:1", "h")), "cover 1 layers"),
            (lambda: make_handoff(20, StageHandoff(0, (1, 2), "tcp://x:1", "h")), "from layer 0"),
            (lambda: make_handoff(21, stage), "exports tokens = 20, expected 21"),
        ]
        for make, text in cases:
            with pytest.raises(IncompatibleError, match=text):
                blocks = [0] if "block size" in text else [0, 1]
                await reader.fetch(make(), blocks, wanted)
    with Exporter(fingerprint="model-b") as exporter, make_reader(2) as (reader, _):
        stage = hold(exporter, 1, [3, 4], 20)
        with pytest.raises(TransferError, match="refused: the exporter holds model model-b"):
            await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
    with Exporter() as exporter, make_reader(2, dtype="bfloat16") as (reader, _):
        stage = hold(exporter, 1, [3, 4], 20)
        with pytest.raises(IncompatibleError, match="dtype = float32, expected bfloat16"):
            await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
        exporter.wait_for("ended", [1])


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_lost_exporter_fails_the_fetch_in_time(how: str) -> None:
    """FS-64"""
    with Exporter() as exporter, make_reader(2, hold_s=3.0) as (reader, _):
        handoff = make_handoff(20, hold(exporter, 1, [3, 4], 20))

        def lose() -> bool:
            exporter.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            return True

        started = time.monotonic()
        with pytest.raises(TransferError):
            await reader.fetch(handoff, [0, 1], lose)
        assert time.monotonic() - started < 20.0  # 4 hold times, one answer, and slack
        started = time.monotonic()
        with pytest.raises(TransferError, match="does not answer"):
            await reader.fetch(handoff, [0, 1], wanted)
        assert time.monotonic() - started < 8.0
    with Exporter() as fresh, make_reader(2) as (reader, pool):
        await reader.fetch(make_handoff(20, hold(fresh, 1, [3, 4], 20)), [0, 1], wanted)
        assert torch.equal(pool[:2], fresh.pool()[[3, 4]])


async def test_an_exporter_killed_in_the_middle_of_a_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FS-64"""
    monkeypatch.setenv("UCX_TLS", "tcp")  # the copy is not done inside the call
    blocks = 8192  # 64 MiB
    with Exporter(blocks=blocks) as exporter, make_reader(2, blocks=blocks) as (reader, _):
        tokens = blocks * BLOCK_TOKENS
        handoff = make_handoff(tokens, hold(exporter, 1, list(range(blocks)), tokens))
        looks = 0

        def kill_at_the_second_look() -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                exporter.process.kill()
            return True

        with pytest.raises(TransferError):
            await reader.fetch(handoff, range(blocks), kill_at_the_second_look)
        assert looks >= 2


def test_a_killed_reader_frees_the_hold_at_its_deadline() -> None:
    env = os.environ | {"UCX_TLS": "tcp"}
    blocks = 8192
    with Exporter(blocks=blocks, env=env) as exporter:
        tokens = blocks * BLOCK_TOKENS
        handoff = make_handoff(tokens, hold(exporter, 1, list(range(blocks)), tokens))
        program = "import sys; from tests.integration.test_transfer import read_and_stall as f; f()"
        reader = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=REPO, env=env
        )
        assert reader.stdin is not None
        reader.stdin.write(json.dumps(handoff.to_params()).encode())
        reader.stdin.close()
        exporter.wait_for("reading", 1)
        reader.kill()
        reader.wait()
        exporter.ask("advance", seconds=25.0)
        assert exporter.ask("ended") == []
        exporter.ask("advance", seconds=6.0)
        exporter.wait_for("ended", [1])
        assert exporter.ask("stats")["wavepp_holds_expired_total"] == 1
        # The exporter outlives its reader and serves the next one.
        stage = hold(exporter, 2, [3, 4], 20)
        with make_reader(2) as (fresh, pool):
            asyncio.run(fresh.fetch(make_handoff(20, stage), [0, 1], wanted))
            assert torch.equal(pool[:2], exporter.pool()[[3, 4]])


def read_and_stall() -> None:
    """Run by the test above in its own process: never closes what it reads."""
    handoff = Handoff.from_params(json.loads(sys.stdin.buffer.read()))
    blocks = handoff.prompt_tokens // BLOCK_TOKENS
    looks = 0

    def stall() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            time.sleep(60)
        return True

    with make_reader(2, blocks=blocks) as (reader, _):
        asyncio.run(reader.fetch(handoff, range(blocks), stall))


async def test_an_exporter_that_closes_during_a_read_exits_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    blocks = 8192
    with Exporter(blocks=blocks) as exporter, make_reader(2, blocks=blocks) as (reader, _):
        tokens = blocks * BLOCK_TOKENS
        handoff = make_handoff(tokens, hold(exporter, 1, list(range(blocks)), tokens))
        looks = 0

        def close_at_the_second_look() -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                assert exporter.process.stdin is not None
                exporter.process.stdin.write(b'{"command": "close"}\n')
                exporter.process.stdin.flush()
            return True

        with pytest.raises(TransferError):
            await reader.fetch(handoff, range(blocks), close_at_the_second_look)
        assert exporter.process.wait(20) == 0


async def test_damaged_metadata_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Exporter() as exporter, make_reader(2) as (reader, pool):
        stage = hold(exporter, 1, [3, 4], 20)
        with monkeypatch.context() as patch:
            patch.setattr("wavepp_worker.transfer.agent.digest", lambda _: b"other")
            with pytest.raises(TransferError, match="arrived damaged"):
                await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
        exporter.wait_for("ended", [1])
        stage = hold(exporter, 2, [3, 4], 20)
        await reader.fetch(make_handoff(20, stage), [0, 1], wanted)
        assert torch.equal(pool[:2], exporter.pool()[[3, 4]])


def test_agent_names_are_never_used_twice() -> None:
    context = zmq.Context.instance()
    names = set()
    for _ in range(2):
        with Exporter() as exporter:
            stage = hold(exporter, 1, [0], 1)
            link = DeskLink(context, stage.control_address)
            opened = open_hold(link, stage, "ticket")
            assert isinstance(opened, Opened)
            names.add(opened.agent)
            link.close()
    assert len(names) == 2


def test_nonsense_at_the_desk_is_dropped() -> None:
    with Exporter() as exporter:
        stage = hold(exporter, 1, [0], 1)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(stage.control_address)
        socket.send(b"nonsense")
        socket.send_multipart([b"too", b"many"])
        socket.send(b"x" * 5000)  # the desk drops this connection
        link = DeskLink(zmq.Context.instance(), stage.control_address)
        assert isinstance(open_hold(link, stage, "ticket"), Opened)
        ask = link.next_ask()
        link.send(Close(ask, "not my ticket"))
        assert link.receive(ask, time.monotonic() + 5) == Expired(ask)
        assert exporter.ask("ended") == []
        link.close()
        socket.close()


def open_hold(link: DeskLink, stage: StageHandoff, ticket: str) -> object:
    ask = link.next_ask()
    link.send(Open(ask, DESK_VERSION, stage.hold, ticket, FINGERPRINT, BLOCK_TOKENS))
    return link.receive(ask, time.monotonic() + 5)
