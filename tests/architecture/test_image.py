"""The Dockerfile: what it copies exists, its base is the pinned Dynamo, it does not run as root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from graphs.kubernetes import DYNAMO_VERSION

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "Dockerfile").read_text().splitlines()


def arguments(instruction: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in LINES if line.startswith(f"{instruction} ")]


def test_every_package_is_copied_and_passes_the_ignore_file() -> None:
    copied = {
        word
        for line in arguments("COPY")
        if not line.startswith("--from")
        for word in line.split()[:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in packages} <= copied
    assert project["project"]["readme"] in copied
    assert all((ROOT / name).exists() for name in copied)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(allowed)


def test_images_are_pinned_and_the_base_is_the_packaged_dynamo() -> None:
    (base,) = (line.removeprefix("BASE=") for line in arguments("ARG"))
    assert re.fullmatch(r"nvcr\.io/nvidia/ai-dynamo/[a-z-]+-runtime:(.+)", base)
    assert base.endswith(f":{DYNAMO_VERSION}")
    assert f'"ai-dynamo-runtime=={DYNAMO_VERSION}"' in (ROOT / "pyproject.toml").read_text()
    images = [line.split()[0] for line in arguments("FROM") if line != "${BASE}"]
    images += [line.split()[0].removeprefix("--from=") for line in arguments("COPY")
               if line.startswith("--from=")]  # fmt: skip
    assert all(re.search(r":\d+\.\d+", image) for image in images), images


def test_it_ends_as_the_ecosystems_user() -> None:
    assert arguments("USER")[-1] == "1000:0"
