"""`wavepp bench serve` against a small HTTP server: what it sends, counts and refuses."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench.serve import (
    Answer,
    Target,
    drive,
    find_model,
    quantile,
    stage_seconds,
    summarize,
)
from wavepp_worker.bench.serve_command import add_serve_bench, render
from wavepp_worker.bench.workload import BenchPrompt, Workload, read_trace, trace_prompts

METRICS = """\
wavepp_forward_seconds_total{rank="0",role="loop"} 2.5
wavepp_gap_seconds_total{dynamo="x",rank="1",role="loop"} 0.5
wavepp_rounds_total{rank="0",role="wave"} 7
"""


class Server:
    """Remembers prompts; reports everything but the last token of a known prompt as cached."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.open_count = self.open_max = 0
        self.release = asyncio.Event()
        self.release.set()
        self.eight_open = asyncio.Event()

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.open_count += 1
        self.open_max = max(self.open_max, self.open_count)
        if self.open_count == 8:
            self.eight_open.set()
        await self.release.wait()
        self.open_count -= 1
        prompt = body["prompt"]
        if prompt[0] == 666:
            return web.Response(status=503)
        cached = len(prompt) - 1 if prompt in self.prompts else 0
        self.prompts.append(prompt)
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached}}
        return web.json_response({"choices": [], "usage": usage})


@asynccontextmanager
async def serving(models: tuple[str, ...] = ("tiny",)) -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    app = web.Application()

    async def list_models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in models]})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app.router.add_post("/v1/completions", server.complete)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield server, f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()


async def test_closed_loop_sends_every_prompt_with_bounded_clients() -> None:
    async with serving() as (server, url):
        load = Workload(kind="reuse", prompt_tokens=200, requests=12, families=2)
        answers = await drive(Target(url=url, model="tiny"), load.prompts(), concurrency=3)
    assert sorted(answer.number for answer in answers) == list(range(12))
    assert 1 <= server.open_max <= 3
    assert sorted(map(len, server.prompts)) == [200] * 12
    assert len({tuple(prompt[:180]) for prompt in server.prompts}) == 2
    assert len({tuple(prompt) for prompt in server.prompts}) == 12


async def test_open_loop_does_not_wait_for_answers() -> None:
    prompts = [BenchPrompt(n, [n + 1], at_s=n * 0.001) for n in range(8)]
    async with serving() as (server, url):
        server.release.clear()
        run = asyncio.create_task(drive(Target(url=url, model="t"), prompts, concurrency=None))
        await asyncio.wait_for(server.eight_open.wait(), 30)
        server.release.set()
        assert len(await run) == 8


async def test_failures_are_counted_and_do_not_stop_the_run() -> None:
    prompts = [BenchPrompt(0, [666]), BenchPrompt(1, [5, 6], expected_reuse=1)]
    async with serving() as (_, url):
        answers = await drive(Target(url=url, model="t"), [*prompts, prompts[1]], concurrency=1)
    report = summarize(answers, {}, {})
    assert (report.requests, report.failed, report.errors) == (3, 1, {"HTTP 503": 1})
    assert report.good_hit_share == 0.5
    assert report.cached_share == 0.25
    assert "HTTP 503: 1" in render(report)
    with pytest.raises(ConfigError, match="no request was answered"):
        summarize(answers[:1], {}, {})


async def test_an_unreachable_server_is_an_error_of_each_request() -> None:
    async with serving() as (_, url):
        pass
    answers = await drive(Target(url=url, model="t"), [BenchPrompt(0, [1])], concurrency=1)
    assert answers[0].error
    with pytest.raises(ConfigError, match="does not answer"):
        await find_model(url)


async def test_model_is_found_only_if_it_is_the_only_one() -> None:
    async with serving() as (_, url):
        assert await find_model(url) == "tiny"
    async with serving(models=("a", "b")) as (_, url):
        with pytest.raises(ConfigError, match="name one with --model"):
            await find_model(url)


async def test_stage_seconds_are_differences_by_cause() -> None:
    async with serving() as (_, url):
        page = url.removesuffix("/v1") + "/metrics"
        now = await stage_seconds([page])
    assert now == {"0#0": {"forward": 2.5}, "0#1": {"gap": 0.5}}
    answer = Answer(number=0, sent_s=1.0, ended_s=3.0, prompt_tokens=10, expected_reuse=0)
    report = summarize([answer], {"0#0": {"forward": 2.0}}, now)
    assert report.stage_seconds == {"0#0": {"forward": 0.5}, "0#1": {"gap": 0.5}}
    assert (report.served_tokens_per_s, report.completion_s["p99"]) == (5.0, 2.0)


def test_workloads_are_seeded_and_share_exactly_their_prefixes() -> None:
    load = Workload(kind="mixed", prompt_tokens=300, requests=8, families=2, seed=3)
    first, again = list(load.prompts()), list(load.prompts())
    assert first == again
    assert [p.expected_reuse for p in first] == [0, 256] * 4
    shared = [p.tokens[:270] for p in load.warm_up()]
    assert [first[1].tokens[:270], first[3].tokens[:270]] == shared
    assert first[0].tokens[:10] != first[2].tokens[:10]


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "warm"}, {"requests": 0}, {"reuse_share": 1.0}, {"token_low": 9, "token_high": 9}],
)
def test_workloads_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"kind": "cold", "prompt_tokens": 8, "requests": 1}
    with pytest.raises(ConfigError):
        Workload(**(sound | wrong))


def test_trace_is_scaled_and_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 5000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 7, 2]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    options: dict[str, Any] = {"seed": 1, "token_low": 10, "token_high": 99, "time_scale": 0.5}
    prompts = list(
        trace_prompts(read_trace(path, 9), trace_block_tokens=128, block_tokens=64, **options)
    )
    assert [len(p.tokens) for p in prompts] == [325, 256, 375]
    assert [p.at_s for p in prompts] == [0.0, 2.0, 2.5]
    assert [p.expected_reuse for p in prompts] == [0, 192, 128]  # the last token is computed
    assert prompts[0].tokens[:256] == prompts[1].tokens
    assert prompts[0].tokens[128:256] != prompts[2].tokens[128:256]


def test_broken_trace_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "hash_ids": [0]}\n{"timestamp": "x"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_trace(path, 5)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent", 5)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "either --url"),
        ("--url http://x -f a.yaml", "either --url"),
        ("--url http://x --time-scale 2", "needs --trace"),
        ("--url http://x --rate 0", "requests per second"),
        ("--url http://x --token-range 5", "two numbers"),
    ],
)
def test_options_that_contradict_are_refused(line: str, text: str) -> None:
    parser = argparse.ArgumentParser()
    add_serve_bench(parser.add_subparsers())
    args = parser.parse_args(["serve", *line.split()])
    with pytest.raises(ConfigError, match=text):
        args.run(args)


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert quantile([7.0], 0.5) == 7.0
