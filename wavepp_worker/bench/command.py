"""`wavepp bench`: the command line of the benchmarks.  Imports torch and Dynamo only when run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.bench.admission_command import add_admission_bench
from wavepp_worker.bench.planners_command import add_planners_bench
from wavepp_worker.bench.serve_command import add_serve_bench
from wavepp_worker.bench.stage_command import add_stage_bench

DEMO_MODEL = "~/.cache/wavepp/smollm2-135m-instruct"

IDLE_HELP = """\
Measure what the whole WavePP path adds to one small cold request, against the same model run in
one process.  Both serve the same prompts in turn; the first answer tokens must agree.

examples:
  wavepp bench idle                                  the demo model, 2 stages
  wavepp bench idle --stages 1 --prompt-tokens 256
  wavepp bench idle --model FOLDER --load-format dummy --json idle.json
"""


def add_bench(commands: Any) -> None:
    """Add the `bench` command."""
    parser = commands.add_parser("bench", help="measure this installation")
    benches = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    idle = benches.add_parser(
        "idle",
        help="time added to one small request",
        description=IDLE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = idle.add_argument
    add("--model", metavar="FOLDER", default=DEMO_MODEL, help="default: %(default)s")
    add("--load-format", choices=["safetensors", "dummy"], default="safetensors",
        help="dummy: random weights, only config.json is read")  # fmt: skip
    add("--stages", type=int, default=2, help="default: %(default)s")
    add("--prompt-tokens", type=int, default=64, help="default: %(default)s")
    add("--requests", type=int, default=100, help="default: %(default)s")
    add("--threads", type=int, default=1, help="CPU threads of each side; default: %(default)s")
    add("--json", metavar="FILE", help="also write the figures here")
    idle.set_defaults(run=_idle)
    add_serve_bench(benches)
    add_admission_bench(benches)
    add_stage_bench(benches)
    add_planners_bench(benches)


def _idle(args: argparse.Namespace) -> int:
    from wavepp_worker.bench.idle import IdleOptions, measure_idle, render_idle

    options = IdleOptions(
        model=str(Path(args.model).expanduser()),
        load_format=args.load_format,
        stages=args.stages,
        prompt_tokens=args.prompt_tokens,
        requests=args.requests,
        threads=args.threads,
    )
    report = measure_idle(options, lambda line: print(f"• {line}", file=sys.stderr))
    print(render_idle(report))
    if args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0
