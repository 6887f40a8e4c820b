"""`wavepp bench serve`: its command line, progress and report."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from wavepp_worker.base.errors import ConfigError

SERVE_HELP = """\
Drive an OpenAI completions endpoint with long prompts, and say how fast, how reused, and where the
stages' time went.  Prompts are seeded token ids; one answer token by default, for a prefill test.

examples:
  wavepp bench serve -f configs/smollm2-cpu.yaml --workload reuse --prompt-tokens 2048 -c 4
                        starts the graph, warms the shared prefixes, closed loop with 4 clients
  wavepp bench serve --url http://127.0.0.1:8000/v1 --workload cold --prompt-tokens 131072 -c 8
                        drives a server that runs already; any OpenAI-compatible one
  wavepp bench serve -f my.yaml --trace conversation.jsonl --trace-block-tokens 16 --time-scale 0.5
                        replays a Mooncake trace: 512 recorded tokens become 16, twice as fast
"""


def add_serve_bench(benches: Any) -> None:
    """Add `bench serve`."""
    parser = benches.add_parser(
        "serve",
        help="throughput and latency of a running or a fresh graph",
        description=SERVE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-f", "--config-file", metavar="FILE", action="append", default=[],
        help="start graphs.disagg from these files; repeatable")  # fmt: skip
    add("--set", metavar="PATH=VALUE", action="append", default=[], help="for the graph")
    add("--url", help="of a running API, e.g. http://127.0.0.1:8000/v1")
    add("--metrics", metavar="URL", action="append", default=[],
        help="metrics page of a prefill worker; repeatable; found by itself with -f")  # fmt: skip
    add("--model", default="", help="default: the only one served")
    add("--workload", choices=["cold", "reuse", "mixed"], default="cold")
    add_workload_options(add)
    add("--requests", type=int, default=64, help="default: %(default)s; of a trace: the first ones")
    add("--trace", metavar="FILE", type=Path, help="Mooncake JSONL instead of a workload")
    add("--trace-block-tokens", type=int, default=512,
        help="tokens sent for 512 recorded ones; default: %(default)s")  # fmt: skip
    add("--time-scale", type=float, help="open loop: factor on a trace's arrival times")
    add("--rate", type=float, help="open loop: requests per second, evenly spaced")
    add("-c", "--concurrency", type=int, default=4, help="closed loop; default: %(default)s")
    add("--output-tokens", type=int, default=1, help="default: %(default)s")
    add("--json", metavar="FILE", type=Path, help="write the summary here")
    add("--trace-out", metavar="FILE", type=Path,
        help="write a timeline of the started graph here, for https://ui.perfetto.dev")  # fmt: skip
    add("--requests-out", metavar="FILE", type=Path, help="write one JSON line per request here")
    parser.set_defaults(run=run_serve_bench)


def add_workload_options(add: Any) -> None:
    """Add what shapes the prompts of a workload, and how long one may take."""
    add("--prompt-tokens", type=int, default=2048, help="default: %(default)s")
    add("--reuse-share", type=float, default=0.9, help="of a reused prompt; default: %(default)s")
    add("--families", type=int, default=4, help="shared prefixes; default: %(default)s")
    add("--block-tokens", type=int, default=64,
        help="cache block of the server, for what can be reused; default: %(default)s")  # fmt: skip
    add("--token-range", default="100:20000", metavar="LOW:HIGH", help="default: %(default)s")
    add("--seed", type=int, default=1, help="default: %(default)s")
    add("--timeout-s", type=float, default=600.0, help="of one request; default: %(default)s")


def run_serve_bench(args: argparse.Namespace) -> int:
    """Run the benchmark; return the exit status: 1 if any request failed."""
    if bool(args.url) == bool(args.config_file):
        raise ConfigError("give either --url of a running API or -f FILE to start a graph")
    if args.trace_out is not None and args.url:
        raise ConfigError("--trace-out needs a graph of its own: -f FILE")
    if args.rate is not None and args.rate <= 0:
        raise ConfigError("--rate is a number of requests per second")
    if args.time_scale is not None and args.trace is None:
        raise ConfigError("--time-scale needs --trace")
    warm_up, prompts = _prompts(args)
    if args.url:
        return _measure(args, args.url.rstrip("/"), tuple(args.metrics), warm_up, prompts)
    from wavepp_worker.bench.serve_run import started_graph

    print("• starting the graph", file=sys.stderr)
    with started_graph(args.config_file, args.set, args.trace_out) as (url, metrics):
        return _measure(args, url, metrics, warm_up, prompts)


def _prompts(args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    from wavepp_worker.bench.workload import read_trace, trace_prompts

    if args.trace is not None:
        low, high = _token_range(args)
        lines = read_trace(args.trace, args.requests)
        return [], list(
            trace_prompts(
                lines,
                trace_block_tokens=args.trace_block_tokens,
                block_tokens=args.block_tokens,
                time_scale=args.time_scale,
                seed=args.seed,
                token_low=low,
                token_high=high,
            )
        )
    load = workload_of(args, args.workload)
    return load.warm_up(), list(load.prompts())


def workload_of(args: argparse.Namespace, kind: str) -> Any:
    """Return the `Workload` of that kind that the options describe.

    Raises:
        ConfigError: it makes no sense.
    """
    from wavepp_worker.bench.workload import Workload

    low, high = _token_range(args)
    return Workload(
        kind=kind,
        prompt_tokens=args.prompt_tokens,
        requests=args.requests,
        reuse_share=args.reuse_share,
        families=args.families,
        block_tokens=args.block_tokens,
        seed=args.seed,
        token_low=low,
        token_high=high,
    )


def _token_range(args: argparse.Namespace) -> tuple[int, int]:
    low, _, high = args.token_range.partition(":")
    if not (low.isdigit() and high.isdigit()):
        raise ConfigError(f"--token-range {args.token_range}: two numbers, as in 100:20000")
    return int(low), int(high)


def _measure(
    args: argparse.Namespace,
    url: str,
    metrics: tuple[str, ...],
    warm_up: list[Any],
    prompts: list[Any],
) -> int:
    from wavepp_worker.bench import serve
    from wavepp_worker.bench.serve_run import measure

    model = args.model or asyncio.run(serve.find_model(url))
    target = serve.Target(
        url=url,
        model=model,
        output_tokens=args.output_tokens,
        timeout_s=args.timeout_s,
        metrics_urls=metrics,
    )
    concurrency: int | None = args.concurrency
    if args.rate is not None:
        prompts = [
            msgspec.structs.replace(p, at_s=index / args.rate) for index, p in enumerate(prompts)
        ]
    if args.rate is not None or args.time_scale is not None:
        concurrency = None
    measured = measure(target, warm_up, prompts, concurrency)
    report = measured.report
    if args.requests_out is not None:
        lines = b"".join(msgspec.json.encode(answer) + b"\n" for answer in measured.answers)
        args.requests_out.write_bytes(lines)
    if args.json is not None:
        document = {"machine": machine_facts(), "options": _options(args), "report": report}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    print(render(report))
    return 1 if report.failed else 0


def render(report: Any) -> str:
    """Return the summary as text."""
    times = report.completion_s
    good = report.good_hit_share
    lines = [
        f"requests        {report.requests}, failed {report.failed}, in {report.seconds:.1f} s",
        f"prompt tokens/s {report.served_tokens_per_s:,.0f} served, "
        f"{report.computed_tokens_per_s:,.0f} computed",
        f"completion      p50 {times['p50']:.3f} s, p95 {times['p95']:.3f} s, "
        f"p99 {times['p99']:.3f} s, longest {times['max']:.3f} s",
        f"reused          {100 * report.cached_share:.1f} % of all prompt tokens"
        + ("" if good is None else f"; good hits {100 * good:.1f} % (80 % of what was expected)"),
    ]
    for key, causes in sorted(report.stage_seconds.items()):
        parts = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in causes.items())
        lines.append(f"stage {key:9} {parts} s")
    lines += [f"error           {text}: {count}" for text, count in report.errors.items()]
    return "\n".join(lines)


def machine_facts() -> dict[str, Any]:
    """Return what a reader of the figures needs to know of this machine."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that shape the run, without paths of this machine."""
    kept = dict(vars(args))
    for name in ("run", "command", "bench", "json", "requests_out", "trace_out", "overrides",
                 "metrics", "url"):  # fmt: skip
        kept.pop(name, None)
    kept["config_file"] = [Path(name).name for name in args.config_file]
    kept["trace"] = args.trace.name if args.trace else None
    return {name: value for name, value in kept.items() if value not in (None, [], "")}
