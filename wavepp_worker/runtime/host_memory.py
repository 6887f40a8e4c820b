"""How much host memory could be had now: of the machine, and under the container's limit."""

from __future__ import annotations

from pathlib import Path

KIB = 1024


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process could take without anything being killed for it.

    The page cache counts as available: weights that were just read fill it, and it gives way.

    Args:
        proc, cgroups: where the kernel shows them; version 1 of cgroups is not looked at.
    """
    figures = _figures(proc / "meminfo")
    available = figures["MemAvailable:"] * KIB
    for group in _groups(proc, cgroups):
        available = min(available, _left_in(group, available))
    return max(available, 0)


def _groups(proc: Path, cgroups: Path) -> list[Path]:
    """Return the folders of the groups whose limits hold for this process, innermost first."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:  # a kernel without groups
        return []
    for line in lines:
        if line.startswith("0::/"):
            innermost = cgroups / line.removeprefix("0::/")
            return [
                group for group in (innermost, *innermost.parents) if group.is_relative_to(cgroups)
            ]
    return []


def _left_in(group: Path, unlimited: int) -> int:
    """Return the bytes left under one group's limit, or `unlimited` where it sets none."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        figures = _figures(group / "memory.stat")
    except OSError:  # the root group has no limit, and a container may not see its parents
        return unlimited
    if limit == "max":
        return unlimited
    return int(limit) - used + figures.get("inactive_file", 0) + figures.get("active_file", 0)


def _figures(path: Path) -> dict[str, int]:
    """Return {name: figure} of a file with a name and a figure in each line."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
