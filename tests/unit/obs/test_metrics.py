"""The metrics page: what ranks report appears by name, with rank and role."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from wavepp_worker.base.errors import PeerError
from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.wire.mailbox import Stats


def page(metrics: ServingMetrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def test_rank_numbers_are_merged_and_labelled() -> None:
    metrics = ServingMetrics()
    metrics.ranks.take(Stats(0, "loop", {"wavepp_waves_total": 3.0, "wavepp_ring_waves": 2.0}))
    metrics.ranks.take(Stats(1, "loop", {"wavepp_waves_total": 4.0}))
    metrics.ranks.take(Stats(0, "loop", {"wavepp_waves_total": 5.0}))
    lines = page(metrics)
    assert "# TYPE wavepp_waves_total counter" in lines
    assert "# TYPE wavepp_ring_waves gauge" in lines
    assert 'wavepp_waves_total{rank="0",role="loop"} 5.0' in lines
    assert 'wavepp_waves_total{rank="1",role="loop"} 4.0' in lines
    assert 'wavepp_ring_waves{rank="0",role="loop"} 2.0' in lines
    assert metrics.ranks.get(0, "loop", "wavepp_ring_waves") == 2.0
    assert metrics.ranks.get(0, "wave", "wavepp_ring_waves") is None


@pytest.mark.parametrize("name", ["waves_total", "wavepp_Waves", 'wavepp_x{a="b"}', "wavepp_", ""])
def test_names_against_the_house_rule_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="rank 3 wave"):
        ServingMetrics().ranks.take(Stats(3, "wave", {name: 1.0}))


def test_a_runaway_sender_is_refused() -> None:
    values = {f"wavepp_n{number}": 1.0 for number in range(513)}
    with pytest.raises(PeerError, match="512"):
        ServingMetrics().ranks.take(Stats(0, "wave", values))


def test_the_reuse_rate_is_between_zero_and_one() -> None:
    metrics = ServingMetrics()
    assert metrics.reuse_rate() is None
    metrics.note_served(100, 0, 0.5)
    metrics.note_served(100, 96, 0.1)
    assert metrics.reuse_rate() == 0.48
    assert 'wavepp_requests_total{outcome="served"} 2.0' in page(metrics)
    assert "wavepp_prefill_seconds_count 2.0" in page(metrics)


def test_two_workers_in_one_process_do_not_share_numbers() -> None:
    first, second = ServingMetrics(), ServingMetrics()
    first.note_served(1, 0, 0.1)
    assert second.reuse_rate() is None
