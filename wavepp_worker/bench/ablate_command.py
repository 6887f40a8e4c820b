"""`wavepp ablate`: its command line."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench.ladder import LadderReport, Rung, render
from wavepp_worker.bench.serve_command import add_workload_options, workload_of

ABLATE_HELP = """\
Climb the paper's ladder on one workload, and say what each rung adds:

  naive     one request at a time in the pipeline's path, two tree walks
  waves     admission beside the pipeline, endpoints found by index
  leases    leases and escrows, so that requests in admission overlap
  mpu       waves sized so that every stage has some

Every rung is configuration of the same code: admission.mode and planner.kind.

Measured: with -f, every rung starts graphs.disagg in turn, sends the same prompts, and stops it;
a request's first token has to be the same on every rung.  With 16-bit weights near ties may not
be: float32 shows whether they are ties, --differing-max allows some.

Simulated: with --simulate, real planners on a pipeline of --ranks stages whose time is a formula,
with constants measured on an H200.  What admission costs the processor is measured on this machine
in the same command, unless --host-costs gives it.  Takes seconds; needs no GPU and no model.

examples:
  wavepp ablate -f configs/smollm2-cpu.yaml --workload reuse --prompt-tokens 2048 -c 4 --requests 32
  wavepp ablate -f configs/smollm2-cpu.yaml --set Common.model.dtype=float32 --prompt-tokens 512
  wavepp ablate -f my.yaml --workload mixed --repeats 3 --json ladder.json --html ladder.html
  wavepp ablate --ranks 8 --simulate --workload reuse-131k -c 8 --html ladder.html
  wavepp ablate --ranks 8 --simulate --workload cold-131k -c 16 --json | jq .rungs
  wavepp ablate --simulate --stage-time stage.json --round-ms 2 --workload reuse-131k -c 8
                        stages by `wavepp bench stage --json`, rounds over a slower network

