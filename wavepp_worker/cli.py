"""The `wavepp` command, and `dynamo serve` in the habits of Dynamo 0.3.

Dynamo 1.6 has no command of its own; ours adds `dynamo serve` on top of its components.
`wavepp serve` is the same under a name that no later Dynamo can take.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from graphs.deployment import Deployment, Folders, command_line, deploy, process_plans
from graphs.graph import Graph, ServiceArgs
from graphs.plan_command import add_plan
from graphs.preflight import preflight, visible_gpus
from graphs.render_command import add_render
from graphs.resolve import resolve
from wavepp_worker import __version__
from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench.ablate_command import add_ablate
from wavepp_worker.bench.command import add_bench
from wavepp_worker.config.json_schema import graph_schema, render, worker_schema
from wavepp_worker.config.load import (
    Source,
    convert,
    merge_sources,
    parse_source,
    read_override,
    read_source,
)
from wavepp_worker.config.schema import Config, DynamoConfig
from wavepp_worker.obs.trace_file import merge_parts
from wavepp_worker.serving.rank_command import add_rank
from wavepp_worker.sim.command import add_sim

EXIT_OK, EXIT_REFUSED, EXIT_INTERRUPTED = 0, 2, 130
OVERRIDE = re.compile(r"--([A-Z]\w*(?:\.[\w-]+)+)(=.*)?", re.DOTALL)

SERVE_HELP = """\
Start every process of a graph on this machine, wait until it answers, stop it in order.

examples:
  %(prog)s graphs.disagg -f configs/smollm2-cpu.yaml
  %(prog)s graphs.disagg -f configs/smollm2-cpu.yaml --PrefillWorker.ServiceArgs.workers=2
  %(prog)s graphs.disagg -f configs/smollm2-cpu.yaml -f configs/etcd-nats.yaml --dry-run
  %(prog)s graphs.disagg -f configs/smollm2-cpu.yaml --trace-out timeline.json
  %(prog)s graphs.disagg:Frontend -f my.yaml --set PrefillWorker.cache.block_tokens=32
"""

SERVE_EPILOG = """\
configuration, later wins:
  1. the files, in order, or the YAML text in DYN_DEPLOYMENT_CONFIG instead of them
  2. --set path=value and --Service.path=value, --Service.path value
  3. --host and --port

A file has a section per component, `Common` for keys that components share by
`common-configs: [key]`, and `Dynamo` for planes and discovery.  `wavepp print-schema` lists
every key, `--dry-run` shows what would run.  Exit status: 0 stopped by you, 1 a process failed,
2 refused before anything started.
"""

TOP_HELP = """\
A live view of every stage: how busy it is, what it waits for, how full its cache is.  Without
--metrics it finds the graphs that you run on this machine.

examples:
  wavepp top
  wavepp top --metrics http://127.0.0.1:9090/metrics --interval-s 5
"""

TIMELINE_HELP = """\
Merge what the processes of a prefill worker wrote into its `obs.trace_folder` into one file that
https://ui.perfetto.dev opens.  `serve --trace-out FILE` does all of this by itself; this is for
workers that were started otherwise, for a run that goes on, and for one that was killed.

example:
  wavepp timeline trace.json.parts trace.json
"""

WAVEPP_HELP = """\
WavePP: a prefill-only, pipeline-parallel worker for NVIDIA Dynamo.

examples:
  wavepp serve graphs.disagg -f configs/smollm2-cpu.yaml     start everything and chat
  wavepp rank -f worker.yaml --ranks 1 --leader HOST:PORT    a worker's other hosts
  wavepp check-config configs/smollm2-cpu.yaml               find mistakes before a start
  wavepp print-schema                                        every key, its type and default
  wavepp render graphs.disagg -f my.yaml --kubernetes ...    manifests for Dynamo's operator
  wavepp plan MODEL --gpus 4 --gpu-memory 80GiB              what fits: cache, waves, headroom
  wavepp bench idle                                          what the pipeline adds to a request
  wavepp bench serve -f configs/smollm2-cpu.yaml             throughput, latency, reuse, stage times
  wavepp ablate --simulate --workload reuse-131k -c 8        what each of the paper's ideas adds
  wavepp sim --ranks 4 --hybrid                              try to break admission, in simulation
  wavepp top                                                 watch a running worker's stages

