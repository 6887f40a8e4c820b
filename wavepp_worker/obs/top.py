"""`wavepp top`: a live view of a worker's stages, read from its metrics page.

    stage   busy ████████░░ 81 %   gap 19 %  (activations 12, install 0)   tok/s   cache bar
    worker  queue, admitting, ring, budget, reuse, throughput

Everything shown is a difference of two readings of the page, or a gauge of the second one.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wavepp_worker.base.errors import ConfigError

SAMPLE = re.compile(r"^(wavepp_\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
RANK = re.compile(r'\brank="(\d+)"')
PAGE_TIMEOUT_S = 5.0
PAGE_BYTES_MAX = 4 << 20
BAR_CELLS = 12

Page = dict[tuple[str, int], float]
"""(metric, rank) -> value; rank -1: of the whole worker."""


class StageRow(Struct, frozen=True):
    """One stage in the last interval.  Shares are of the interval."""

    rank: int
    busy_share: float
    receive_share: float  # waiting for activations
    install_share: float  # waiting for this rank's own admission
    tokens_per_s: float
    cache: tuple[float, float, float, float]  # blocks: referenced, reserved, cached, free
    leases: float
    escrows: float
    sequences: float
    host_share: float | None  # of the host tier that holds something; None: there is none


class WorkerRow(Struct, frozen=True):
    """The worker in the last interval."""

    requests_per_s: float
    prompt_tokens_per_s: float
    reuse_share: float | None
    queue: float
    pending: float
    ring: float
    budget_tokens: float
    rounds_per_s: float


def read_page(url: str) -> Page:
    """Return a metrics page.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S) as reply:
            text = reply.read(PAGE_BYTES_MAX).decode()
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from error
    return parse_page(text)


def parse_page(text: str) -> Page:
    """Return WavePP's samples; samples of different roles of one rank are summed."""
    page: Page = {}
    for name, labels, value in SAMPLE.findall(text):
        match = RANK.search(labels)
        if match is None and name.endswith("_bucket"):
            continue
        key = (name, int(match[1]) if match else -1)
        page[key] = page.get(key, 0.0) + float(value)
    return page


def stage_rows(before: Page, now: Page, seconds: float) -> list[StageRow]:
    """Return one row per rank that reports anything, in order."""
    return [_stage_row(rank, before, now, seconds) for rank in sorted({r for _, r in now} - {-1})]


def _stage_row(rank: int, before: Page, now: Page, seconds: float) -> StageRow:
    def rate(name: str) -> float:
        return _rate(before, now, name, rank, seconds)

    def gauge(name: str) -> float:
        return now.get((f"wavepp_{name}", rank), 0.0)

    host_total = sum(
        gauge(f"host_{part}_blocks") for part in ("free", "cached", "referenced", "reserved")
    )
    return StageRow(
        rank=rank,
        busy_share=min(1.0, rate("wavepp_forward_seconds_total")),
        receive_share=min(1.0, rate("wavepp_receive_wait_seconds_total")),
        install_share=min(1.0, rate("wavepp_install_wait_seconds_total")),
        tokens_per_s=rate("wavepp_tokens_computed_total"),
        cache=(
            gauge("referenced_blocks"),
            gauge("reserved_blocks"),
            gauge("cached_blocks"),
            gauge("free_blocks"),
        ),
        leases=gauge("lease_count"),
        escrows=gauge("escrow_count"),
        sequences=gauge("sequence_count"),
        host_share=1 - gauge("host_free_blocks") / host_total if host_total else None,
    )


def worker_row(before: Page, now: Page, seconds: float) -> WorkerRow:
    """Return the worker's row."""

    def rate(name: str, rank: int = -1) -> float:
        return _rate(before, now, name, rank, seconds)

    def gauge(name: str) -> float:
        return now.get((f"wavepp_{name}", 0), 0.0)

    prompt = rate("wavepp_prompt_tokens_total")
    return WorkerRow(
        requests_per_s=rate("wavepp_prefill_seconds_count"),
        prompt_tokens_per_s=prompt,
        reuse_share=rate("wavepp_cached_tokens_total") / prompt if prompt else None,
        queue=gauge("queue_requests"),
        pending=gauge("pending_requests"),
        ring=gauge("ring_waves"),
        budget_tokens=gauge("planner_budget_tokens"),
        rounds_per_s=rate("wavepp_rounds_total", 0),
    )


