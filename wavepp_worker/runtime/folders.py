"""Private folders that do not outlive their process, not even after kill -9.

The owner holds a file lock in its folder, which the kernel drops with the process; whoever makes
the next folder removes those that nobody holds.  A lock and not a pid, because containers may
share a temporary folder and not their pids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK_FILE = ".owner"


class PrivateFolder:
    """A folder of mode 0700, `<parent>/wavepp-<kind>-<random>`; `remove` it in every orderly end.

    Also a context manager that yields the path.

    Args:
        kind: one word for its name.
        parent: default: the system's temporary folder.
    """

    def __init__(self, kind: str, parent: str | Path | None = None) -> None:
        prefix = f"wavepp-{kind}-"
        place = Path(parent or tempfile.gettempdir())
        _sweep(place, prefix)
        self.path = tempfile.mkdtemp(prefix=prefix, dir=place)
        # Locked before it has its name, so that nobody ever sees it unlocked.
        unnamed = Path(self.path) / f"{LOCK_FILE}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(unnamed.with_name(LOCK_FILE))

    def __enter__(self) -> Path:
        return Path(self.path)

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder and all in it.  Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _sweep(place: Path, prefix: str) -> None:
    """Remove our user's abandoned folders; never fails."""
    for folder in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # someone else's, held, or removed meanwhile
            if folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
