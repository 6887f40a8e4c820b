"""What one process did and when, kept in a bounded buffer and written to a part file.

    ran, instant, begin, end ─▶ buffer ─flush─▶ <folder>/<worker>/<role><rank>.jsonl
                                                       └── obs.trace_file: one trace of all parts

Times are seconds on this host's monotonic clock, so the parts of all processes of a host fit
together.  Recorders belong to the runtime's edges: they look at events and commands passing by.
Imports neither torch nor numpy.  A recorder never takes its process down: when its file cannot be
written any more, it says so once and stops.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S: Final = 1.0
EVENTS_MAX: Final = 65_536  # between two flushes; then the oldest are dropped and counted
PART_BYTES_MAX: Final = 64 << 20  # of one process, in two files; the older half goes first
PART_SUFFIX, OLD_SUFFIX = ".jsonl", ".old"

# Chrome's own letters.
SLICE, INSTANT, BEGIN, END = "X", "i", "b", "e"
# (kind, track or group, name, began_at, ended_at, key, args)
Event = tuple[str, str, str, float, float, int, dict[str, Any] | None]


class PartHeader(Struct, frozen=True, kw_only=True):
    """First line of a part file, and again whenever events were dropped; all others are events."""

    worker: int  # process id of the worker's serving process
    role: str
    rank: int
    opened_at: float
    dropped: int = 0  # events that are missing in this part


class Recorder:
    """Records one process.  One thread.

    Args:
        folder: of this worker's parts; exists.
        rank: 0 for the serving process, which has none.

    Attributes:
        flush_due_at: when `flush_if_due` writes again.
    """

    def __init__(
        self,
        folder: Path,
        *,
        worker: int,
        role: str,
        rank: int,
        events_max: int = EVENTS_MAX,
        part_bytes_max: int = PART_BYTES_MAX,
    ) -> None:
        self._path = folder / f"{role}{rank}{PART_SUFFIX}"
        self._half_bytes = part_bytes_max // 2
        self._header = PartHeader(
            worker=worker, role=role, rank=rank, opened_at=time.monotonic(), dropped=0
        )
        self._events: deque[Event] = deque(maxlen=events_max)
        self._dropped = 0  # since the last flush
        self.flush_due_at = 0.0
        self._bytes = 0
        self._event_counts = [0, 0]  # of the old and of the current file
        self._file = self._open()
        self._write(b"")

    def ran(self, track: str, name: str, began_at: float, ended_at: float, **args: Any) -> None:
        """Something took from `began_at` to `ended_at`; slices of a track do not overlap."""
        self._add((SLICE, track, name, began_at, ended_at, 0, args or None))

    def instant(self, track: str, name: str, at: float, **args: Any) -> None:
        """Something happened."""
        self._add((INSTANT, track, name, at, at, 0, args or None))

    def begin(self, group: str, name: str, key: int, at: float, **args: Any) -> None:
        """Something began that may overlap others; inside of what (`group`, `key`) is open."""
        self._add((BEGIN, group, name, at, at, key, args or None))

    def end(self, group: str, name: str, key: int, at: float, **args: Any) -> None:
        """What began with the same group, name and key ended."""
        self._add((END, group, name, at, at, key, args or None))

    def flush_if_due(self, now: float) -> None:
        """Flush about once a second."""
        if now >= self.flush_due_at:
            self.flush()

    def flush(self) -> None:
        """Write what is in the buffer."""
        self.flush_due_at = time.monotonic() + FLUSH_INTERVAL_S
        if self._events and self._file >= 0:
            self._write(b"".join(msgspec.json.encode(event) + b"\n" for event in self._events))
            self._event_counts[1] += len(self._events)
        self._events.clear()

    def close(self) -> None:
        """Flush and close.  Idempotent."""
        self.flush()
        self._close_file()

    def _add(self, event: Event) -> None:
        if len(self._events) == self._events.maxlen:
            self._dropped += 1
        self._events.append(event)

    def _write(self, lines: bytes) -> None:
        """Append to the file, after a header if the file is new or events are missing."""
        try:
            if self._bytes > self._half_bytes:
                self._rotate()
            if self._dropped or not self._bytes:
                dropped = self._header.dropped + self._dropped
                self._header = msgspec.structs.replace(self._header, dropped=dropped)
                self._dropped = 0
                lines = msgspec.json.encode(self._header) + b"\n" + lines
            while lines:
                written = os.write(self._file, lines)
                self._bytes += written
                lines = lines[written:]
        except OSError as error:
            logger.warning("the timeline ends here: %s: %s", self._path, error.strerror)
            self._close_file()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def _rotate(self) -> None:
        """Give up the older half; the newer one becomes it."""
        self._close_file()
        self._path.replace(self._path.with_suffix(OLD_SUFFIX))
        self._file = self._open()
        self._bytes = 0
        self._dropped += self._event_counts[0]
        self._event_counts = [self._event_counts[1], 0]

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def open_recorder(folder: str, *, worker: int, role: str, rank: int = 0) -> Recorder | None:
    """Return a recorder that writes below `folder`, or None if it is empty: recording is off.

    Raises:
        ConfigError: nothing can be written there.
    """
    if not folder:
        return None
    own = Path(folder).expanduser() / f"worker-{worker}"
    try:
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Recorder(own, worker=worker, role=role, rank=rank)
    except OSError as error:
        raise ConfigError(f"obs.trace_folder: {own}: {error.strerror}") from error
