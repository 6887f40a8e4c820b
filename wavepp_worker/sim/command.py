"""`wavepp sim`: the command line of the simulation."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec

from wavepp_worker.admission.settings import AdmissionMode
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.limits import STAGES_MAX
from wavepp_worker.sim.knobs import FAULTS
from wavepp_worker.sim.workload import RECORDED_BLOCK_TOKENS

SIM_HELP = """\
Run the production admission, cache and executor of P ranks in one process, under a clock that
jumps, and try to break them.  Stages compute digests of the exact prefix: any wrong reuse changes
an answer.  Observers check agreement, capacity, order, answers, hand-offs and what the router is
told; a violation is printed with its seed, the shortest command that shows it, and the story of
the requests involved.

examples:
  wavepp sim --ranks 4 --seeds 200                          a campaign, all faults
  wavepp sim --ranks 8 --hybrid --seeds 2000 --json         recurrent and sliding windows as well
  wavepp sim --seed 7 --faults cancel,storm --story all     one world and what happened in it
  wavepp sim --ranks 64 --trace conversation.jsonl --requests 20000
                        a recorded trace, from its start again when it ends; without faults
                        unless they are named

Equal seeds and options give equal output, but for the wall time and the rate derived from it.
From 1,000 seeds on, a branch that worlds of this kind can reach and none reached counts as a
violation.  Exit status: 0 nothing found, 1 a violation, 2 refused.
"""
CAMPAIGN_COVERAGE_SEEDS = 1000  # from so many seeds on, what was never reached is a violation
RECORDED_BLOCKS_PER_BLOCK = 8


def add_sim(commands: Any) -> None:
    """Add the `sim` command."""
    parser = commands.add_parser(
        "sim",
        help="simulate P ranks under faults",
        description=SIM_HELP,
        epilog="faults:\n" + "\n".join(f"  {name:15} {text}" for name, text in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="P; default: %(default)s")
    add("--seeds", type=int, default=100, help="worlds of the campaign; default: %(default)s")
    add("--first-seed", type=int, default=0, help="default: %(default)s")
    add("--seed", type=int, help="run this one world instead")
    add("--requests", type=int, help="per world; default: 24, with --trace all of it")
    add("--hybrid", action="store_true", help="recurrent and sliding windows beside dense ones")
    add("--no-host", action="store_true", help="no host tier")
    add("--mode", choices=get_args(AdmissionMode), default="leases",
        help="admission.mode of the worker; default: %(default)s")  # fmt: skip
    add("--faults", default="all", metavar="all|none|NAME,...", help="default: %(default)s")
    add("--jobs", type=int, help="processes; default: one per core")
    add("--story", metavar="RID|all", help="with --seed: print what happened to requests")
    add("--trace", metavar="FILE", type=Path, help="Mooncake JSONL as the workload of one world")
    add("--trace-block-tokens", type=int,
        default=RECORDED_BLOCKS_PER_BLOCK * RECORDED_BLOCK_TOKENS,
        help="recorded tokens that become one cache block; a multiple of "
        f"{RECORDED_BLOCK_TOKENS}; default: %(default)s")  # fmt: skip
    add("--time-scale", type=float, default=0.001,
        help="factor on a trace's arrival times; default: %(default)s")  # fmt: skip
    add("--json", action="store_true", help="last line of output: everything as one JSON object")
    parser.set_defaults(run=run_sim)


def run_sim(args: argparse.Namespace) -> int:
    """Run the simulation; return the exit status."""
    from wavepp_worker.sim import campaign

    options = _options(args)
    began = time.monotonic()
    never: list[str] = []
    if args.trace is not None:
        totals = _run_trace(args, options)
    elif args.seed is not None:
        totals = _run_one(args, options)
    else:
        jobs = args.jobs or campaign.default_jobs()
        progress = _Progress(args.seeds)
        totals = campaign.run_seeds(args.first_seed, args.seeds, options, jobs, progress.show)
        progress.done()
        if args.seeds >= CAMPAIGN_COVERAGE_SEEDS:
            never = never_reached(totals, options)
    if args.trace is None:
        totals.findings = campaign.explain_all(totals.findings, options)
    wall_s = time.monotonic() - began
    _print_totals(totals, never, wall_s)
    if args.json:
        _print_json(totals, never, wall_s, options.ranks)
    return 1 if totals.findings or never else 0


def never_reached(totals: Any, options: Any) -> list[str]:
    """Return the marks and verdicts that a campaign of this kind should have reached."""
    from wavepp_worker.base.marks import MARKS
    from wavepp_worker.sim.coverage import exempt

    excused = exempt(options)
    names = [name for name in MARKS if not totals.marks[name]]
    names += [f"verdict {name}" for name, count in totals.verdicts.items() if not count]
    return sorted(name for name in names if name not in excused)


def _options(args: argparse.Namespace) -> Any:
    from wavepp_worker.sim.knobs import SimOptions

    if not 1 <= args.ranks <= STAGES_MAX:
        raise ConfigError(f"--ranks lies between 1 and {STAGES_MAX}")
    if args.requests is not None and args.requests < 1:
        raise ConfigError("--requests is at least 1")
    if args.seeds < 1 or (args.jobs is not None and args.jobs < 1):
        raise ConfigError("--seeds and --jobs are at least 1")
    if args.time_scale <= 0:
        raise ConfigError("--time-scale is above 0")
    if args.trace_block_tokens < 1 or args.trace_block_tokens % RECORDED_BLOCK_TOKENS:
        raise ConfigError(f"--trace-block-tokens is a multiple of {RECORDED_BLOCK_TOKENS}")
    if args.story is not None and args.seed is None:
        raise ConfigError("--story goes with --seed")
    faults: tuple[str, ...] = tuple(FAULTS)
    if args.faults == "none" or (args.trace is not None and args.faults == "all"):
        faults = ()
    elif args.faults != "all":
        faults = tuple(dict.fromkeys(args.faults.split(",")))
        unknown = [name for name in faults if name not in FAULTS]
        if unknown:
            raise ConfigError(f"--faults: no such fault: {', '.join(unknown)}")
    return SimOptions(
        ranks=args.ranks,
        requests=args.requests or 24,
        is_hybrid=args.hybrid,
        has_host=not args.no_host,
        mode=args.mode,
        faults=faults,
    )


def _run_one(args: argparse.Namespace, options: Any) -> Any:
    from wavepp_worker.sim.campaign import Totals, run_world
    from wavepp_worker.sim.world import World

    rids = None if args.story in (None, "all") else _rids(args.story)
    world = World(args.seed, options, storyteller=args.story is not None)
    totals = Totals()
    totals.add(run_world(world))
    if args.story is not None:
        print(world.story(world.story_rids() if rids is None else rids))
    return totals


def _run_trace(args: argparse.Namespace, options: Any) -> Any:
    from wavepp_worker.sim.campaign import Totals, explain_trace, run_world
    from wavepp_worker.sim.knobs import BLOCK_TOKENS
    from wavepp_worker.sim.trace_world import trace_knobs
    from wavepp_worker.sim.workload import trace_length, trace_prompts
    from wavepp_worker.sim.world import World

    count, seed = args.requests or trace_length(args.trace), args.seed or 0
    prompts = list(
        trace_prompts(
            args.trace,
            count,
            block_tokens=BLOCK_TOKENS,
            trace_block_tokens=args.trace_block_tokens,
            time_scale=args.time_scale,
        )
    )
    knobs = trace_knobs(seed, options, prompts)
    print(f"• {count} requests, {options.ranks} ranks", file=sys.stderr)

    def make(requests: int, has_stories: bool) -> World:
        fewer, first = msgspec.structs.replace(options, requests=requests), prompts[:requests]
        return World(seed, fewer, knobs=knobs, prompts=first, storyteller=has_stories)

    world = make(count, False)
    totals = Totals()
    totals.add(run_world(world))
    if totals.findings:
        words = [f"wavepp sim --trace {args.trace}", f"--time-scale {args.time_scale}"]
        words.append(f"--trace-block-tokens {args.trace_block_tokens}")
        totals.findings = [explain_trace(totals.findings[0], world, make, " ".join(words))]
    return totals


def _rids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--story {text}: request numbers or all") from error


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items() if count)
    return str(value)


def _print_totals(totals: Any, never: list[str], wall_s: float) -> None:
    print(f"{totals.seeds} worlds, {totals.requests} requests, {totals.rounds} rounds, "
          f"{totals.epochs} epochs, {wall_s:.1f} s, "
          f"{totals.requests / wall_s:,.0f} requests per second of simulation")  # fmt: skip
    print(f"ended      {_plain(dict(sorted(totals.ends.items())))}")
    print(f"verdicts   {_plain(dict(sorted(totals.verdicts.items())))}")
    print(f"tokens     {totals.reused_tokens} reused, {totals.computed_tokens} computed")
    print(f"hand-offs  {totals.read_handoffs} read, {totals.lost_handoffs} too late")
    for finding in totals.findings:
        print(f"\nVIOLATION seed={finding.seed}: {finding.text}")
        if finding.command:
            print(f"shortest:  {finding.command}\n{finding.story}")
    for name in never:
        print(f"VIOLATION never reached: {name}")
    print(f"violations {len(totals.findings) + len(never)}")


def _print_json(totals: Any, never: list[str], wall_s: float, ranks: int) -> None:
    document = {
        "ranks": ranks,
        "seeds": totals.seeds,
        "requests": totals.requests,
        "rounds": totals.rounds,
        "steps": totals.steps,
        "epochs": totals.epochs,
        "ends": dict(sorted(totals.ends.items())),
        "verdicts": dict(sorted(totals.verdicts.items())),
        "marks": dict(sorted(totals.marks.items())),
        "reused_tokens": totals.reused_tokens,
        "computed_tokens": totals.computed_tokens,
        "read_handoffs": totals.read_handoffs,
        "lost_handoffs": totals.lost_handoffs,
        "never_reached": never,
        "violations": len(totals.findings) + len(never),
        "findings": totals.findings,
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(totals.requests / wall_s, 3),
    }
    print(msgspec.json.encode(document).decode())


class _Progress:
    """One line on stderr, if that is a terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_shown = sys.stderr.isatty()

    def show(self, done: int) -> None:
        if self._is_shown:
            print(f"\r• {done} of {self._total} worlds", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
