"""`wavepp bench stage`: its command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError

STAGE_HELP = """\
Time one stage's layers on this machine's device, for waves of several sizes behind prefixes of
several lengths, and fit the formula that simulations use.

examples:
  wavepp bench stage --model FOLDER --load-format dummy --layers 4 --json stage.json
  wavepp bench stage --model FOLDER --waves 128,512 --contexts 0,1024
  wavepp bench planners --stage-time stage.json
"""


def add_stage_bench(benches: Any) -> None:
    """Add `bench stage`."""
    parser = benches.add_parser(
        "stage",
        help="time of one stage's wave, and a formula for it",
        description=STAGE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER", required=True)
    add("--load-format", choices=["safetensors", "dummy"], default="safetensors",
        help="dummy: random weights, only config.json is read")  # fmt: skip
    add("--layers", type=int, default=2, help="from the middle; default: %(default)s")
    add("--waves", default="1024,4096,8192,16384", help="tokens; default: %(default)s")
    add("--contexts", default="0,16384,65536", help="tokens before; default: %(default)s")
    add("--block-tokens", type=int, default=64, help="default: %(default)s")
    add("--repeats", type=int, default=5, help="default: %(default)s")
    add("--device", default="", help="default: the first CUDA device, else the CPU")
    add("--threads", type=int, default=1, help="CPU threads; default: %(default)s")
    add("--json", metavar="FILE", type=Path, help="write constants and points here")
    parser.set_defaults(run=run_stage_bench)


def run_stage_bench(args: argparse.Namespace) -> int:
    """Run the measurement; return the exit status."""
    waves, contexts = _numbers(args.waves, "--waves", 1), _numbers(args.contexts, "--contexts", 0)
    if args.repeats < 1 or args.block_tokens < 1:
        raise ConfigError("--repeats and --block-tokens are at least 1")

    from wavepp_worker.bench.stage import StageOptions, measure_stage, render

    options = StageOptions(
        model=str(Path(args.model).expanduser()),
        load_format=args.load_format,
        layers=args.layers,
        waves=waves,
        contexts=contexts,
        block_tokens=args.block_tokens,
        repeats=args.repeats,
        device=args.device,
        threads=args.threads,
    )
    report = measure_stage(options, lambda line: print(f"• {line}", file=sys.stderr))
    print(render(report))
    if args.json is not None:
        named = msgspec.structs.replace(options, model=Path(options.model).name)
        report = msgspec.structs.replace(report, options=named)
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0


def _numbers(text: str, option: str, least: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: numbers with commas, as in 128,512") from error
    if min(numbers) < least:
        raise ConfigError(f"{option} {text}: at least {least}")
    return numbers
