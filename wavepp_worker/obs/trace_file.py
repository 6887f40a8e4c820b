"""One Chrome trace (https://ui.perfetto.dev opens it) of the part files of a run.

    worker-<pid>/serving0.jsonl, wave0.jsonl, loop0.jsonl, …  ─▶  {"traceEvents": […]}

Works on whatever is there: parts of a run that crashed, or that still goes on.  Events are copied
one by one, so memory does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.obs.timeline import (
    INSTANT,
    OLD_SUFFIX,
    PART_SUFFIX,
    SLICE,
    Event,
    PartHeader,
)

# Threads of a process in the trace, in the order of the display.
TRACKS: Final = {
    "serving": ("requests",),
    "wave": ("rounds", "requests"),
    "loop": ("device", "copies", "requests"),
}
TITLES: Final = {"serving": "serving", "wave": "WAVE_{rank}", "loop": "LOOP_{rank}"}
PIDS_PER_WORKER: Final = 1000  # more than 2P + 1

_HEADERS: Final = msgspec.json.Decoder(PartHeader)
_EVENTS: Final = msgspec.json.Decoder(Event)


class Merged(Struct, frozen=True):
    """What a trace holds."""

    processes: int
    events: int
    dropped: int  # by bounded recorders, and lines that were not written to their end


class _Part(NamedTuple):
    header: PartHeader
    files: tuple[Path, ...]  # older first


def merge_parts(folder: Path, file: Path) -> Merged:
    """Write the trace of all parts below `folder` to `file`, whole or not at all.

    Raises:
        ConfigError: a part cannot be read, or the file not written.
    """
    try:
        parts = sorted(_parts(folder), key=_order)
        return _write_trace(parts, file)
    except OSError as error:
        raise ConfigError(f"the timeline {file} cannot be written: {error}") from error


def _parts(folder: Path) -> Iterator[_Part]:
    for path in sorted(folder.glob(f"*/*{PART_SUFFIX}")):
        old = path.with_suffix(OLD_SUFFIX)
        files = (old, path) if old.exists() else (path,)
        for line in _lines(path):
            if isinstance(line, PartHeader):
                yield _Part(line, files)
            break


def _lines(path: Path) -> Iterator[PartHeader | Event | None]:
    """Yield the lines of a file; None for one that its process could not finish."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield _EVENTS.decode(line) if line.startswith(b"[") else _HEADERS.decode(line)
            except msgspec.MsgspecError:
                yield None


def _order(part: _Part) -> tuple[int, str, int]:
    return part.header.worker, part.header.role, part.header.rank


def _write_trace(parts: Sequence[_Part], file: Path) -> Merged:
    workers = sorted({part.header.worker for part in parts})
    zero = min((part.header.opened_at for part in parts), default=0.0)
    count = 0
    dropped: dict[str, int] = {}
    unfinished = file.with_name(file.name + ".part")
    with unfinished.open("wb") as out:
        out.write(b'{"displayTimeUnit": "ms",\n"traceEvents": [\n')
        for part in parts:
            title, pid = _title(part.header, workers), _pid(part.header, workers)
            out.write(b"".join(map(_line, _metadata(part.header.role, pid, title))))
            missing = 0
            for path in part.files:
                for line in _lines(path):
                    if isinstance(line, PartHeader):
                        # A total, told anew whenever it has grown.
                        missing = max(missing, line.dropped)
                    elif line is None:
                        dropped[title] = dropped.get(title, 0) + 1
                    else:
                        out.write(_line(_chrome(line, part.header.role, pid, zero)))
                        count += 1
            dropped[title] = dropped.get(title, 0) + missing
        # The format has no trailing commas; an empty metadata event takes the last place.
        out.write(msgspec.json.encode({"ph": "M", "pid": 0, "name": "end", "args": {}}))
        facts = {"zero_monotonic_s": zero, "dropped_events": dropped}
        out.write(b'\n],\n"otherData": ' + msgspec.json.encode(facts) + b"}\n")
    unfinished.replace(file)
    return Merged(len(parts), count, sum(dropped.values()))


def _line(event: dict[str, Any]) -> bytes:
    return msgspec.json.encode(event) + b",\n"


def _title(header: PartHeader, workers: Sequence[int]) -> str:
    title = TITLES.get(header.role, header.role).format(rank=header.rank)
    return title if len(workers) == 1 else f"{title} of worker {workers.index(header.worker) + 1}"


def _pid(header: PartHeader, workers: Sequence[int]) -> int:
    """Return serving 1, WAVE_0 2, LOOP_0 3, WAVE_1 4, …; of the next worker 1001, …"""
    place = {"serving": 1, "wave": 2, "loop": 3}.get(header.role, 0)
    return workers.index(header.worker) * PIDS_PER_WORKER + place + 2 * header.rank


def _metadata(role: str, pid: int, title: str) -> Iterator[dict[str, Any]]:
    def about(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}

    yield about("process_name", 0, name=title)
    yield about("process_sort_index", 0, sort_index=pid)
    for tid, track in enumerate(TRACKS.get(role, ()), 1):
        yield about("thread_name", tid, name=track)
        yield about("thread_sort_index", tid, sort_index=tid)


def _chrome(event: Event, role: str, pid: int, zero: float) -> dict[str, Any]:
    """Return an event in Chrome's form; its times are microseconds."""
    kind, track, name, began_at, ended_at, key, args = event
    made: dict[str, Any] = {"ph": kind, "pid": pid, "name": name, "ts": _micros(began_at - zero)}
    if kind in (SLICE, INSTANT):
        tracks = TRACKS.get(role, ())
        made["tid"] = tracks.index(track) + 1 if track in tracks else 0
    if kind == SLICE:
        made["dur"] = _micros(ended_at - began_at)
    elif kind == INSTANT:
        made["s"] = "t"
    else:  # spans that may overlap: Perfetto gives each name tracks of its own
        made |= {"cat": track, "id2": {"local": f"{key:#x}"}, "tid": 0}
    if args is not None:
        made["args"] = args
    return made


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
