"""`wavepp bench admission`: its command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError

ADMISSION_HELP = """\
Time what admitting a long, mostly cached prompt costs one rank: probe, discovery in a round,
lease, escrow, materialisation, publication; against the two-walk design, in the same run.

examples:
  wavepp bench admission
  wavepp bench admission --tokens 200000 --concurrency 64 --json admission.json
  wavepp bench admission --hybrid --no-growth            with a recurrent window beside
"""


def add_admission_bench(benches: Any) -> None:
    """Add `bench admission`."""
    parser = benches.add_parser(
        "admission",
        help="cost of admitting one long prompt",
        description=ADMISSION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=200_000, help="prompt length; default: %(default)s")
    add("--concurrency", type=int, default=64,
        help="requests timed, and waiting during discovery; default: %(default)s")  # fmt: skip
    add("--ranks", type=int, default=4, help="P; default: %(default)s")
    add("--block-tokens", default="64,32", help="B, several with commas; default: %(default)s")
    add("--hybrid", action="store_true", help="a recurrent window beside the dense one")
    add("--no-growth", action="store_true", help="leave out the tables of growth")
    add("--json", nargs="?", const="-", metavar="FILE",
        help="write the report as JSON; without FILE: as the last line of output")  # fmt: skip
    parser.set_defaults(run=run_admission_bench)


def run_admission_bench(args: argparse.Namespace) -> int:
    """Run the benchmark; return the exit status."""
    try:
        blocks = tuple(int(part) for part in args.block_tokens.split(","))
    except ValueError as error:
        raise ConfigError(f"--block-tokens {args.block_tokens}: numbers with commas") from error
    if min(blocks) < 1 or args.ranks < 1 or args.concurrency < 1:
        raise ConfigError("--block-tokens, --ranks and --concurrency are at least 1")
    if args.tokens < 20 * max(blocks):
        raise ConfigError("--tokens is at least 20 blocks")

    from wavepp_worker.bench.admission import AdmissionOptions, measure_admission, render

    options = AdmissionOptions(
        tokens=args.tokens,
        concurrency=args.concurrency,
        ranks=args.ranks,
        block_tokens=blocks,
        is_hybrid=args.hybrid,
        growth=not args.no_growth,
    )
    report = measure_admission(options, lambda line: print(f"• {line}", file=sys.stderr))
    print(render(report))
    if args.json == "-":
        print(msgspec.json.encode(report).decode())
    elif args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return 0
