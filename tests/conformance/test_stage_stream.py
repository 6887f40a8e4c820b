"""What every `StageStream` does alike: order, fences, chunking, hops, errors.

Runs against the CPU stream, and against the CUDA stream where there are CUDA devices.  All stages
of a pipeline live in this one process; each meets its neighbours from a thread of its own, as
separate processes would.
"""

from __future__ import annotations

import json
import select
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from wavepp_worker.config.derive import balanced_layers
from wavepp_worker.executor.ports import WaveChunk, WaveFenced
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.spec import read_spec
from wavepp_worker.runtime.gaps import CopyMarks, WaveMarks
from wavepp_worker.runtime.loop_timeline import Marks, new_marks
from wavepp_worker.runtime.stage_stream import CpuStageStream, CudaStageStream
from wavepp_worker.runtime.stage_work import StageWork
from wavepp_worker.transport.activations import ActivationLink, join_store, open_store
from wavepp_worker.wire.mailbox import Copy

B, BLOCKS, LAYERS, VOCAB = 8, 32, 3, 97
DEADLINE_S = 60.0
SPIN_CYCLES = 4_000_000_000  # about two seconds
Stream = CpuStageStream | CudaStageStream
Pipeline = Callable[..., list[Stream]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def pipeline(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Pipeline]:
    """Return a maker of pipelines: one stream per stage, first stage first."""
    kind: str = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    opened: list[Stream] = []

    def build(stages: int, marks: Sequence[Marks | None] = (None,) * 3) -> list[Stream]:
        if kind == "cuda" and torch.cuda.device_count() < stages:
            pytest.skip(f"{stages} CUDA devices needed")
        streams = open_pipeline(model_folder, kind, stages, 30.0, marks)
        opened.extend(streams)
        return streams

    yield build
    for stream in opened:
        stream.close()
        stream.close()  # closing twice is allowed


def open_pipeline(
    folder: Path,
    kind: str,
    stages: int,
    timeout_s: float,
    marks: Sequence[Marks | None] = (None,) * 3,
) -> list[Stream]:
    torch.set_num_threads(1)
    spec = read_spec(folder)
    counts = balanced_layers((1,) * LAYERS, stages)
    store, address = open_store("127.0.0.1", timeout_s=30.0)
    streams: list[Stream | None] = [None] * stages

    def open_stage(rank: int) -> None:
        device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
        first = sum(counts[:rank])
        model = load_stage(
            folder, spec, first, first + counts[rank], device=device, load_format="dummy", seed=5
        )
        link = None
        if stages > 1:
            link = ActivationLink(
                rank,
                stages,
                backend="nccl" if kind == "cuda" else "gloo",
                store=store if rank == 0 else join_store(address, timeout_s=30.0),
                host="127.0.0.1",
                timeout_s=timeout_s,
                device=device,
            )
        work = StageWork(model, model.make_store(BLOCKS, B, host_blocks=BLOCKS), link)
        made = CudaStageStream if kind == "cuda" else CpuStageStream
        streams[rank] = made(work, marks[rank])

    threads = [threading.Thread(target=open_stage, args=(rank,)) for rank in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return [stream for stream in streams if stream is not None]


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * index + 13 * salt + index * index) % VOCAB for index in range(length)]


def chunk(
    rid: int, tokens: list[int], start: int, stop: int, table: list[int], is_first_stage: bool
) -> WaveChunk:
    return WaveChunk(
        rid=rid,
        start=start,
        length=stop - start,
        tables=(table,),
        tokens=struct.pack(f"<{stop - start}I", *tokens[start:stop]) if is_first_stage else b"",
        wants_token=stop == len(tokens),
    )


def run_everywhere(
    streams: list[Stream],
    wave: int,
    spans: list[tuple[int, list[int], int, int, list[int]]],
    *,
    copies_before: int = 0,
) -> None:
    for rank, stream in enumerate(streams):
        is_last = rank == len(streams) - 1
        chunks = [chunk(*span, is_first_stage=rank == 0) for span in spans]
        if not is_last:
            chunks = [
                WaveChunk(each.rid, each.start, each.length, each.tables, each.tokens)
                for each in chunks
            ]
        stream.run(wave, chunks, copies_before)


