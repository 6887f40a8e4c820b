"""Looking at other processes from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 30.0  # for anything that must happen; nothing waits so long when all is well
POLL_S = 0.01


def state_of(pid: int) -> str:
    """Return the letter of a process's state: T stopped, Z zombie; "" if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def is_alive(pid: int) -> bool:
    return state_of(pid) not in {"", "Z"}


async def poll_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Look at the outside world again and again until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(POLL_S)
