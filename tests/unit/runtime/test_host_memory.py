"""Host memory that could be had, from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from wavepp_worker.runtime.host_memory import available_bytes

MIB = 1 << 20


def kernel(tmp: Path, group: str = "/", **files: str) -> tuple[Path, Path]:
    """Write a machine with 100 MiB free, 900 MiB available, and the given cgroup files."""
    proc, cgroups = tmp / "proc", tmp / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {2048 * 1024} kB\nMemFree: {100 * 1024} kB\nMemAvailable: {900 * 1024} kB\n"
        "HugePages_Total: 0\n"
    )
    (proc / "self" / "cgroup").write_text(f"9:cpu:/x\n0::{group}\n")
    cgroups.mkdir()
    for name, text in files.items():
        path = cgroups / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


def stat(anonymous: int, inactive: int, active: int) -> str:
    return f"anon {anonymous * MIB}\ninactive_file {inactive * MIB}\nactive_file {active * MIB}\n"


def test_the_page_cache_counts_as_available(tmp_path: Path) -> None:
    assert available_bytes(*kernel(tmp_path)) == 900 * MIB


@pytest.mark.parametrize(("limit", "left"), [("max", 900), (700, 280), (5000, 900), (100, 0)])
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str | int, left: int) -> None:
    """Of 500 MiB in use 80 are page cache: a limit of 700 leaves 280."""
    text = limit if isinstance(limit, str) else str(limit * MIB)
    files = {
        "memory_max": text, "memory_current": str(500 * MIB), "memory_stat": stat(420, 30, 50),
    }  # fmt: skip
    assert available_bytes(*kernel(tmp_path, **files)) == left * MIB


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    files = {
        "pod__memory_max": str(600 * MIB), "pod__memory_current": str(400 * MIB),
        "pod__memory_stat": stat(400, 0, 0), "pod__box__memory_max": str(800 * MIB),
        "pod__box__memory_current": str(10 * MIB), "pod__box__memory_stat": stat(10, 0, 0),
    }  # fmt: skip
    assert available_bytes(*kernel(tmp_path, "/pod/box", **files)) == 200 * MIB


def test_this_machine_has_some() -> None:
    assert available_bytes() > MIB