`wavepp COMMAND --help` says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `wavepp`; return the exit status."""
    parser = _parser("wavepp", WAVEPP_HELP)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    add_rank(commands)
    _add_check(commands)
    _add_schema(commands)
    add_render(commands)
    add_plan(commands)
    add_bench(commands)
    add_ablate(commands)
    _add_top(commands)
    _add_timeline(commands)
    add_sim(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(run=lambda _args: print(__version__))
    return _run(parser, sys.argv[1:] if argv is None else argv)


def dynamo_main(argv: Sequence[str] | None = None) -> int:
    """Run `dynamo`, which knows `serve` alone; return the exit status."""
    parser = _parser("dynamo", "Dynamo's serve command, provided by WavePP on top of Dynamo 1.6.\n")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_serve(commands)
    return _run(parser, sys.argv[1:] if argv is None else argv)


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"wavepp {__version__}")
    return parser


def _run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    try:
        plain, overrides = split_overrides(argv)
        args = parser.parse_args(plain)
        if overrides and args.command not in ("serve", "render"):
            raise ConfigError(f"{args.command} takes no --{overrides[0].partition('=')[0]}")
        args.overrides = overrides
        return int(args.run(args) or EXIT_OK)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `wavepp print-schema | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take Dynamo 0.3's overrides out of a command line.

    Known forms: `--Service.key=value`, `--Service.key value` and `--Service.key = value`.

    Returns:
        (everything else, the overrides as `Service.key=value`).

    Raises:
        ConfigError: an override without a value.
    """
    plain: list[str] = []
    overrides: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        match = OVERRIDE.fullmatch(word)
        if not match:
            plain.append(word)
            continue
        value = match[2]
        if value is None:
            if words[:1] == ["="]:
                words.pop(0)
            if not words or words[0].startswith("-"):
                raise ConfigError(f"{word}: needs a value, as in {word}=1")
            value = "=" + words.pop(0)
        overrides.append(match[1] + value)
    return plain, overrides


# ── serve ────────────────────────────────────────────────────────────────────────────────────


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="start a graph: frontend, prefill and decode workers",
        description=SERVE_HELP,
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s GRAPH [-f FILE ...] [options] [--set PATH=VALUE ...] [--Service.path=val]",
    )
    add = parser.add_argument
    add("graph", metavar="GRAPH", help="module, module:Component or path/to/file.py[:Component]")
    add("-f", "--config-file", metavar="FILE", action="append", default=[], help="YAML; repeatable")
    add(
        "--set",
        metavar="PATH=VALUE",
        action="append",
        default=[],
        help="change one key; repeatable",
    )
    add("--service-name", metavar="NAME", default=os.environ.get("DYNAMO_SERVICE_NAME", ""),
        help="start this component alone")  # fmt: skip
    add("--working-dir", metavar="DIR", default=".", help="folder that GRAPH is imported from")
    add("-p", "--port", type=int, default=os.environ.get("DYNAMO_PORT"), help="of the frontend")
    add("--host", default=os.environ.get("DYNAMO_HOST"), help="address the frontend listens on")
    add("--dry-run", action="store_true", help="print the configuration and the commands as JSON")
    add("--keep-going", action="store_true",
        help="when a process ends, go on while its component has another")  # fmt: skip
    add("--ready-file", metavar="FILE", type=Path,
        help="write addresses and process ids here, as JSON, once the graph answers")  # fmt: skip
    add("--trace-out", metavar="FILE", type=Path,
        help="write a timeline here at the end; https://ui.perfetto.dev opens it")  # fmt: skip
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    working_dir = Path(args.working_dir)
    if not working_dir.is_dir():
        raise ConfigError(f"--working-dir {working_dir}: no such folder")
    graph = resolve(args.graph, working_dir, args.service_name)
    source = _read_files(args.config_file, os.environ.get("DYN_DEPLOYMENT_CONFIG", ""))
    changes = [*args.set, *args.overrides, *_address_overrides(graph, args)]
    parts = None
    if args.trace_out is not None:
        parts = trace_parts(args.trace_out)
        changes += _trace_overrides(graph, parts)
    deployment = deploy(graph, read_override(changes).over(source))
    if args.dry_run:
        print(msgspec.json.format(msgspec.json.encode(dry_run(deployment, working_dir))).decode())
        return EXIT_OK
    preflight(deployment, os.environ)

    from graphs.launch import launch  # the other commands need no terminal library

    if parts is not None:
        shutil.rmtree(parts, ignore_errors=True)  # of a run that could not merge them
    try:
        return launch(
            deployment, working_dir, keep_going=args.keep_going, ready_file=args.ready_file
        )
    finally:
        if parts is not None:
            told = merge_timeline(parts, args.trace_out)
            shutil.rmtree(parts, ignore_errors=True)
            print(told)


def _read_files(files: Sequence[str], environment_text: str) -> Source:
    if environment_text:
        return parse_source(environment_text, "DYN_DEPLOYMENT_CONFIG")
    return merge_sources([read_source(file) for file in files])


def _address_overrides(graph: Graph, args: argparse.Namespace) -> list[str]:
    frontends = [component.name for component in graph.components if component.is_frontend]
    given = {"host": args.host, "port": args.port}
    return [f"{name}.{k}={v}" for name in frontends for k, v in given.items() if v is not None]


def _trace_overrides(graph: Graph, parts: Path) -> list[str]:
    workers = [c.name for c in graph.components if issubclass(c.config_type, Config)]
    if not workers:
        raise ConfigError(f"--trace-out: {graph.spec} has no prefill worker")
    quoted = msgspec.json.encode(str(parts)).decode()  # YAML, whatever the path's letters
    return [f"{name}.obs.trace_folder={quoted}" for name in workers]