def await_fences(stream: Stream, count: int) -> list[WaveFenced]:
    """Wait on the descriptor, as the poll loop does, until `count` waves are fenced."""
    fenced: list[WaveFenced] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(fenced) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only {fenced} of {count} fences"
        select.select([stream.fileno()], [], [], left)
        fenced += stream.poll()
    return fenced


def answers(fenced: list[WaveFenced]) -> dict[int, tuple[int, float]]:
    assert [wave.error for wave in fenced] == [""] * len(fenced)
    return {rid: (token, logprob) for wave in fenced for rid, token, logprob in wave.tokens}


TABLES = [[3, 9, 1, 20], [8, 2, 30, 31]]


def whole(pipeline: Pipeline, tokens: list[int]) -> tuple[int, float]:
    """The answer of one stage to the whole prompt in one wave."""
    streams = pipeline(1)
    run_everywhere(streams, 1, [(1, tokens, 0, len(tokens), TABLES[0])])
    return answers(await_fences(streams[0], 1))[1]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_chunks_over_stages_answer_like_one_whole_prompt(pipeline: Pipeline, stages: int) -> None:
    first, second = prompt(29), prompt(11, salt=1)
    streams = pipeline(stages)
    waves = [
        [(1, first, 0, 16, TABLES[0])],
        [(1, first, 16, 24, TABLES[0]), (2, second, 0, 8, TABLES[1])],
        [(1, first, 24, 29, TABLES[0]), (2, second, 8, 11, TABLES[1])],
    ]
    for number, spans in enumerate(waves, start=1):
        run_everywhere(streams, number, spans)
    for stream in streams[:-1]:
        assert await_fences(stream, 3) == [WaveFenced(1), WaveFenced(2), WaveFenced(3)]
    fenced = await_fences(streams[-1], 3)
    assert [wave.wave for wave in fenced] == [1, 2, 3]
    assert [len(wave.tokens) for wave in fenced] == [0, 0, 2]
    found = answers(fenced)
    for rid, tokens in ((1, first), (2, second)):
        token, logprob = whole(pipeline, tokens)
        assert found[rid][0] == token
        assert found[rid][1] == pytest.approx(logprob, abs=1e-4)


def test_a_reused_prefix_answers_like_a_cold_prompt(pipeline: Pipeline) -> None:
    shared = prompt(16)
    first, second = shared + prompt(5, salt=2), shared + prompt(9, salt=3)
    (stream,) = streams = pipeline(1)
    run_everywhere(streams, 1, [(1, first, 0, len(first), [4, 7, 5])])
    run_everywhere(streams, 2, [(2, second, 16, len(second), [4, 7, 11, 12])])
    found = answers(await_fences(stream, 2))
    token, logprob = whole(pipeline, second)
    assert found[2][0] == token
    assert found[2][1] == pytest.approx(logprob, abs=1e-4)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_wave_sees_the_copies_that_it_names(pipeline: Pipeline, stages: int) -> None:
    """A prefix goes to the host, its slots are used by another prompt, and it comes back elsewhere.

    The copies and the waves that depend on them are enqueued at once; the last wave answers as if
    nothing had moved.  [I47, FS-26]
    """
    shared = prompt(16)
    first, other, second = (
        shared + prompt(3, salt=2),
        prompt(30, salt=4),
        shared + prompt(9, salt=3),
    )
    streams = pipeline(stages)
    run_everywhere(streams, 1, [(1, first, 0, len(first), [4, 7, 5])])
    for stream in streams:
        await_fences(stream, 1)  # only what has passed its fence is ever offloaded
        stream.copy((Copy("offload", 0, 4, 2), Copy("offload", 0, 7, 3)))
    run_everywhere(streams, 2, [(2, other, 0, len(other), [4, 7, 10, 13])], copies_before=1)
    for stream in streams:
        stream.copy((Copy("onboard", 0, 2, 20), Copy("onboard", 0, 3, 21)))
    run_everywhere(streams, 3, [(3, second, 16, len(second), [20, 21, 11, 12])], copies_before=2)
    for stream in streams[:-1]:
        await_fences(stream, 2)
    found = answers(await_fences(streams[-1], 2))
    for rid, tokens in ((2, other), (3, second)):
        token, logprob = whole(pipeline, tokens)
        assert found[rid][0] == token
        assert found[rid][1] == pytest.approx(logprob, abs=1e-4)
    times = streams[0].times.stats()
    assert times["wavepp_offload_bytes_total"] == times["wavepp_onboard_bytes_total"] > 0


