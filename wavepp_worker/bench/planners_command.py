"""`wavepp bench planners`: its command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.sim.pipeline import StageTime

PLANNERS_HELP = """\
Compare planners in a simulated pipeline: greedy, MPU, gLLM's token throttling, SGLang's quadratic
chunks, on the paper's grid of prompts at 1 to 32 clients.  Real planners, a formula for stages:

  time of a wave = fixed + linear * tokens + square * tokens * context

examples:
  wavepp bench planners
  wavepp bench planners --stages 4 --wave-tokens-min 1024
  wavepp bench planners --stage-time stage.json --json planners.json
  wavepp bench planners --inflight all                   mpu counts every chunk in the ring
"""

# One stage of eight, of a dense 70B-class model on a current data-centre GPU, by arithmetic:
# 10 layers, 9e9 weights, 600 TFLOP/s.  `--stage-time` replaces it by measured constants.
FIXED_S, LINEAR_S, SQUARE_S = 1.5e-3, 3.0e-5, 5.5e-10


def add_planners_bench(benches: Any) -> None:
    """Add `bench planners`."""
    parser = benches.add_parser(
        "planners",
        help="utilisation of a simulated pipeline under each planner",
        description=PLANNERS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--stages", type=int, default=8, help="P; default: %(default)s")
    add("--wave-tokens-max", type=int, default=16_384, help="M; default: %(default)s")
    add("--wave-tokens-min", type=int, default=8_192, help="b_min; default: %(default)s")
    add("--block-tokens", type=int, default=64, help="B; default: %(default)s")
    add("--inflight", choices=["latest", "all"], default="latest",
        help="chunks in the ring that mpu counts; default: %(default)s")  # fmt: skip
    add("--stage-time", metavar="FILE", type=Path,
        help="JSON: fixed_s, linear_s, square_s; default: arithmetic for a 70B model")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help="also write every cell here")
    parser.set_defaults(run=run_planners_bench)


def run_planners_bench(args: argparse.Namespace) -> int:
    """Run the comparison; return the exit status."""
    from wavepp_worker.bench.planners import PlannerOptions, compare, render

    time = read_stage_time(
        args.stage_time, StageTime(fixed_s=FIXED_S, linear_s=LINEAR_S, square_s=SQUARE_S)
    )
    check_waves(args)
    if args.stages < 1:
        raise ConfigError("--stages is at least 1")
    options = PlannerOptions(
        stages=args.stages,
        block_tokens=args.block_tokens,
        wave_tokens_max=args.wave_tokens_max,
        wave_tokens_min=args.wave_tokens_min,
        inflight=args.inflight,
        time=time,
    )
    cells = compare(options, lambda name: print(f"• {name}", file=sys.stderr))
    print(render(cells))
    if args.json is not None:
        document = {"options": options, "cells": cells}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return 0


def read_stage_time(file: Path | None, default: StageTime) -> StageTime:
    """Return what `wavepp bench stage` wrote, or the default without a file.

    Raises:
        ConfigError: unreadable, or a constant that is not above 0.
    """
    time = default
    if file is not None:
        try:
            time = msgspec.json.decode(file.read_bytes(), type=StageTime)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--stage-time {file}: {error}") from error
    if min(time.fixed_s, time.linear_s, time.square_s) <= 0:
        raise ConfigError(f"stage times are above 0, not {time}")
    return time


def check_waves(args: argparse.Namespace) -> None:
    """Raise ConfigError unless block and wave sizes fit together."""
    if not 0 < args.block_tokens <= args.wave_tokens_min <= args.wave_tokens_max:
        raise ConfigError("block tokens <= smallest wave <= largest wave, all above 0")
    if args.wave_tokens_min % args.block_tokens or args.wave_tokens_max % args.block_tokens:
        raise ConfigError("wave sizes are multiples of --block-tokens")
