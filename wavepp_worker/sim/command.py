"""`wavepp sim`: the command line of the simulation."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.base.limits import STAGES_MAX
from wavepp_worker.sim.knobs import FAULTS

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
  wavepp sim --ranks 64 --trace conversation.jsonl --requests 20000 --time-scale 0.001
                        a recorded trace: each block of 512 tokens becomes one cache block

Equal seeds and options give equal output, wall time apart.  Exit status: 0 nothing found,
1 a violation, 2 refused.
"""
CAMPAIGN_COVERAGE_SEEDS = 1000  # from so many seeds on, what was never reached is a finding
TRACE_SLOTS = 4096


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
    add("--faults", default="all", metavar="all|none|NAME,...", help="default: %(default)s")
    add("--jobs", type=int, help="processes; default: one per core")
    add("--story", metavar="RID|all", help="with --seed: print what happened to requests")
    add("--trace", metavar="FILE", type=Path, help="Mooncake JSONL as the workload of one world")
    add("--time-scale", type=float, default=0.001,
        help="factor on a trace's arrival times; default: %(default)s")  # fmt: skip
    add("--json", action="store_true", help="last line of output: everything as one JSON object")
    parser.set_defaults(run=run_sim)


def run_sim(args: argparse.Namespace) -> int:
    """Run the simulation; return the exit status."""
    from wavepp_worker.sim import campaign

    options = _options(args)
    began = time.monotonic()
    if args.trace is not None:
        return _run_trace(args, options, began)
    if args.seed is not None:
        return _run_one(args, options, began)
    if args.seeds < 1 or (args.jobs is not None and args.jobs < 1):
        raise ConfigError("--seeds and --jobs are at least 1")
    jobs = args.jobs or campaign.default_jobs()
    progress = _Progress(args.seeds)
    totals = campaign.run_seeds(args.first_seed, args.seeds, options, jobs, progress.show)
    progress.done()
    for number, finding in enumerate(totals.findings[:5]):
        totals.findings[number] = campaign.explain(finding, options)
    wall_s = time.monotonic() - began
    never = never_reached(totals, options) if args.seeds >= CAMPAIGN_COVERAGE_SEEDS else []
    _print_totals(totals, never, wall_s)
    if args.json:
        _print_json(totals, never, wall_s)
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
        faults=faults,
    )


def _run_one(args: argparse.Namespace, options: Any, began: float) -> int:
    from wavepp_worker.sim.world import Violation, World

    world = World(args.seed, options)
    found = ""
    try:
        report = world.run()
        print(_lines(report))
    except Violation as violation:
        found = str(violation)
        print(f"VIOLATION seed={args.seed}: {found}")
    if args.story is not None:
        rids = world.story_rids() if args.story == "all" else _rids(args.story)
        print(world.story(rids))
    if args.json:
        document = {"seed": args.seed, "violations": [found] if found else []}
        print(msgspec.json.encode(document | {"wall_s": time.monotonic() - began}).decode())
    return 1 if found else 0


def _run_trace(args: argparse.Namespace, options: Any, began: float) -> int:
    from wavepp_worker.cache.window import WindowSpec
    from wavepp_worker.sim.knobs import BLOCK_TOKENS, Knobs, draw_knobs
    from wavepp_worker.sim.workload import trace_length, trace_prompts
    from wavepp_worker.sim.world import Violation, World

    if args.time_scale <= 0:
        raise ConfigError("--time-scale is above 0")
    count = args.requests or trace_length(args.trace)
    prompts = list(trace_prompts(args.trace, count, BLOCK_TOKENS, args.time_scale))
    longest = max(prompt.prompt_tokens for prompt in prompts) // BLOCK_TOKENS + 1
    seed = args.seed or 0
    drawn = draw_knobs(seed, options)
    slots = max(TRACE_SLOTS, 4 * longest)
    dense = WindowSpec(slots=slots, host_slots=0 if args.no_host else slots)
    states = WindowSpec(kind="recurrent", slots=64, host_slots=0 if args.no_host else 256)
    knobs: Knobs = msgspec.structs.replace(
        drawn,
        windows=((dense, states) if args.hybrid else (dense,),) * args.ranks,
        batch=16,
        headroom_tokens=32 * BLOCK_TOKENS,
        floor_fraction=0.1,
        snapshot_interval_tokens=16 * BLOCK_TOKENS,
        wave_tokens_max=32 * BLOCK_TOKENS,
        wave_tokens_min=16 * BLOCK_TOKENS,
        hold_s=0.3,
    )
    options = msgspec.structs.replace(options, requests=count)
    print(f"• {count} requests, {args.ranks} ranks, {slots} slots each", file=sys.stderr)
    world = World(seed, options, knobs=knobs, prompts=prompts, storyteller=False)
    found = ""
    report = None
    try:
        report = world.run()
        print(_lines(report))
    except Violation as violation:
        found = str(violation)
        print(f"VIOLATION: {found}")
    wall_s = time.monotonic() - began
    print(f"{count / wall_s:,.0f} requests per second of simulation, {wall_s:.1f} s")
    if args.json:
        document = {
            "ranks": args.ranks,
            "requests": count,
            "report": report,
            "violations": [found] if found else [],
            "requests_per_s": count / wall_s,
            "wall_s": wall_s,
        }
        print(msgspec.json.encode(document).decode())
    return 1 if found else 0


def _rids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--story {text}: request numbers or all") from error


def _lines(report: Any) -> str:
    rows = msgspec.structs.asdict(report)
    return "\n".join(f"{name:16} {_plain(value)}" for name, value in rows.items())


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items() if count)
    return str(value)


def _print_totals(totals: Any, never: list[str], wall_s: float) -> None:
    print(f"{totals.seeds} worlds, {totals.requests} requests, {totals.rounds} rounds, "
          f"{totals.epochs} epochs, {wall_s:.1f} s")  # fmt: skip
    print(f"ended      {_plain(dict(sorted(totals.ends.items())))}")
    print(f"verdicts   {_plain(dict(sorted(totals.verdicts.items())))}")
    print(f"tokens     {totals.reused_tokens} reused, {totals.computed_tokens} computed")
    print(f"hand-offs  {totals.read_handoffs} read, {totals.lost_handoffs} too late")
    for finding in totals.findings:
        print(f"\nVIOLATION seed={finding.seed}: {finding.text}")
        if finding.command:
            print(f"shortest:  {finding.command}\n{finding.story}")
    for name in never:
        print(f"NEVER REACHED: {name}")
    print(f"violations {len(totals.findings)}")


def _print_json(totals: Any, never: list[str], wall_s: float) -> None:
    document = {
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
        "violations": len(totals.findings),
        "findings": totals.findings,
        "wall_s": round(wall_s, 3),
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
