"""The paper map tells the truth: its keys are cited in the code, its modules and tests exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY = re.compile(r"\[P-[A-Z]+\]")
MAP = (ROOT / "docs" / "paper-map.md").read_text()
ROWS = [line.split("|") for line in MAP.splitlines() if line.startswith("| ")][1:]


def test_keys_are_cited_and_cited_keys_are_mapped() -> None:
    cited: set[str] = set()
    for package in ("wavepp_worker", "kv_router_hooks"):
        for path in (ROOT / package).rglob("*.py"):
            cited.update(KEY.findall(path.read_text()))
    assert set(KEY.findall(MAP)) == cited


def test_modules_and_tests_exist() -> None:
    named = [
        (folder, pattern)
        for _, _, modules, tests, *_ in ROWS
        for folder, cell in (("wavepp_worker", modules), (".", tests))
        for pattern in re.findall(r"`([^`]+)`", cell)
    ]
    assert named
    assert [pair for pair in named if not any((ROOT / pair[0]).glob(pair[1]))] == []