Exit status: 0 all rungs ran, 1 something failed or an answer differed, 2 refused.
"""


REQUESTS_MEASURED = 32
MEASURED_OPTIONS = (
    "requests", "repeats", "differing_max", "prompt_tokens", "reuse_share", "families",
    "block_tokens", "token_range", "seed",
)  # fmt: skip
SIMULATED_OPTIONS = (
    "ranks", "requests", "wave_tokens_max", "wave_tokens_min", "block_tokens", "stage_time",
    "round_ms", "hop_ms", "host_costs",
)  # fmt: skip


def add_ablate(commands: Any) -> None:
    """Add the `ablate` command."""
    parser = commands.add_parser(
        "ablate",
        help="what each of the paper's ideas adds, on one workload",
        description=ABLATE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--simulate", action="store_true", help="simulate instead of measuring")
    add("--workload", default="",
        help="measured: cold, reuse, mixed; default: reuse.  Simulated: cold-65k, cold-131k, "
        "cold-262k, reuse-131k, reuse-262k, mixed-131k; default: reuse-131k")  # fmt: skip
    add("-c", "--concurrency", type=int, default=4, help="clients; default: %(default)s")
    add("--requests", type=int,
        help="default: measured 32; simulated 8 per client, 32 at least")  # fmt: skip
    add("--json", nargs="?", const="-", metavar="FILE",
        help="write the report here too; without FILE: on stdout, and no table")  # fmt: skip
    add("--html", metavar="FILE", type=Path,
        help="write a page with charts here; it loads nothing from anywhere")  # fmt: skip
    measured = parser.add_argument_group("measured").add_argument
    measured("-f", "--config-file", metavar="FILE", action="append", default=[],
             help="of the graph; repeatable")  # fmt: skip
    measured("--set", metavar="PATH=VALUE", action="append", default=[], help="for the graph")
    measured("--repeats", type=int, default=1, help="of every rung; default: %(default)s")
    measured("--differing-max", type=int, default=0,
             help="first tokens of a run that may differ, near ties of 16-bit weights; default: "
             "%(default)s")  # fmt: skip
    measured("--trace-out", metavar="FOLDER", type=Path,
             help="write a timeline of every rung's last repeat there, for "
             "https://ui.perfetto.dev")  # fmt: skip
    add_workload_options(measured)
    simulated = parser.add_argument_group("simulated").add_argument
    simulated("--ranks", type=int, default=8, help="P; default: %(default)s")
    simulated("--wave-tokens-max", type=int, default=16_384, help="M; default: %(default)s")
    simulated("--wave-tokens-min", type=int, default=8_192, help="b_min; default: %(default)s")
    simulated("--stage-time", metavar="FILE", type=Path,
              help="JSON: fixed_s, linear_s, square_s; default: measured on an H200")  # fmt: skip
    simulated("--round-ms", type=float, default=0.78,
              help="one agreement between ranks; default: %(default)s, measured between two "
              "processes of one host")  # fmt: skip
    simulated("--hop-ms", type=float, default=0.5,
              help="from a stage to the next; default: %(default)s")  # fmt: skip
    simulated("--host-costs", metavar="FILE", type=Path,
              help="JSON: what .details.costs of another report holds; default: measured "
              "now")  # fmt: skip
    parser.set_defaults(run=run_ablate)


def run_ablate(args: argparse.Namespace) -> int:
    """Climb the ladder; return the exit status."""
    if args.simulate == bool(args.config_file):
        raise ConfigError("give either -f FILE to start graphs or --simulate")
    if min(args.concurrency, args.repeats) < 1 or (args.requests is not None and args.requests < 1):
        raise ConfigError("-c, --repeats and --requests are at least 1")
    if args.trace_out is not None and args.simulate:
        raise ConfigError("--trace-out needs -f FILE: a simulation has no timeline")
    if args.trace_out is not None and not args.trace_out.is_dir():
        raise ConfigError(f"{args.trace_out}: no such folder")
    for name in (args.html, args.json):  # found now, not after all rungs have run
        if name and not Path(name).parent.is_dir():
            raise ConfigError(f"{name}: no such folder")
    # SIGTERM ends a run as Ctrl-C does: whatever was started is stopped in order.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        report = _simulated(args) if args.simulate else _measured(args)
    finally:
        signal.signal(signal.SIGTERM, before)
    document = msgspec.json.format(msgspec.json.encode(report)).decode()
    if args.json == "-":
        print(document)
    else:
        print(render(report))
        if args.json:
            Path(args.json).write_text(document + "\n")
    if args.html is not None:
        from wavepp_worker.bench.ladder_page import ladder_page

        args.html.write_text(ladder_page(report))
    for failure in report.failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if report.failures else 0


def _measured(args: argparse.Namespace) -> LadderReport:
    from wavepp_worker.bench.ablate_measured import climb_measured
    from wavepp_worker.bench.figures import machine_facts
    from wavepp_worker.bench.serve import Target, find_model
    from wavepp_worker.bench.serve_run import Measured, measure, started_graph

    args.requests = args.requests or REQUESTS_MEASURED
    workload = workload_of(args, args.workload or "reuse")

    def run_rung(rung: Rung, warm_up: Any, prompts: Any, label: str) -> Measured:
        _note(f"{label}: starting the graph; {rung.adds}")
        changes = [*args.set, *rung.overrides()]
        timeline = args.trace_out and args.trace_out / f"{rung.name}.json"
        with started_graph(args.config_file, changes, timeline) as (url, metrics):
            target = Target(
                url=url,
                model=asyncio.run(find_model(url)),
                timeout_s=args.timeout_s,
                metrics_urls=metrics,
                wants_token_ids=True,
            )
            return measure(target, warm_up, prompts, args.concurrency, label)

    return climb_measured(
        workload,
        run_rung,
        concurrency=args.concurrency,
        repeats=args.repeats,
        differing_max=args.differing_max,
        machine=machine_facts(),
        command=_command(args, workload.kind),
    )


def _simulated(args: argparse.Namespace) -> LadderReport:
    from wavepp_worker.bench.ablate_simulated import (
        H200_STAGE,
        LOADS,
        SimulatedOptions,
        climb_simulated,
    )
    from wavepp_worker.bench.figures import machine_facts
    from wavepp_worker.bench.host_costs import measure_costs
    from wavepp_worker.bench.planners import PlannerOptions
    from wavepp_worker.bench.planners_command import check_waves, read_stage_time

    workload = args.workload or "reuse-131k"
    if workload not in LOADS:
        raise ConfigError(f"--workload {workload}: simulated ones are {', '.join(LOADS)}")
    if args.ranks < 1:
        raise ConfigError("--ranks is at least 1")
    if min(args.round_ms, args.hop_ms) < 0:
        raise ConfigError("--round-ms and --hop-ms are not negative")
    check_waves(args)
    options = SimulatedOptions(
        workload=workload,
        concurrency=args.concurrency,
        pipeline=PlannerOptions(
            stages=args.ranks,
            block_tokens=args.block_tokens,
            wave_tokens_max=args.wave_tokens_max,
            wave_tokens_min=args.wave_tokens_min,
            hop_s=args.hop_ms / 1e3,
            time=read_stage_time(args.stage_time, H200_STAGE),
        ),
        round_s=args.round_ms / 1e3,
        requests=args.requests,
    )
    machine = machine_facts()
    if args.host_costs is None:
        costs = measure_costs(options.load.tokens, args.block_tokens, _note)
    else:
        costs = _read_costs(args.host_costs)
    return climb_simulated(options, costs, machine, _command(args, workload), _note)


def _read_costs(file: Path) -> Any:
    from wavepp_worker.bench.host_costs import STEPS, HostCost, HostCosts

    try:
        by_mode = msgspec.json.decode(file.read_bytes(), type=dict[str, HostCost])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--host-costs {file}: {error}") from error
    if by_mode.keys() != STEPS.keys():
        raise ConfigError(f"--host-costs {file}: one entry each for {', '.join(STEPS)}")
    return HostCosts(by_mode)


def _note(line: str) -> None:
    print(f"• {line}", file=sys.stderr)


def _command(args: argparse.Namespace, workload: str) -> str:
    """Return the command that does the same again, without paths of this machine."""
    words = ["wavepp", "ablate"]
    if args.simulate:
        words.append("--simulate")
    for name in args.config_file:
        words += ["-f", Path(name).name]
    for change in args.set:
        words += ["--set", change]
    words += ["--workload", workload, "-c", str(args.concurrency)]
    for name in SIMULATED_OPTIONS if args.simulate else MEASURED_OPTIONS:
        value = getattr(args, name)
        if value is not None:
            text = value.name if isinstance(value, Path) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return shlex.join(words)
