"""`wavepp top`: what is read from a page, and what two readings of it say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.obs.top import find_pages, parse_page, read_page, render, stage_rows, worker_row


def page(forward: float, tokens: float, served: float, reused: float) -> str:
    return f"""\
# HELP wavepp_forward_seconds forward seconds
wavepp_forward_seconds_total{{rank="0",role="loop",worker_id="a"}} {forward}
wavepp_tokens_computed_total{{rank="0",role="loop"}} {tokens}
wavepp_referenced_blocks{{rank="0",role="wave"}} 25
wavepp_cached_blocks{{rank="0",role="wave"}} 25
wavepp_free_blocks{{rank="0",role="wave",window="0"}} 30
wavepp_free_blocks{{rank="0",role="wave",window="1"}} 20
wavepp_queue_requests{{rank="0",role="wave"}} 3
wavepp_free_blocks{{rank="1",role="wave"}} 7
wavepp_host_free_blocks{{rank="1",role="wave"}} 3
wavepp_host_cached_blocks{{rank="1",role="wave"}} 1
wavepp_prefill_seconds_bucket{{le="0.1"}} 99
wavepp_prompt_tokens_total{{model="m"}} {served}
wavepp_cached_tokens_total{{model="m"}} {reused}
dynamo_component_total_blocks{{}} 5
"""


def test_rates_are_differences_and_gauges_are_the_latest() -> None:
    before, now = parse_page(page(1.0, 100, 0, 0)), parse_page(page(2.5, 500, 1000, 900))
    first, second = stage_rows(before, now, 2.0)
    assert (first.rank, first.busy_share, first.tokens_per_s) == (0, 0.75, 200.0)
    assert first.cache == (25, 0, 25, 50)
    assert first.host_share is None
    assert (second.rank, second.busy_share, second.host_share) == (1, 0.0, 0.25)
    worker = worker_row(before, now, 2.0)
    assert (worker.queue, worker.prompt_tokens_per_s, worker.reuse_share) == (3, 500.0, 0.9)


def test_a_restarted_worker_shows_no_negative_rates() -> None:
    before, now = parse_page(page(9.0, 900, 10, 0)), parse_page(page(0.5, 10, 0, 0))
    assert stage_rows(before, now, 1.0)[0].tokens_per_s == 0
    assert worker_row(before, now, 1.0).reuse_share is None


def test_the_view_fits_eighty_columns() -> None:
    before, now = parse_page(page(1.0, 100, 0, 0)), parse_page(page(2.5, 5_000_000, 9e6, 8e6))
    text = io.StringIO()
    Console(file=text, width=80).print(render("http://127.0.0.1:9090/metrics", before, now, 2.0))
    assert "75 %" in text.getvalue()
    assert "████████" in text.getvalue()
    assert "…" not in text.getvalue()


def test_running_graphs_are_found_and_half_written_ones_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no running graph"):
        find_pages(tmp_path)
    for name, text in (
        ("a", json.dumps({"processes": [{"component": "PrefillWorker", "metrics_url": "http://x"},
                                        {"component": "DecodeWorker", "metrics_url": "http://y"}]})),
        ("b", "{"),
    ):  # fmt: skip
        folder = tmp_path / f"wavepp-graph-{name}"
        folder.mkdir()
        (folder / "ready.json").write_text(text)
    assert find_pages(tmp_path) == ["http://x"]


def test_a_page_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9/metrics cannot be read"):
        read_page("http://127.0.0.1:9/metrics")