def _rate(before: Page, now: Page, name: str, rank: int, seconds: float) -> float:
    """Return the increase per second; 0 after a restart, whose counters begin again."""
    value = now.get((name, rank), 0.0) - before.get((name, rank), 0.0)
    return max(0.0, value) / seconds


def find_pages(temporary: Path) -> list[str]:
    """Return the metrics pages of the prefill workers of this user's running graphs.

    Raises:
        ConfigError: no graph is running.
    """
    found = []
    for file in sorted(temporary.glob("wavepp-graph-*/ready.json")):
        try:
            ready = msgspec.json.decode(file.read_bytes())
        except (OSError, msgspec.DecodeError):
            continue  # it is ending right now, or belongs to someone else
        found += [p["metrics_url"] for p in ready["processes"] if p["component"] == "PrefillWorker"]
    if not found:
        raise ConfigError("no running graph was found; name its page with --metrics URL")
    return found


def run_top(urls: Sequence[str], interval_s: float, count: int | None) -> int:
    """Show the view until Ctrl-C, or `count` times.

    Raises:
        ConfigError: a page cannot be read.
    """
    console = Console()
    pages = [read_page(url) for url in urls]
    taken_at = time.monotonic()
    shown = 0
    with Live(console=console, auto_refresh=False, screen=count is None) as live:
        while count is None or shown < count:
            time.sleep(interval_s)
            fresh = [read_page(url) for url in urls]
            now = time.monotonic()
            views = [
                render(url, before, page, now - taken_at)
                for url, before, page in zip(urls, pages, fresh, strict=True)
            ]
            live.update(Group(*views), refresh=True)
            pages, taken_at, shown = fresh, now, shown + 1
    return 0


def render(url: str, before: Page, now: Page, seconds: float) -> RenderableType:
    """Return the view of one worker."""
    worker = worker_row(before, now, seconds)
    reuse = "-" if worker.reuse_share is None else f"{100 * worker.reuse_share:.0f} %"
    head = Text.assemble(
        (url, "bold"),
        f"\n{worker.requests_per_s:.1f} requests/s   {worker.prompt_tokens_per_s:,.0f} prompt "
        f"tokens/s   reused {reuse}\nqueue {worker.queue:.0f}   admitting {worker.pending:.0f}   "
        f"ring {worker.ring:.0f} waves   budget {worker.budget_tokens:,.0f} tokens   "
        f"{worker.rounds_per_s:.0f} rounds/s",
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in ("stage", "busy", "recv", "inst", "tokens/s", "cache", "l/e/s", "host"):
        table.add_column(title, no_wrap=True)
    for row in stage_rows(before, now, seconds):
        table.add_row(
            str(row.rank),
            f"{_bar(row.busy_share)} {100 * row.busy_share:3.0f} %",
            f"{100 * row.receive_share:.0f} %",
            f"{100 * row.install_share:.0f} %",
            f"{row.tokens_per_s:,.0f}",
            _cache_bar(row.cache),
            f"{row.leases:.0f}/{row.escrows:.0f}/{row.sequences:.0f}",
            "-" if row.host_share is None else f"{100 * row.host_share:.0f} %",
        )
    legend = Text(
        "recv, inst: waits for activations, for admission   l/e/s: leases, escrows, sequences\n"
        "cache: █ in use  ▓ promised  ▒ reusable  · free",
        style="dim",
    )
    return Group(head, table, legend, Text())


def _bar(share: float) -> str:
    full = round(share * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)


def _cache_bar(blocks: tuple[float, float, float, float]) -> str:
    total = sum(blocks)
    if not total:
        return "-"
    bar, filled, seen = "", 0, 0.0
    for share, cell in zip(blocks, "█▓▒·", strict=True):
        seen += share
        width = round(seen / total * BAR_CELLS) - filled
        bar += cell * width
        filled += width
    return bar