def trace_parts(file: Path) -> Path:
    """Return where the parts of a timeline are kept until they are merged: beside it.

    Raises:
        ConfigError: there is no such place.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: {file.parent} is no folder")
    return file.resolve().with_name(f"{file.name}.parts")


def merge_timeline(parts: Path, file: Path) -> str:
    """Merge the parts of a timeline; return what to tell of it."""
    merged = merge_parts(parts, file)
    lost = f"; {merged.dropped:,} older events were dropped" if merged.dropped else ""
    return (
        f"timeline: {file}, {merged.events:,} events of {merged.processes} processes{lost}; "
        "open it in https://ui.perfetto.dev"
    )


def dry_run(deployment: Deployment, working_dir: Path) -> dict[str, Any]:
    """Return what a start would use: {"config": resolved tree, "processes": [...]}.

    `$RUN` stands for the private folder, which only a real start makes; health ports are chosen
    then too and shown as 1, 2, ...
    """
    plans = process_plans(
        deployment,
        Folders(config="$RUN/config", store="$RUN/store", temporary="$RUN/tmp"),
        environment=os.environ,
        gpus=visible_gpus(os.environ),
        system_ports=iter(range(1, 1 << 16)),
        import_root=str(working_dir.resolve()),
    )
    processes = [
        {"name": plan.name, "command": command_line(plan), "env": plan.env} for plan in plans
    ]
    return {"config": deployment.resolved(), "processes": processes}


# ── timeline ─────────────────────────────────────────────────────────────────────────────────


def _add_timeline(commands: Any) -> None:
    parser = commands.add_parser(
        "timeline",
        help="make a Perfetto trace of the parts in obs.trace_folder",
        description=TIMELINE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.set_defaults(run=_timeline)


def _timeline(args: argparse.Namespace) -> int:
    if not any(args.folder.glob("*/*.jsonl")):
        raise ConfigError(f"{args.folder}: no parts of a timeline")
    print(merge_timeline(args.folder, args.file))
    return EXIT_OK


# ── top ──────────────────────────────────────────────────────────────────────────────────────


def _add_top(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running worker's stages",
        description=TOP_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--metrics", metavar="URL", action="append", default=[],
        help="metrics page of a prefill worker; repeatable")  # fmt: skip
    add("--interval-s", type=float, default=1.0, help="default: %(default)s")
    add("--count", type=int, help="print so many views and end; default: until Ctrl-C")
    parser.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from wavepp_worker.obs.top import find_pages, run_top

    if args.interval_s <= 0:
        raise ConfigError("--interval-s is a number of seconds above 0")
    pages = args.metrics or find_pages(Path(tempfile.gettempdir()))
    return run_top(pages, args.interval_s, args.count)


# ── check-config, print-schema ───────────────────────────────────────────────────────────────


def _add_check(commands: Any) -> None:
    parser = commands.add_parser(
        "check-config",
        help="find mistakes in configuration files",
        description="Check files as `serve` would: unknown keys, types, ranges, relations, and\n"
        "the model folder when it is on this machine.  A file is a graph file, or the plain\n"
        "configuration of one prefill worker.  Several files are laid over one another.\n\n"
        "example:\n  wavepp check-config configs/smollm2-cpu.yaml configs/etcd-nats.yaml",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="+")
    parser.add_argument("--graph", default="graphs.disagg", help="default: %(default)s")
    parser.add_argument("--working-dir", metavar="DIR", default=".")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    source = merge_sources([read_source(file) for file in args.file])
    names = ", ".join(args.file)
    if source.tree and not any(key[:1].isupper() for key in source.tree):
        convert(source, Config)
        print(f"{names}: a valid worker configuration")
        return EXIT_OK
    deployment = deploy(resolve(args.graph, Path(args.working_dir)), source)
    for component in deployment.graph.components:
        settings = deployment.settings[component.name]
        model = getattr(settings, "model", None)
        if model is not None and not Path(model.path).expanduser().exists():
            print(f"note: {component.name}.model.path: {model.path} is not here, so not checked")
            continue
        try:
            component.check(settings)
        except ConfigError as error:
            raise ConfigError(f"{component.name}: {error}") from error
    print(f"{names}: a valid configuration of {args.graph}")
    return EXIT_OK


def _add_schema(commands: Any) -> None:
    parser = commands.add_parser(
        "print-schema",
        help="print the JSON schema of configuration files",
        description="Print the JSON schema of a graph file: every key with type, default and "
        "meaning.  Editors use it through the first line of a file:\n\n"
        "  # yaml-language-server: $schema=schema.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("graph", metavar="GRAPH", nargs="?", default="graphs.disagg")
    parser.add_argument("--worker", action="store_true", help="of one prefill worker's plain file")
    parser.set_defaults(run=_print_schema)


def _print_schema(args: argparse.Namespace) -> int:
    sys.stdout.write(render(worker_schema() if args.worker else schema_of(args.graph)))
    return EXIT_OK


def schema_of(spec: str) -> dict[str, Any]:
    """Return the schema of a graph's configuration files."""
    graph = resolve(spec, Path())
    types = {component.name: component.config_type for component in reversed(graph.components)}
    return graph_schema(types, ServiceArgs, DynamoConfig)
