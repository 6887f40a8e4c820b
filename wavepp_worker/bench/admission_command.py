"""`wavepp bench admission`: its command line."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError

ADMISSION_HELP = """\
Time what admitting long, mostly cached prompts costs: probe, discovery in a round, lease, escrow,
materialisation, publication; against the two-walk design, in the same run; and how each cost grows
with the prompt and with how many requests wait.  Needs no GPU and no model.

Prompts share 90 % with one of eight cached families; every further rank holds 2 % less of them.
`ours` runs the production machines on P ranks.  Rounds are timed twice: all ranks in one process,
where their work adds up, and a process per rank over ZeroMQ, where P cores are wanted.

examples:
  wavepp bench admission                                 about two minutes; leave the machine alone
  wavepp bench admission --quick                         every table in the small, a few seconds
  wavepp bench admission --tokens 200000 --concurrency 64 --block-tokens 64,32 --json FILE
  wavepp bench admission --hybrid --no-growth            recurrent windows: the backward scan
  wavepp bench admission --json | jq '.blocks[0].work.spreads["ours: probe"]'
"""


def add_admission_bench(benches: Any) -> None:
    """Add `bench admission`."""
    parser = benches.add_parser(
        "admission",
        help="cost of admitting long prompts",
        description=ADMISSION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tokens", type=int, default=200_000, help="prompt length; default: %(default)s")
    add("--concurrency", type=int, default=64,
        help="requests that are there at the same time; default: %(default)s")  # fmt: skip
    add("--ranks", type=int, default=4, help="P; default: %(default)s")
    add("--block-tokens", default="64,32", help="B, several with commas; default: %(default)s")
    add("--hybrid", action="store_true", help="a recurrent window beside the dense one")
    add("--no-growth", action="store_true", help="leave out the growth tables")
    add("--quick", action="store_true", help="everything in the small, to see that it works")
    add("--json", nargs="?", const="-", metavar="FILE",
        help="write the report here too; without FILE: on stdout, and no tables")  # fmt: skip
    parser.set_defaults(run=run_admission_bench)


def run_admission_bench(args: argparse.Namespace) -> int:
    """Run the benchmark; return the exit status."""
    from wavepp_worker.bench.admission import AdmissionOptions, measure_admission, quick
    from wavepp_worker.bench.admission_tables import render

    try:
        blocks = tuple(int(part) for part in args.block_tokens.split(","))
    except ValueError as error:
        raise ConfigError(f"--block-tokens {args.block_tokens}: numbers with commas") from error
    options = AdmissionOptions(
        tokens=args.tokens,
        concurrency=args.concurrency,
        ranks=args.ranks,
        block_tokens=blocks,
        is_hybrid=args.hybrid,
    )
    if args.no_growth:
        options = msgspec.structs.replace(options, growth_tokens=(), growth_waiting=())
    if args.quick:
        options = quick(options)
    report = measure_admission(
        options, _command(args), lambda line: print(f"• {line}", file=sys.stderr)
    )
    document = msgspec.json.format(msgspec.json.encode(report)).decode()
    if args.json == "-":
        print(document)
        return 0
    print(render(report))
    if args.json:
        Path(args.json).write_text(document + "\n")
    return 0


def _command(args: argparse.Namespace) -> str:
    """Return the command that measures the same again, without paths of this machine."""
    words = ["wavepp", "bench", "admission", "--tokens", str(args.tokens)]
    words += ["--concurrency", str(args.concurrency), "--ranks", str(args.ranks)]
    words += ["--block-tokens", args.block_tokens]
    words += [f"--{name.replace('_', '-')}" for name in ("hybrid", "no_growth", "quick")
              if getattr(args, name)]  # fmt: skip
    return shlex.join(words)
