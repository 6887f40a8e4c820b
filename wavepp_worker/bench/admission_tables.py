"""The report of `wavepp bench admission` as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from wavepp_worker.bench.admission import AdmissionReport, BlockReport
from wavepp_worker.bench.figures import Growth, Spread

NAME_WIDTH = 56


def render(report: AdmissionReport) -> str:
    """Return the tables."""
    options, machine = report.options, report.machine
    lines = [
        f"{options.concurrency} requests of {options.tokens:,} tokens on {options.ranks} ranks"
        + (", recurrent windows beside dense ones" if options.is_hybrid else ""),
        f"{machine.cpus} cores, {machine.cpu_model}, {machine.python}, "
        f"load average {machine.load_average:.1f}",
    ]
    for block in report.blocks:
        lines += ["", *_block_lines(block)]
    title = "growth with the prompt, medians, µs"
    lines += _growth_lines(title, "tokens", report.by_tokens)
    title = f"growth with how many wait ({options.waiting_tokens:,} tokens each), medians, µs"
    lines += _growth_lines(title, "waiting", report.by_waiting)
    return "\n".join(lines)


def _block_lines(block: BlockReport) -> Iterator[str]:
    yield _titles(f"blocks of {block.block_tokens} tokens; µs, one rank")
    for name, spread in block.work.spreads.items():
        yield _row(name, spread)
    walk = block.work.spreads["two walks: first walk"].p50
    yield f"  a probe takes {block.work.spreads['ours: probe'].p50 / walk:.1%} of a first walk"
    yield _titles("rounds, all ranks in one process; work only; µs")
    for name, spread in block.local.spreads.items():
        yield _row(name, spread)
    yield _titles("rounds, a process per rank, ZeroMQ; what a request waits; µs")
    for name, spread in block.sockets.spreads.items():
        yield _row(name, spread)
    for numbers in (block.work.numbers, block.memory.numbers):
        for name, number in numbers.items():
            yield f"  {name:{NAME_WIDTH}}{number:>10,.0f}"


def _titles(title: str) -> str:
    heads = "".join(f"{head:>10}" for head in ("p10", "p50", "p90", "p99", "max", "count"))
    return f"{title:{NAME_WIDTH + 2}}{heads}"


def _row(name: str, spread: Spread) -> str:
    values = (spread.p10, spread.p50, spread.p90, spread.p99, spread.max)
    figures = "".join(f"{value:>10.1f}" for value in values)
    return f"  {name:{NAME_WIDTH}}{figures}{spread.count:>10}"


def _growth_lines(title: str, unit: str, growths: dict[str, Growth]) -> list[str]:
    if not growths:
        return []
    sizes = next(iter(growths.values())).sizes
    heads = "".join(f"{size:>11,}" for size in sizes)
    lines = ["", title, f"  {unit:{NAME_WIDTH}}{heads}{'exponent':>10}{'ratio':>9}"]
    for name, growth in growths.items():
        values = "".join(f"{value:>11.1f}" for value in growth.values)
        lines.append(f"  {name:{NAME_WIDTH}}{values}{growth.exponent:>10.2f}{growth.ratio:>8.1f}x")
    return lines
