"""`wavepp bench idle`: what the whole WavePP path adds to one small cold request.

Starts the real ranks (P stages, rounds, waves, NIXL) and, in this process, the same model in one
piece.  Both serve the same fresh prompts in turn, so that the noise of the machine meets both.
The path is measured from the validated request to its state in a decode worker's pool.

    request ─validate, hash─▶ announce ─▶ hint + lease rounds ─▶ plan ─▶ execution ─▶ reply ─▶ read
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, structs

from wavepp_worker.base.errors import ConfigError, check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.config.schema import (
    CacheConfig,
    ClusterConfig,
    Config,
    DecodeBatchConfig,
    DecodeConfig,
    ModelConfig,
    PlannerConfig,
)
from wavepp_worker.decode.runner import ModelRunner
from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.serving.pipeline import Pipeline
from wavepp_worker.serving.ranks import launch, read_plan
from wavepp_worker.serving.request import RequestLimits, read_request
from wavepp_worker.transfer.reader import StateReader

START_TIMEOUT_S = 300.0
WARM_UP_REQUESTS = 5
CACHE_PROMPTS = 64  # the pools hold this many prompts; older ones are evicted, none is reused

# Between stages and one piece, relative to the largest element: rounding of the type.
STATE_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
PARTS = ("hash", "announce", "rounds", "plan", "execution", "reply", "read")


class IdleOptions(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: str
    load_format: str = "safetensors"
    stages: int = 2
    prompt_tokens: int = 64
    requests: int = 100
    block_tokens: int = 16
    threads: int = 1  # CPU threads of every stage, and of the model in one piece
    seed: int = 0


class Spread(Struct, frozen=True):
    """A distribution, in milliseconds."""

    p10: float
    median: float
    p90: float


class IdleReport(Struct, frozen=True, kw_only=True):
    """The result; all times in milliseconds.

    `added` is the median over requests of (path - one process); `ratio` the median of their
    quotient.  `parts` add up to the path; `execution` holds the model's own time.
    """

    options: IdleOptions
    machine: dict[str, Any]
    one_process: Spread
    path: Spread
    added: Spread
    ratio: float
    parts: dict[str, Spread]


def measure_idle(options: IdleOptions, progress: Callable[[str], None]) -> IdleReport:
    """Run the benchmark; `progress` gets one line per step.

    Raises:
        ConfigError: the model cannot be used, or the prompt fills less than one token.
        PeerError: the ranks did not start.
    """
    if options.prompt_tokens < 1 or options.requests < 1:
        raise ConfigError("--prompt-tokens and --requests must be at least 1")
    with tempfile.TemporaryDirectory(prefix="wavepp-bench-") as folder:
        # Only this process and its ranks use the discovery store of the benchmark.
        os.environ.update(
            DYN_DISCOVERY_BACKEND="file", DYN_REQUEST_PLANE="tcp", DYN_EVENT_PLANE="zmq",
            DYN_FILE_KV=str(Path(folder) / "store"),
        )  # fmt: skip
        return asyncio.run(_measure(options, progress))


async def _measure(options: IdleOptions, progress: Callable[[str], None]) -> IdleReport:
    model = ModelConfig(
        path=options.model, load_format=options.load_format, seed=options.seed  # type: ignore[arg-type]
    )  # fmt: skip
    cache_tokens = (
        CACHE_PROMPTS * options.block_tokens * ceil_div(options.prompt_tokens, options.block_tokens)
    )
    config = Config(
        model=model,
        cluster=ClusterConfig(stages=options.stages, threads=options.threads),
        cache=CacheConfig(block_tokens=options.block_tokens, device_tokens=cache_tokens),
        planner=PlannerConfig(
            wave_tokens_max=options.block_tokens
            * ceil_div(options.prompt_tokens, options.block_tokens)
        ),
    )
    progress("loading the model in one piece")
    runner = ModelRunner(
        DecodeConfig(
            model=model,
            threads=options.threads,
            block_tokens=options.block_tokens,
            batch=DecodeBatchConfig(cache_tokens=cache_tokens),
        )
    )
    reader = StateReader(
        config.transfer,
        runner.store,
        layers=runner.facts.layers,
        block_tokens=options.block_tokens,
        dtype=runner.facts.dtype,
        fingerprint=runner.facts.fingerprint,
    )
    progress(f"starting {options.stages} stages")
    launched = await launch(*read_plan(config), config, "wavepp-bench")
    pipeline = Pipeline(config, launched, ServingMetrics())
    try:
        limits = await pipeline.until_ready(START_TIMEOUT_S)
        bench = _Bench(options, runner, reader, pipeline, limits)
        for _ in range(WARM_UP_REQUESTS):
            await bench.one_request()
        bench.samples.clear()
        for number in range(1, options.requests + 1):
            await bench.one_request()
            if number % 10 == 0 or number == options.requests:
                progress(f"{number} of {options.requests} requests")
    finally:
        await pipeline.stop()
        reader.close()
    return bench.report()


class _Bench:
    """Alternates between the model in one piece and the path, on the same prompts."""

    def __init__(
        self,
        options: IdleOptions,
        runner: ModelRunner,
        reader: StateReader,
        pipeline: Pipeline,
        limits: RequestLimits,
    ) -> None:
        self.samples: list[tuple[float, dict[str, float]]] = []  # (one process s, parts s)
        self._options = options
        self._runner = runner
        self._reader = reader
        self._pipeline = pipeline
        self._limits = limits
        self._draw = random.Random(options.seed)
        self._blocks = tuple(range(ceil_div(options.prompt_tokens, options.block_tokens)))

    async def one_request(self) -> None:
        """Serve one fresh prompt both ways; first answer tokens and caches must agree."""
        tokens = [
            self._draw.randrange(self._limits.vocab) for _ in range(self._options.prompt_tokens)
        ]
        request = {"token_ids": tokens, "sampling_options": {"temperature": 0.0}}

        started = time.perf_counter()
        prompt = read_request(request, self._limits)
        chunk = WaveChunk(
            rid=1, start=0, length=len(tokens), tables=(self._blocks,),
            tokens=prompt.tokens,
            wants_token=True,
        )  # fmt: skip
        ((_, expected, _),) = self._runner.step([chunk], {})
        one_process_s = time.perf_counter() - started
        expected_state = self._take_state()

        # On its own, because the leader may have the announce before `submit` returns.
        started = time.perf_counter()
        prompt = read_request(request, self._limits)
        sequence_keys(prompt.tokens, self._options.block_tokens, scope_key("bench"))
        hash_s = time.perf_counter() - started

        begin = time.monotonic()
        prompt = read_request(request, self._limits)
        live = self._pipeline.submit(prompt)
        finished = await live.outcome
        handoff = self._pipeline.hand_off(live, prompt, finished)
        replied = time.monotonic()
        await self._reader.fetch(handoff, self._blocks, lambda: True)
        fetched = time.monotonic()

        difference = float((self._take_state() - expected_state).abs().max())
        limit = STATE_TOLERANCE[self._runner.facts.dtype] * float(expected_state.abs().max())
        check(difference <= limit, "the handed state differs", difference=difference, limit=limit)
        check(finished.token == expected, "stages and one piece differ", token=finished.token)
        check(finished.endpoint == 0, "the prompt was not cold", endpoint=finished.endpoint)
        line = finished.timeline
        parts = {
            "hash": hash_s,
            "announce": line.announced_at - begin - hash_s,
            "rounds": line.admitted_at - line.announced_at,
            "plan": line.scheduled_at - line.admitted_at,
            "execution": line.answered_at - line.scheduled_at,
            "reply": replied - line.answered_at,
            "read": fetched - replied,
        }
        self.samples.append((one_process_s, parts))

    def _take_state(self) -> torch.Tensor:
        """Return the prompt's state, f32 [layers, 2, heads, tokens, dim], and clear it."""
        pool = self._runner.store.pool
        blocks = list(self._blocks)
        state = pool[blocks].float().permute(1, 2, 3, 0, 4, 5).flatten(3, 4)
        pool[blocks] = 0
        return state[:, :, :, : self._options.prompt_tokens]

    def report(self) -> IdleReport:
        """Return the distributions of all samples."""
        alone = [one_process_s for one_process_s, _ in self.samples]
        path = [sum(parts.values()) for _, parts in self.samples]
        # The folder's name says which model; where it lies is nobody's business.
        named = structs.replace(self._options, model=Path(self._options.model).name)
        return IdleReport(
            options=named,
            machine=machine_facts(),
            one_process=_spread(alone),
            path=_spread(path),
            added=_spread([a - b for a, b in zip(path, alone, strict=True)]),
            ratio=statistics.median(a / b for a, b in zip(path, alone, strict=True)),
            parts={name: _spread([parts[name] for _, parts in self.samples]) for name in PARTS},
        )


