"""Prometheus metrics of one worker: the ranks' `Stats` reports, and the serving process's own.

Names follow `wavepp_<noun>_<unit>[_total]`.  Ranks report plain numbers by name; nothing about
them is declared twice: `_total` makes a counter, anything else a gauge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wavepp_worker.base.errors import PeerError
from wavepp_worker.wire.mailbox import Stats

NAME = re.compile(r"wavepp_[a-z0-9_]+")
NAMES_MAX = 512  # per process of a rank; a runaway sender must not grow the page without end
LABELS = ("rank", "role")
PREFILL_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class RankStats(Collector):
    """Latest numbers of every process of every rank."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], dict[str, float]] = {}

    def take(self, stats: Stats) -> None:
        """Merge a report: names that are not in it keep their value.

        Raises:
            PeerError: a name against the house rule, or too many names.
        """
        for name in stats.values:
            if not NAME.fullmatch(name):
                raise PeerError(f"rank {stats.rank} {stats.role}: bad metric name {name!r}")
        known = self._values.setdefault((stats.rank, stats.role), {})
        known.update(stats.values)
        if len(known) > NAMES_MAX:
            raise PeerError(f"rank {stats.rank} {stats.role}: over {NAMES_MAX} metric names")

    def get(self, rank: int, role: str, name: str) -> float | None:
        """Return one number, or None before its first report."""
        return self._values.get((rank, role), {}).get(name)

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name."""
        # Scrapes come from another thread: work on copies.
        by_name: dict[str, list[tuple[list[str], float]]] = {}
        for (rank, role), values in list(self._values.items()):
            for name, value in list(values.items()):
                by_name.setdefault(name, []).append(([str(rank), role], value))
        for name, samples in sorted(by_name.items()):
            family: CounterMetricFamily | GaugeMetricFamily
            text = name.removeprefix("wavepp_").removesuffix("_total").replace("_", " ")
            if name.endswith("_total"):
                family = CounterMetricFamily(name.removesuffix("_total"), text, labels=LABELS)
            else:
                family = GaugeMetricFamily(name, text, labels=LABELS)
            for labels, value in samples:
                family.add_metric(labels, value)
            yield family


class ServingMetrics:
    """Everything a worker shows on its metrics page."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ranks = RankStats()
        self.registry.register(self.ranks)
        self.requests = Counter(
            "wavepp_requests_total",
            "Requests by outcome: served, probe, cancelled, or the reason of the refusal",
            ["outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "wavepp_prompt_tokens_total", "Prompt tokens of served requests", registry=self.registry
        )
        self.reused_tokens = Counter(
            "wavepp_reused_tokens_total",
            "Prompt tokens of served requests that came from the cache",
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "wavepp_prefill_seconds",
            "From a request's arrival to its hand-off",
            buckets=PREFILL_BUCKETS_S,
            registry=self.registry,
        )
        self.live = Gauge(
            "wavepp_live_requests", "Requests that hold something on a rank", registry=self.registry
        )
        self.unanswered = Gauge(
            "wavepp_unanswered_requests", "Live requests without a hand-off", registry=self.registry
        )
        self.router_blocks = Gauge(
            "wavepp_router_blocks", "Blocks the router was told of", registry=self.registry
        )
        self.catalog_blocks = Gauge(
            "wavepp_catalog_blocks", "Blocks whose tokens are kept for it", registry=self.registry
        )
        self._prompt_tokens_seen = 0
        self._reused_tokens_seen = 0

    def note_served(self, prompt_tokens: int, reused_tokens: int, seconds: float) -> None:
        """Count one hand-off."""
        self.requests.labels("served").inc()
        self.prompt_tokens.inc(prompt_tokens)
        self.reused_tokens.inc(reused_tokens)
        self.prefill_seconds.observe(seconds)
        self._prompt_tokens_seen += prompt_tokens
        self._reused_tokens_seen += reused_tokens

    def reuse_rate(self) -> float | None:
        """Return reused / prompt tokens since the start; None before the first request."""
        if not self._prompt_tokens_seen:
            return None
        return self._reused_tokens_seen / self._prompt_tokens_seen
