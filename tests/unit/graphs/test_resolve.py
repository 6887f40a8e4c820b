"""Which graph a name on the command line means."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from graphs.resolve import resolve
from wavepp_worker.base.errors import ConfigError

HERE = Path(__file__).parent
MODULE = """
from graphs.graph import Component
from wavepp_worker.config.schema import FrontendConfig

def make(name, *needs):
    return Component(name=name, does="", config_type=FrontendConfig, module="m",
                     arguments=lambda settings, file: (), needs=needs)

A = make("A")
B = make("B", A)
C = make("C", B, A)
"""


def names(spec: str, folder: Path = HERE, service: str = "") -> list[str]:
    return [component.name for component in resolve(spec, folder, service).components]


def write(folder: Path, text: str, name: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return file


def test_the_root_is_what_nobody_needs() -> None:
    expected = ["DecodeWorker", "VllmDecodeWorker", "PrefillWorker", "Frontend"]
    assert names("graphs.disagg") == names("graphs.disagg:Frontend") == expected


def test_an_attribute_chooses_and_dots_follow_needs(tmp_path: Path) -> None:
    file = str(write(tmp_path, MODULE, "chain.py"))
    assert names(file) == ["A", "B", "C"]
    assert names(f"{file}:B") == ["A", "B"]
    assert names(f"{file}:C.B.A") == ["A"]


def test_service_name_runs_one_component_alone() -> None:
    assert names("graphs.disagg", service="PrefillWorker") == ["PrefillWorker"]
    with pytest.raises(ConfigError, match='did you mean "PrefillWorker"'):
        names("graphs.disagg", service="PrefilWorker")


def test_a_users_own_graphs_folder_adds_modules(tmp_path: Path) -> None:
    write(tmp_path, MODULE, "graphs/mine_for_test.py")
    assert names("graphs.mine_for_test", tmp_path) == ["A", "B", "C"]
    assert names("graphs.disagg", tmp_path)[-1] == "Frontend"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("graphs.disag", "graphs.disag: no such module here"),
        ("nowhere.at.all", "nowhere.at.all: no such module here"),
        ("graphs.disagg:Frontent", 'no component "Frontent", did you mean "Frontend"'),
        ("graphs.disagg:Frontend.X", 'Frontend needs no "X"'),
        ("graphs.graph", "graphs.graph: defines no component"),
        ("no/such.py", "such.py: no such graph file"),
        ("a b", "a b: expected a module such as graphs.disagg"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names(spec)
    assert message in str(caught.value)


def test_several_roots_are_listed(tmp_path: Path) -> None:
    file = write(tmp_path, MODULE + 'D = make("D", A)\n', "two.py")
    with pytest.raises(ConfigError, match=r"several roots \(C, D\); choose one"):
        names(str(file))


def test_two_components_of_one_name_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, MODULE + 'D = make("A", C)\n', "twice.py")
    with pytest.raises(ConfigError, match='two components are called "A"'):
        names(str(file))


def test_a_graph_that_cannot_import_says_why(tmp_path: Path) -> None:
    write(tmp_path, "import not_installed_here\n", "broken_graph_for_test.py")
    with pytest.raises(ConfigError, match=r"cannot be imported.*not_installed_here"):
        names("broken_graph_for_test", tmp_path)
