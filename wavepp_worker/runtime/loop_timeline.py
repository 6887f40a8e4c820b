"""Records what a LOOP process does, from the events and commands that pass through its driver.

    device    waves, and the gaps between them by cause (`runtime.gaps`)
    copies    to and from the host tier, and of states
    requests  installs
    queued    a wave from its header to its start        ┐ overlap: spans of their own
    hold      a finished prompt, until its reader is done ┘

The device side leaves marks from whatever thread it runs on; everything else is one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from wavepp_worker.executor.commands import DropHold, LoopCommand, OpenHold, RunWave
from wavepp_worker.executor.events import HoldEnded, LoopEvent
from wavepp_worker.obs.timeline import Recorder
from wavepp_worker.runtime.gaps import CopyMarks, WaveMarks, gap_parts
from wavepp_worker.wire.mailbox import Install
from wavepp_worker.wire.waves import WaveHeader

MARKS_MAX: Final = 65_536  # more than pass between two looks; the oldest are lost

Marks = deque[WaveMarks | CopyMarks]  # append and popleft are atomic


def new_marks() -> Marks:
    """Return where a stage's stream leaves its marks, in the order in which it worked."""
    return deque(maxlen=MARKS_MAX)


class _Given(Struct, frozen=True):
    """A wave that the device has and has not finished."""

    header_at: float
    run_at: float
    budget: int
    spans: Sequence[tuple[int, int, int]]  # rid, start, length


class LoopTimeline:
    """One rank's LOOP.

    Args:
        marks: of the stage's stream; None: it tells nothing, so the device's track stays empty.
    """

    def __init__(self, recorder: Recorder, marks: Marks | None) -> None:
        self._recorder = recorder
        self._marks: Marks = new_marks() if marks is None else marks
        self._header_at: dict[int, float] = {}
        self._given: dict[int, _Given] = {}
        self._dropped: set[int] = set()  # rids of holds that a cancel ends
        self._last: WaveMarks | None = None

    def take(self, event: LoopEvent, now: float) -> None:
        """Look at an event, before the machine handles it."""
        match event:
            case WaveHeader():
                self._header_at[event.wave] = now
            case Install():
                self._recorder.instant(
                    "requests",
                    "install",
                    now,
                    rid=event.rid,
                    ino=event.ino,
                    prompt_tokens=event.prompt_tokens,
                    endpoint=event.endpoint,
                    copies=len(event.copies),
                )
            case HoldEnded(rid=rid):
                was_dropped = rid in self._dropped
                self._dropped.discard(rid)
                self._recorder.end("hold", "hold", rid, now, was_dropped=was_dropped)

    def perform(self, command: LoopCommand, now: float) -> None:
        """Look at a command, before it is performed."""
        match command:
            case RunWave():
                header_at = self._header_at.pop(command.wave, now)  # rank 0 makes it just now
                spans = [(chunk.rid, chunk.start, chunk.length) for chunk in command.chunks]
                self._given[command.wave] = _Given(header_at, now, command.budget, spans)
                self._recorder.begin("queued", "queued", command.wave, header_at, wave=command.wave)
            case OpenHold():
                self._recorder.begin(
                    "hold", "hold", command.rid, now, rid=command.rid, tokens=command.tokens
                )
            case DropHold():
                self._dropped.add(command.rid)

    def look(self, now: float) -> None:
        """Take the device's marks; write to the file about once a second."""
        while self._marks:
            mark = self._marks.popleft()
            if isinstance(mark, WaveMarks):
                self._take_wave(mark)
            else:
                self._take_copies(mark)
        self._recorder.flush_if_due(now)

    def close(self, now: float) -> None:
        """Write what is left.  Idempotent."""
        self.look(now)
        self._recorder.close()

    def _take_copies(self, copies: CopyMarks) -> None:
        self._recorder.ran(
            "copies",
            "enqueue copies" if copies.is_enqueued else "copies",
            copies.began_at,
            copies.ended_at,
            offloads=copies.offloads,
            onboards=copies.onboards,
        )

    def _take_wave(self, marks: WaveMarks) -> None:
        given = self._given.pop(marks.wave)
        recorder = self._recorder
        recorder.end("queued", "queued", marks.wave, marks.began_at)
        if self._last is not None:
            for part in gap_parts(self._last, marks, given.header_at, given.run_at):
                recorder.ran(
                    "device",
                    part.cause,
                    part.began_at,
                    part.ended_at,
                    cause=part.cause,
                    before_wave=marks.wave,
                )
        recorder.ran(
            "device",
            f"wave {marks.wave}",
            marks.began_at,
            marks.ended_at,
            wave=marks.wave,
            tokens=sum(length for _, _, length in given.spans),
            budget=given.budget,
            rids=[rid for rid, _, _ in given.spans],
            spans=[f"{rid}: {start}+{length}" for rid, start, length in given.spans],
        )
        self._last = marks
