"""The metrics page: what ranks report appears by name, with rank and role."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from wavepp_worker.base.errors import PeerError
from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.obs.story import Story
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


@pytest.mark.parametrize("name",
    [
        "waves_total", "wavepp_Waves", 'wavepp_x{a="b"}', 'wavepp_x{window="}"}', "wavepp_", "",
        'wavepp_x{window="0"} 1', 'wavepp_x{window="0",tier="1"}',
    ],
)  # fmt: skip
def test_names_against_the_house_rule_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="rank 3 wave"):
        ServingMetrics().ranks.take(Stats(3, "wave", {name: 1.0}))


def test_a_runaway_sender_is_refused() -> None:
    values = {f"wavepp_n{number}": 1.0 for number in range(513)}
    with pytest.raises(PeerError, match="512"):
        ServingMetrics().ranks.take(Stats(0, "wave", values))


def test_a_rank_may_split_a_number_by_one_label() -> None:
    metrics = ServingMetrics()
    values = {f'wavepp_free_blocks{{window="{window}"}}': 3.0 + window for window in (0, 1)}
    metrics.ranks.take(Stats(0, "wave", values | {"wavepp_waves_total": 1.0}))
    lines = page(metrics)
    assert 'wavepp_free_blocks{rank="0",role="wave",window="0"} 3.0' in lines
    assert 'wavepp_free_blocks{rank="0",role="wave",window="1"} 4.0' in lines
    assert lines.count("# TYPE wavepp_free_blocks gauge") == 1
    assert metrics.ranks.get(0, "wave", "wavepp_free_blocks") == 7.0
    assert metrics.ranks.get(0, "wave", "wavepp_free") is None


def make_story(
    prompt_tokens: int = 100, endpoint: int = 0, expected: int = 0, seconds: float = 0.5
) -> Story:
    story = Story("a", 10.0)
    story.announced(1, prompt_tokens, expected, 10.0 + seconds / 2)
    story.endpoint = endpoint
    story.end("served", 10.0 + seconds)
    return story


def test_the_reuse_rate_is_between_zero_and_one() -> None:
    metrics = ServingMetrics()
    assert metrics.reuse_rate() is None
    metrics.note_served(make_story(endpoint=0))
    metrics.note_served(make_story(endpoint=96))
    assert metrics.reuse_rate() == 0.48
    assert "wavepp_cached_tokens_total 96.0" in page(metrics)
    assert "wavepp_prefill_seconds_count 2.0" in page(metrics)
    assert "wavepp_prefill_seconds_sum 1.0" in page(metrics)


def test_time_is_told_by_phase() -> None:
    metrics = ServingMetrics()
    story = make_story(seconds=0.5)
    metrics.note_served(story)
    metrics.note_phase(story.reach("hold", 12.5))
    lines = page(metrics)
    assert 'wavepp_phase_seconds_sum{phase="hash"} 0.25' in lines
    assert 'wavepp_phase_seconds_sum{phase="handoff"} 0.25' in lines
    assert 'wavepp_phase_seconds_sum{phase="hold"} 2.0' in lines
    assert 'wavepp_phase_seconds_count{phase="lease"} 0.0' in lines, "exported from the start"


def test_a_hit_is_good_if_it_got_four_fifths_of_what_it_could_expect() -> None:
    """FS-102: what could not be expected is no hit."""
    metrics = ServingMetrics()
    for endpoint, expected in ((80, 100), (79, 100), (96, 80), (0, 16), (50, 0), (0, 0)):
        metrics.note_served(make_story(200, endpoint, expected))
    lines = page(metrics)
    assert 'wavepp_expected_hits_total{outcome="good"} 2.0' in lines
    assert 'wavepp_expected_hits_total{outcome="poor"} 2.0' in lines
    assert "wavepp_expected_tokens_total 296.0" in lines


def test_two_workers_in_one_process_do_not_share_numbers() -> None:
    first, second = ServingMetrics(), ServingMetrics()
    first.note_served(make_story())
    assert second.reuse_rate() is None