def machine_facts() -> dict[str, Any]:
    """Return what a reader of the figures needs to know of this machine."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda_devices": torch.cuda.device_count(),
        "load_average": os.getloadavg()[0],
    }


def _spread(seconds: list[float]) -> Spread:
    ordered = sorted(value * 1e3 for value in seconds)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return Spread(p10=at(0.1), median=statistics.median(ordered), p90=at(0.9))


def render_idle(report: IdleReport) -> str:
    """Return the report as a table for a terminal."""
    options = report.options
    lines = [
        f"{options.stages} stages, {options.prompt_tokens} new tokens a request, "
        f"{options.requests} requests, nothing else running",
        "machine: " + " ".join(f"{key}={value}" for key, value in report.machine.items()),
        "",
        f"{'milliseconds':<28}{'p10':>9}{'median':>9}{'p90':>9}",
        _row("same model, one process", report.one_process),
        _row("whole WavePP path", report.path),
        *(_row(f"  {name}", report.parts[name]) for name in PARTS),
        _row("added", report.added),
        f"{'ratio':<28}{'':>9}{report.ratio:>9.2f}",
    ]
    return "\n".join(lines)


def _row(name: str, spread: Spread) -> str:
    return f"{name:<28}" + "".join(f"{value:>9.2f}" for value in structs.astuple(spread))
