"""Prometheus metrics of one worker: the ranks' `Stats` reports, and the serving process's own.

Names follow `wavepp_<noun>_<unit>[_total]`.  Ranks report plain numbers by name; nothing about
them is declared twice: `_total` makes a counter, anything else a gauge.  A name may carry one more
label of a small closed set, `wavepp_free_blocks{window="1"}`; a metric has it always or never.

Good hits: the *expected* prefix of a request is what every stage could resume when it came, less
the last token, which is always computed; that is what the router was promised.  A hit is good if
at least 80 % of it was reused, and poor otherwise.  Requests that could expect nothing do not
count: the good-hit rate is good / (good + poor).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wavepp_worker.base.errors import InvariantError, PeerError
from wavepp_worker.obs.story import PHASES, Phase, Story
from wavepp_worker.wire.mailbox import Stats

NAME = re.compile(
    r"(wavepp_[a-z0-9_]+)"
    r'(?:\{(window|tier|outcome|verdict|cause|spacing|section)="([a-z0-9_]{1,32})"\})?'
)
NAMES_MAX = 512  # per process of a rank; a runaway sender must not grow the page without end
PREFILL_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
PHASE_BUCKETS_S = (0.0003, 0.001, 0.003, *PREFILL_BUCKETS_S)
GOOD_HIT_SHARE = 0.8  # of the expected prefix
HITS = ("good", "poor")


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
        """Return one number, summed over its own label; None before its first report."""
        values = self._values.get((rank, role), {})
        found = [n for text, n in values.items() if text.partition("{")[0] == name]
        return sum(found) if found else None

    def collect(self) -> Iterator[Metric]:
        """Yield one family per name."""
        # Scrapes come from another thread: work on copies.
        by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
        for (rank, role), values in list(self._values.items()):
            for text, value in list(values.items()):
                name, label, word = _split(text)
                labels = {"rank": str(rank), "role": role, **({label: word} if label else {})}
                by_name.setdefault(name, []).append((labels, value))
        for name, samples in sorted(by_name.items()):
            yield _family(name, samples)


def _split(text: str) -> tuple[str, str, str]:
    """Return the metric's name, and its own label and value, empty without one."""
    match = NAME.fullmatch(text)
    if match is None:
        raise InvariantError(f"a metric's name came unchecked: {text!r}")
    return match[1], match[2] or "", match[3] or ""


def _family(name: str, samples: list[tuple[dict[str, str], float]]) -> Metric:
    text = name.removeprefix("wavepp_").removesuffix("_total").replace("_", " ")
    labels = tuple(samples[0][0])
    family: CounterMetricFamily | GaugeMetricFamily
    if name.endswith("_total"):
        family = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    else:
        family = GaugeMetricFamily(name, text, labels=labels)
    for named, value in samples:
        family.add_metric([named.get(label, "") for label in labels], value)
    return family


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
        self.cached_tokens = Counter(
            "wavepp_cached_tokens_total",
            "Prompt tokens of served requests that came from the cache, as in their usage",
            registry=self.registry,
        )
        self.expected_tokens = Counter(
            "wavepp_expected_tokens_total",
            "Prompt tokens of served requests that every stage could resume when they came",
            registry=self.registry,
        )
        self.hits = Counter(
            "wavepp_expected_hits_total",
            "Served requests that could expect reuse: good if they got 80 % of it",
            ["outcome"],
            registry=self.registry,
        )
        self.prefill_seconds = Histogram(
            "wavepp_prefill_seconds",
            "From a request's arrival to its hand-off",
            buckets=PREFILL_BUCKETS_S,
            registry=self.registry,
        )
        self.phase_seconds = Histogram(
            "wavepp_phase_seconds",
            "Time of served requests in each phase",
            ["phase"],
            buckets=PHASE_BUCKETS_S,
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
        for outcome in HITS:  # so that a rate exists from the start
            self.hits.labels(outcome)
        for phase in PHASES:
            self.phase_seconds.labels(phase)
        self._prompt_tokens_seen = 0
        self._cached_tokens_seen = 0

    def note_served(self, story: Story) -> None:
        """Count one hand-off."""
        cached_tokens = story.endpoint or 0
        self.prompt_tokens.inc(story.prompt_tokens)
        self.cached_tokens.inc(cached_tokens)
        self.expected_tokens.inc(story.expected_tokens)
        self.prefill_seconds.observe(story.seconds)
        for phase in story.phases:
            self.note_phase(phase)
        if story.expected_tokens:
            is_good = cached_tokens >= GOOD_HIT_SHARE * story.expected_tokens
            self.hits.labels(HITS[0] if is_good else HITS[1]).inc()
        self._prompt_tokens_seen += story.prompt_tokens
        self._cached_tokens_seen += cached_tokens

    def note_phase(self, phase: Phase) -> None:
        """Count one phase of a served request."""
        self.phase_seconds.labels(phase.name).observe(phase.seconds)

    def reuse_rate(self) -> float | None:
        """Return cached / prompt tokens since the start; None before the first request."""
        if not self._prompt_tokens_seen:
            return None
        return self._cached_tokens_seen / self._prompt_tokens_seen
