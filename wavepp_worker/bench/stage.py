"""`wavepp bench stage`: how long one stage takes for a wave, and the formula that fits it.

    time = fixed + linear * tokens + square * tokens * context

Waves of several sizes behind prefixes of several lengths run on one stage's real layers; the
constants are a least-squares fit of relative errors, so that short waves count as much as long
ones.  `wavepp bench planners` and `wavepp ablate --simulate` take them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.units import ceil_div
from wavepp_worker.bench.ceilings import Ceilings, measure_ceilings
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.spec import read_spec
from wavepp_worker.model.stage import StageModel
from wavepp_worker.model.work import count_work


class StageOptions(Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        layers: of the stage; taken from the middle, so neither embedding nor head weighs in.
        waves, contexts: tokens.
    """

    model: str
    load_format: str = "safetensors"
    layers: int = 2
    waves: tuple[int, ...] = (1_024, 4_096, 8_192, 16_384)
    contexts: tuple[int, ...] = (0, 16_384, 65_536)
    block_tokens: int = 64
    repeats: int = 5
    device: str = ""
    threads: int = 1


class StagePoint(Struct, frozen=True):
    """One shape; seconds are the median of the repeats."""

    tokens: int
    context: int
    seconds: float
    spread: float  # (longest - shortest) / median
    floor_s: float = 0.0  # 0: not known
    peak_bytes: int = 0  # of the device, beside weights and cache; 0: not known


class StageReport(Struct, frozen=True, kw_only=True):
    """What was measured, and the fit; the first three fields are a `StageTime`."""

    fixed_s: float
    linear_s: float
    square_s: float
    error_median: float  # |fit - measured| / measured
    error_max: float
    points: tuple[StagePoint, ...]
    options: StageOptions
    machine: dict[str, Any]
    ceilings: Ceilings | None = None  # of a CUDA device, in 16 bits


def measure_stage(options: StageOptions, note: Callable[[str], None]) -> StageReport:
    """Load a stage, time its waves, fit the formula.

    Raises:
        ConfigError: the model has too few layers, or the device is missing.
    """
    torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    spec = read_spec(options.model)
    first = (spec.layers - options.layers) // 2
    if options.layers < 1 or first < 1:
        raise ConfigError(
            f"a stage from the middle has 1 to {spec.layers - 2} layers, not {options.layers}"
        )
    model = load_stage(
        options.model,
        spec,
        first,
        first + options.layers,
        device=device,
        load_format=options.load_format,
    )
    ceilings = None
    if device.type == "cuda" and model.dtype != torch.float32:
        ceilings = measure_ceilings(spec, device, model.dtype)
        note(
            f"ceilings in TFLOP/s: dense {ceilings.dense:.0f}, experts {ceilings.experts:.0f}, "
            f"attention {ceilings.attention:.0f}"
        )
    work = count_work(spec, first, first + options.layers)
    points = []
    for tokens, context in product(options.waves, options.contexts):
        point = _measure_point(model, tokens, context, options)
        if ceilings is not None:
            point = msgspec.structs.replace(point, floor_s=ceilings.floor_s(work, tokens, context))
        note(f"{tokens} tokens behind {context}: {1e3 * point.seconds:.2f} ms")
        points.append(point)
    fixed_s, linear_s, square_s = fit(points)
    errors = [abs(_predict(p, fixed_s, linear_s, square_s) / p.seconds - 1) for p in points]
    return StageReport(
        fixed_s=fixed_s,
        linear_s=linear_s,
        square_s=square_s,
        error_median=statistics.median(errors),
        error_max=max(errors),
        points=tuple(points),
        options=options,
        machine={
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "cores": os.cpu_count(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        ceilings=ceilings,
    )


def _measure_point(
    model: StageModel, tokens: int, context: int, options: StageOptions
) -> StagePoint:
    blocks = ceil_div(context + tokens, options.block_tokens)
    store, states = model.make_store(blocks, options.block_tokens), model.make_states(slots=1)
    tables = [tuple(range(blocks))] if model.has_attention else []
    held = () if states is None else (ChunkState(window=len(tables), working=0),)
    chunk = WaveChunk(
        rid=1, start=context, length=tokens, tables=(*tables, *[()] * len(held)), states=held
    )
    inputs = {
        name: torch.randn(shape, dtype=torch.float32).to(dtype=dtype, device=model.device)
        for name, (shape, dtype) in model.input_spec(tokens).items()
    }

    def run() -> float:
        _synchronize(model.device)
        began = time.perf_counter()
        batch = build_batch((chunk,), options.block_tokens, model.device)
        model.forward(batch, inputs, store, states)
        _synchronize(model.device)
        return time.perf_counter() - began

    run()  # warm-up: kernels are chosen and memory is taken
    peak_bytes = 0
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
    times = sorted(run() for _ in range(options.repeats))
    if model.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(model.device) - before
    median = statistics.median(times)
    spread = (times[-1] - times[0]) / median
    return StagePoint(tokens, context, median, spread, peak_bytes=peak_bytes)


def fit(points: Sequence[StagePoint]) -> tuple[float, float, float]:
    """Return (fixed, linear, square) in seconds that fit the points best, relatively.

    Raises:
        ConfigError: fewer than three shapes.
    """
    if len({(p.tokens, p.context) for p in points}) < 3:
        raise ConfigError("three constants need at least three shapes")
    rows = np.array([[1.0, p.tokens, _pairs(p)] for p in points])
    seconds = np.array([p.seconds for p in points])
    scaled = rows / seconds[:, None]
    # Columns differ by ten orders of magnitude: scale them, or the solver drops the small ones.
    columns = np.abs(scaled).max(axis=0)
    solution, *_ = np.linalg.lstsq(scaled / columns, np.ones(len(points)), rcond=None)
    fixed, linear, square = (solution / columns).tolist()
    return max(fixed, 0.0), linear, max(square, 0.0)


def _pairs(point: StagePoint) -> float:
    return point.tokens * (point.context + point.tokens / 2)


def _predict(point: StagePoint, fixed_s: float, linear_s: float, square_s: float) -> float:
    return fixed_s + linear_s * point.tokens + square_s * _pairs(point)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def render(report: StageReport) -> str:
    """Return the table and the fit as text."""
    lines = [
        f"{'tokens':>8} {'context':>8} {'ms':>10} {'fit, ms':>10} {'spread':>7} {'floor, ms':>10} "
        f"{'of time':>8} {'peak, MiB':>10}"
    ]
    for p in report.points:
        predicted = _predict(p, report.fixed_s, report.linear_s, report.square_s)
        lines.append(
            f"{p.tokens:8} {p.context:8} {1e3 * p.seconds:10.3f} {1e3 * predicted:10.3f} "
            f"{100 * p.spread:5.0f} %"
            + (
                f" {1e3 * p.floor_s:10.3f} {100 * p.floor_s / p.seconds:6.1f} % "
                f"{p.peak_bytes >> 20:10}"
                if p.floor_s
                else ""
            )
        )
    lines.append(
        f"fixed {1e3 * report.fixed_s:.3f} ms + {1e6 * report.linear_s:.3f} us per token "
        f"+ {1e12 * report.square_s:.2f} ps per token and token of context"
    )
    lines.append(
        f"error of the fit: median {100 * report.error_median:.1f} %, "
        f"largest {100 * report.error_max:.1f} %"
    )
    return "\n".join(lines)
