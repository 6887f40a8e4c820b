"""The faults of `make mutants` fit the code, and the tool tells a catch from an accident."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_fault_fits_exactly_once_and_compiles(mutants: ModuleType) -> None:
    faults = mutants.read_faults()
    assert len(faults) >= 90
    assert len({fault.name for fault in faults}) == len(faults)
    for fault in faults:
        assert fault.suite in mutants.SUITES
        assert fault.why, fault.name
        planted = fault.planted(ROOT)
        assert planted is not None, f"{fault.name} is stale"
        assert planted != (ROOT / fault.file).read_text(), f"{fault.name} changes nothing"
        compile(planted, fault.file, "exec")


def test_a_fault_whose_text_is_not_found_once_is_stale(mutants: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("a = 1\nb = 1\n")
    for old, planted in (("a = 1", "a = 2\nb = 1\n"), (" = 1", None), ("c = 1", None)):
        fault = mutants.Fault("name", "code.py", old, old.replace("1", "2"), "why", "cache")
        assert fault.planted(tmp_path) == planted


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "2 passed", ""),
        (1, "FAILED tests/unit/a.py::test_b[c] - assert 1 == 2", "suite: test_b[c]"),
        (1, "VIOLATION seed=7: two owners", "suite: VIOLATION seed=7: two owners"),
        (1, "Traceback", "BROKEN"),  # the command failed, and no test did
        (2, "ERROR tests/unit/a.py - SyntaxError", "BROKEN"),
    ],
)
def test_only_a_failed_test_is_a_catch(
    mutants: ModuleType, tmp_path: Path, status: int, output: str, verdict: str
) -> None:
    program = f"import sys; print({output!r}); sys.exit({status})"
    assert mutants.first_failure([("suite", ["-c", program])], tmp_path) == verdict


def test_a_suite_that_hangs_is_a_catch(
    mutants: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "TIMEOUT_S", 0.2)
    endless = ["-c", "import threading; threading.Event().wait()"]
    assert mutants.first_failure([("suite", endless)], tmp_path) == "suite: hang"


def test_the_first_suite_that_fails_ends_the_search(mutants: ModuleType, tmp_path: Path) -> None:
    fails = ["-c", "import sys; print('FAILED a.py::test_b'); sys.exit(1)"]
    runs = [("one", ["-c", ""]), ("two", fails), ("three", ["-c", "import sys; sys.exit(2)"])]
    assert mutants.first_failure(runs, tmp_path) == "two: test_b"


def test_unknown_faults_are_refused(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mutants.py", "no-such-fault"])
    with pytest.raises(SystemExit, match="2"):
        mutants.main()
    assert "no such fault: no-such-fault" in capsys.readouterr().err