def hold_back_onboarding(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let every copy that onboards last until the returned function is called.

    On CUDA that is a kernel which spins for seconds; nothing on the host can hold a stream.
    """
    store, release = stream._work.store, threading.Event()
    copy = store.copy

    def slow(copies: Sequence[Copy]) -> None:
        if any(each.kind == "onboard" for each in copies):
            if store.pool.is_cuda:
                torch.cuda._sleep(SPIN_CYCLES)
            else:
                assert release.wait(DEADLINE_S)
        copy(copies)

    monkeypatch.setattr(store, "copy", slow)
    return release.set


def are_copies_done(stream: Stream, count: int) -> bool:
    if isinstance(stream, CudaStageStream):
        return bool(stream._streams.copy.query())
    return stream._copies_done >= count


def test_copies_of_a_later_install_hold_no_wave_back(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of request 2 are under way: 1, admitted before it, runs; 2 waits.  [I47, FS-03]"""
    first, second = prompt(16), prompt(16) + prompt(5, salt=2)
    (stream,) = streams = pipeline(1)
    run_everywhere(streams, 1, [(1, first, 0, 16, [4, 7])])
    await_fences(stream, 1)  # kernels are loaded, too
    finish = hold_back_onboarding(stream, monkeypatch)
    stream.copy((Copy("offload", 0, 4, 2), Copy("offload", 0, 7, 3)))
    stream.copy((Copy("onboard", 0, 2, 20), Copy("onboard", 0, 3, 21)))
    run_everywhere(streams, 2, [(3, prompt(9), 0, 9, [10, 13])], copies_before=1)
    run_everywhere(streams, 3, [(2, second, 16, 21, [20, 21, 11])], copies_before=2)
    early = await_fences(stream, 1)
    assert not are_copies_done(stream, 2)
    assert [fenced.wave for fenced in early] == [2]
    assert stream.poll() == []
    finish()
    found = answers(early + await_fences(stream, 1))
    assert are_copies_done(stream, 2)
    for rid, tokens in ((3, prompt(9)), (2, second)):
        token, logprob = whole(pipeline, tokens)
        assert found[rid][0] == token
        assert found[rid][1] == pytest.approx(logprob, abs=1e-4)


def test_copies_that_no_wave_waits_for_run_and_do_not_pile_up(pipeline: Pipeline) -> None:
    """Copies of requests that are cancelled before any wave run all the same.  [S4]"""
    (stream,) = streams = pipeline(1)
    for _ in range(50):
        stream.copy((Copy("offload", 0, 4, 2),))
    run_everywhere(streams, 1, [(1, prompt(4), 0, 4, TABLES[0])], copies_before=50)
    run_everywhere(streams, 2, [(2, prompt(4), 0, 4, TABLES[1])], copies_before=3)
    await_fences(stream, 2)
    assert are_copies_done(stream, 50)
    if isinstance(stream, CudaStageStream):
        stream.copy((Copy("offload", 0, 4, 2),))
        stream._streams.copy.synchronize()
        stream.copy((Copy("offload", 0, 4, 2),))
        assert len(stream._copied) <= 1


def test_a_failed_copy_is_reported_and_nothing_runs_after_it(pipeline: Pipeline) -> None:
    (stream,) = streams = pipeline(1)
    if isinstance(stream, CudaStageStream):
        pytest.skip("a launch fails in the caller, which is fatal there")
    stream.copy((Copy("onboard", 0, BLOCKS, 0),))
    run_everywhere(streams, 1, [(1, prompt(4), 0, 4, TABLES[0])], copies_before=1)
    (fenced,) = await_fences(stream, 1)
    assert "slots are in the pools" in fenced.error
    for thread in stream._threads[:1]:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert stream.poll() == []


def test_the_descriptor_is_readable_exactly_while_something_is_due(pipeline: Pipeline) -> None:
    (stream,) = streams = pipeline(1)
    assert stream.poll() == []
    assert select.select([stream.fileno()], [], [], 0)[0] == []
    run_everywhere(streams, 1, [(1, prompt(4), 0, 4, TABLES[0])])
    assert select.select([stream.fileno()], [], [], DEADLINE_S)[0] == [stream.fileno()]
    assert len(await_fences(stream, 1)) == 1
    assert select.select([stream.fileno()], [], [], 0)[0] == []
    assert stream.poll() == []


def test_many_more_waves_than_buffers_can_be_enqueued(pipeline: Pipeline) -> None:
    streams = pipeline(2)
    tokens = prompt(32)
    for wave in range(1, 5):
        run_everywhere(streams, wave, [(1, tokens, 8 * wave - 8, 8 * wave, TABLES[0])])
    assert [wave.wave for wave in await_fences(streams[0], 4)] == [1, 2, 3, 4]
    found = answers(await_fences(streams[1], 4))
    assert found[1][0] == whole(pipeline, tokens)[0]
    times = streams[1].times
    assert times.forward_s > 0
    assert times.gap_s >= times.receive_wait_s


@pytest.mark.parametrize("stages", [1, 2])
def test_marks_say_when_each_wave_and_each_copy_ran(pipeline: Pipeline, stages: int) -> None:
    marks = [new_marks() for _ in range(stages)]
    opened_at = time.monotonic()
    streams = pipeline(stages, marks)
    tokens = prompt(24)
    for wave in range(1, 4):
        run_everywhere(streams, wave, [(1, tokens, 8 * wave - 8, 8 * wave, TABLES[0])])
        if wave == 2:
            time.sleep(0.05)  # the third one is launched when the device has stood still
    for stream in streams:
        await_fences(stream, 3)
        stream.copy((Copy("offload", 0, 3, 2), Copy("offload", 0, 9, 3), Copy("onboard", 0, 2, 5)))
    run_everywhere(streams, 4, [(2, prompt(4), 0, 4, TABLES[1])])
    for rank, stream in enumerate(streams):
        await_fences(stream, 1)
        closed_at = time.monotonic()
        waves = [mark for mark in marks[rank] if isinstance(mark, WaveMarks)]
        (copies,) = [mark for mark in marks[rank] if isinstance(mark, CopyMarks)]
        assert [each.wave for each in waves] == [1, 2, 3, 4]
        steps = [opened_at]
        for each in waves:
            steps += [
                each.asked_at, each.received_at, each.began_at, each.ended_at, each.sent_at,
            ]  # fmt: skip
        steps.append(closed_at)
        assert steps == sorted(steps)
        forward_s = sum(each.ended_at - each.began_at for each in waves)
        assert forward_s == pytest.approx(stream.times.forward_s, abs=1e-6)
        gap_s = sum(b.began_at - a.ended_at for a, b in pairwise(waves))
        assert gap_s == pytest.approx(stream.times.gap_s, abs=2e-3)
        assert (copies.offloads, copies.onboards) == (2, 1)
        assert waves[2].ended_at <= copies.began_at <= copies.ended_at <= closed_at


def test_a_failed_wave_is_reported_and_nothing_runs_after_it(pipeline: Pipeline) -> None:
    (stream,) = pipeline(1)
    if isinstance(stream, CudaStageStream):
        pytest.skip("a launch fails in the caller, which is fatal there")
    too_short = WaveChunk(1, 0, 16, ([3],), struct.pack("<16I", *prompt(16)), True)
    stream.run(1, [too_short], 0)
    stream.run(2, [chunk(2, prompt(4), 0, 4, TABLES[1], True)], 0)
    (fenced,) = await_fences(stream, 1)
    assert fenced.wave == 1
    assert "block table too short" in fenced.error
    assert not select.select([stream.fileno()], [], [], 0.05)[0]


def test_a_silent_neighbour_is_an_error_in_time(model_folder: Path) -> None:
    streams = open_pipeline(model_folder, "cpu", 2, timeout_s=1.0)
    tokens = prompt(4)
    streams[1].run(1, [chunk(1, tokens, 0, 4, TABLES[0], False)], 0)
    (fenced,) = await_fences(streams[1], 1)
    assert "Timed out" in fenced.error
    for stream in streams:
        stream.close()


def test_the_store_listens_on_its_host_only() -> None:
    store, address = open_store("127.0.0.1", timeout_s=5.0)
    port = int(address.rpartition(":")[2])
    rows = Path("/proc/net/tcp").read_text().splitlines()
    rows += Path("/proc/net/tcp6").read_text().splitlines()
    fields = [row.split() for row in rows]
    listen = "0A"
    hosts = {f[1][:-5] for f in fields if f[1].endswith(f":{port:04X}") and f[3] == listen}
    assert hosts == {"0100007F"}
    del store
