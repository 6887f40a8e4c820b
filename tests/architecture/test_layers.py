"""Import contracts, one schema, no wall clock, no bare assert: rules that a review would miss."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from wavepp_worker.cli import schema_of
from wavepp_worker.config.json_schema import render

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("wavepp_worker", "kv_router_hooks", "components", "graphs")
WALL_CLOCK = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
EPOCH_MAKERS = {"wavepp_worker/runtime/supervisor.py"}  # epochs must grow across restarts
SPAN_MAKERS = {"wavepp_worker/obs/spans.py"}  # traces of several hosts have no other clock
PROCESS_MODULES = {"threading", "multiprocessing"}
NOT_MAKERS = {
    "wavepp_worker/sim/campaign.py",  # ends the children of its pool when it is interrupted
    "wavepp_worker/transfer/desk_link.py",  # a lock that fetching threads share
}


def shipped() -> Iterator[tuple[str, ast.Module]]:
    for package in SHIPPED:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def calls(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            yield owner, node.attr


def imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_import_contracts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == 0, capsys.readouterr().out


def test_the_checked_in_schema_is_fresh() -> None:
    text = (ROOT / "configs" / "schema.json").read_text()
    assert text == render(schema_of("graphs.disagg")), "run `make schema` and review the change"


def test_nothing_shipped_reads_the_wall_clock() -> None:
    found = [name for name, tree in shipped() if WALL_CLOCK & set(calls(tree))]
    assert set(found) <= EPOCH_MAKERS | SPAN_MAKERS


def test_threads_and_processes_are_made_in_runtime_only() -> None:
    allowed = ("wavepp_worker/runtime/",)
    found = [
        name
        for name, tree in shipped()
        if PROCESS_MODULES & imports(tree) and not name.startswith(allowed)
    ]
    assert set(found) == NOT_MAKERS


def test_shipped_code_has_no_bare_assert() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in shipped()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_entry_points_hold_no_logic() -> None:
    sizes = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / "components").glob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > 60} == {}
