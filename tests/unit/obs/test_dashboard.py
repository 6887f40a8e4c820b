"""The Grafana dashboard is well formed; the integration tests check its names against a worker."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[3] / "configs" / "grafana" / "wavepp.json"
GRID_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FILE.read_text())
    return loaded


def graphs(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_panels_have_their_own_ids_and_titles(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    assert len({panel["title"] for panel in panels}) == len(panels)


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    at = panel["gridPos"]
    return {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}


def test_panels_lie_on_the_grid_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        assert all(0 <= x < GRID_COLUMNS for x, _ in cells(panel)), panel["title"]
    for one, other in itertools.combinations(dashboard["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_every_graph_has_queries_a_unit_and_an_explanation(dashboard: dict[str, Any]) -> None:
    for panel in graphs(dashboard):
        title = panel["title"]
        assert panel["datasource"] == DATASOURCE, title
        assert panel["targets"], title
        assert panel["description"], title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references), title
        for target in panel["targets"]:
            expression = target["expr"]
            assert "wavepp_" in expression, title
            assert expression.count("(") == expression.count(")"), expression
            # Every selector follows the choice of workers.
            assert expression.count("wavepp_") == expression.count('worker_id=~"$worker"'), title


def test_counters_are_shown_as_rates(dashboard: dict[str, Any]) -> None:
    for panel in graphs(dashboard):
        for target in panel["targets"]:
            expression = target["expr"]
            assert expression.count("_total{") <= expression.count("rate(wavepp_"), expression


def test_data_source_and_worker_can_be_chosen(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["worker"]["datasource"] == DATASOURCE
    assert "label_values(wavepp_" in variables["worker"]["query"]["query"]
