"""The locks are complete: pip finds nothing missing but what is left out on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {
    "ai-dynamo 1.6.1 requires aisimulate, which is not installed.",
    "nixl 1.5.1 requires nixl-cu12, which is not installed.",
}


def test_pip_check_has_only_the_expected_complaints() -> None:
    if not (Path(sys.prefix) / ".run").exists():
        pytest.skip("this environment was not made by the Makefile")
    command = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert set(found.splitlines()) == LEFT_OUT


@pytest.mark.parametrize("name", ["run", "test"])
def test_locks_pin_every_line_and_leave_torch_to_the_user(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().split()
    assert all("==" in line for line in lines)
    names = [line.partition("==")[0] for line in lines]
    assert len(names) == len(set(names))
    assert not any(line.startswith(("torch==", "nvidia-", "triton")) for line in lines)
