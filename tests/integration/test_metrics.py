"""What a live worker exports is what the dashboard and the documentation name."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.deployment import (
    REPOSITORY,
    decode_config,
    deployment,
    free_port,
    pipeline,
    prefill_config,
    wait_until,
)
from tests.numerics.tiny import make_tiny_model
from wavepp_worker.obs.story import PHASES
from wavepp_worker.vllm_decode import driver

pytestmark = [pytest.mark.dynamo, pytest.mark.nixl]

NAME = re.compile(r"\bwavepp_(?!worker\b)\w+")
SERIES = re.compile(r"^(wavepp_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
TYPES = re.compile(r"^# TYPE (wavepp_\w+) (\w+)", re.MULTILINE)
PROMPT = [5 + index % 200 for index in range(100)]  # 6 full blocks and a bit
TIMEOUT_S = 20.0
# A label of Kubernetes, and what only the ladder's naive rung exports.
ELSEWHERE = {"wavepp_stages", "wavepp_asks_total", "wavepp_ask_wait_seconds_total"}
# What only a worker with vLLM decode workers exports, by the names in its code.
PUSHED = set(re.findall(r"wavepp_push_\w+", inspect.getsource(driver)))
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


class Page:
    """A metrics page: {(name, labels): value}, and how often each family is declared."""

    def __init__(self, text: str) -> None:
        declared = TYPES.findall(text)
        self.families = Counter(name for name, _ in declared)
        self.types = dict(declared)
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for name, labels, value in SERIES.findall(text):
            pairs = frozenset(re.findall(r'(\w+)="([^"]*)"', labels))
            self.values[(name, pairs)] = float(value)

    @property
    def names(self) -> set[str]:
        """Series, and families: a histogram has no series of its own name."""
        return {name for name, _ in self.values} | set(self.types)

    def get(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels; fails without one."""
        found = [v for (n, have), v in self.values.items() if n == name and labels.items() <= have]
        assert found, (name, labels)
        return sum(found)


def read(port: int) -> Page:
    return Page(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Page]]:
    """Return the prefill worker's and the decode worker's page after two equal requests."""
    folder = tmp_path_factory.mktemp("m")
    make_tiny_model(folder / "model", "llama", seed=4)
    port, decode_port = free_port(), free_port()
    with deployment(folder) as deploy:
        config = prefill_config(folder / "model", 2, obs={"stats_interval_s": 0.05})
        deploy.prefill(config, DYN_SYSTEM_PORT=str(port))
        deploy.decode(decode_config(folder / "model"), DYN_SYSTEM_PORT=str(decode_port))

        async def drive() -> None:
            async with pipeline(deploy) as pipe:
                for cached in (0, 96):
                    assert (await pipe.generate(PROMPT, 4))[1] == cached
                    # The router's view, the hold and the ranks' numbers arrive a little later.
                    wait_until(
                        lambda: read(port).get("wavepp_router_blocks") == 6,
                        TIMEOUT_S,
                        "the router knows",
                    )
                wait_until(
                    lambda: (
                        (page := read(port)).get("wavepp_phase_seconds_count", phase="hold") == 2
                        and page.get("wavepp_holds_read_total", rank="1") == 2
                        and page.get("wavepp_reused_tokens_total", rank="0") == 96
                    ),
                    TIMEOUT_S,
                    "both requests are over and reported",
                )

        asyncio.run(drive())
        yield read(port), read(decode_port)


def test_the_dashboard_asks_for_what_is_exported(pages: tuple[Page, Page]) -> None:
    text = (REPOSITORY / "configs" / "grafana" / "wavepp.json").read_text()
    panels: list[dict[str, Any]] = json.loads(text)["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    asked = set(NAME.findall(text))
    assert len(asked) > 40
    assert asked - pages[0].names == set()
    used = {label for text in expressions for label in re.findall(r"by \((\w+)\)", text)} - {"le"}
    known = {label for _, labels in pages[0].values for label, _ in labels}
    assert used - known == set()


@pytest.mark.parametrize("file", DOCUMENTS, ids=[file.name for file in DOCUMENTS])
def test_documented_names_exist(pages: tuple[Page, Page], file: Path) -> None:
    named = set(NAME.findall(file.read_text()))
    assert named - pages[0].names - pages[1].names - ELSEWHERE - PUSHED == set()


def test_no_family_is_declared_twice(pages: tuple[Page, Page]) -> None:
    """Prometheus refuses a second TYPE line, and sums would count a number twice."""
    for page in pages:
        assert [name for name, count in page.families.items() if count > 1] == []


def test_counters_and_only_they_end_with_total(pages: tuple[Page, Page]) -> None:
    for page in pages:
        assert page.types
        for name, kind in page.types.items():
            assert (kind == "counter") == name.endswith("_total"), name


def test_requests_are_counted_by_phase_and_hit(pages: tuple[Page, Page]) -> None:
    page = pages[0]
    assert page.get("wavepp_requests_total", outcome="served") == 2
    assert page.get("wavepp_prompt_tokens_total") == 200
    assert page.get("wavepp_cached_tokens_total") == 96
    assert page.get("wavepp_expected_tokens_total") == 96
    assert page.get("wavepp_expected_hits_total", outcome="good") == 1
    assert page.get("wavepp_expected_hits_total", outcome="poor") == 0
    told = [name for name in PHASES if page.get("wavepp_phase_seconds_count", phase=name) == 2]
    assert told == list(PHASES)
    seconds = sum(
        page.get("wavepp_phase_seconds_sum", phase=name) for name in told if name != "hold"
    )
    assert seconds == pytest.approx(page.get("wavepp_prefill_seconds_sum"), rel=1e-6)


def test_a_rank_accounts_for_its_sections_slots_and_rounds(pages: tuple[Page, Page]) -> None:
    page = pages[0]
    for rank in ("0", "1"):
        for section in ("acquire", "prepare", "commit", "materialize"):
            assert page.get("wavepp_sections_total", section=section, rank=rank) == 2
            assert page.get("wavepp_section_seconds_total", section=section, rank=rank) > 0
        parts = ("free", "cached", "referenced", "reserved")
        slots = [page.get(f"wavepp_{part}_blocks", window="0", rank=rank) for part in parts]
        assert sum(slots) == page.get("wavepp_pool_blocks", window="0", rank=rank) > 0
        assert page.get("wavepp_available_tokens", rank=rank) > 0
        assert page.get("wavepp_process_busy_seconds_total", rank=rank) > 0
        assert page.get("wavepp_admitted_candidate_tokens_total", rank=rank) == 96
        assert page.get("wavepp_admitted_attempts_total", rank=rank) == 2
    assert page.get("wavepp_spaced_rounds_total") == page.get("wavepp_rounds_total", rank="0")
    assert page.get("wavepp_spaced_rounds_total", spacing="min") >= 2
    assert page.get("wavepp_waiting_oldest_seconds") == 0


def test_waves_are_accounted_for(pages: tuple[Page, Page]) -> None:
    page = pages[0]
    assert page.get("wavepp_wave_tokens_total") == 200 - 96
    assert page.get("wavepp_wave_budget_tokens_total") >= 200 - 96
    assert page.get("wavepp_ring_wave_seconds_total") > 0
    assert page.get("wavepp_ring_waves_max") == 4
    assert page.get("wavepp_planner_decisions_total") >= 2
    assert page.get("wavepp_planner_wanted_waves") >= 4
    assert page.get("wavepp_planner_work_tokens") == 0
