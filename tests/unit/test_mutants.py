"""The planted faults of `make mutants` still fit the code that they are planted in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutants.py"


def test_every_fault_fits_exactly_once_and_compiles() -> None:
    spec = importlib.util.spec_from_file_location("mutants", TOOL)
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["mutants"] = mutants  # dataclasses look their module up
    spec.loader.exec_module(mutants)
    faults = mutants.read_faults()
    assert len(faults) >= 40
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert fault.suite in mutants.SUITES
        planted = fault.planted(TOOL.parents[1])
        assert planted is not None, f"{fault.name} is stale"
        compile(planted, fault.file, "exec")
