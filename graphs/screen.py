"""What the user of `dynamo serve` sees: prefixed logs, one progress line, the table at the end.

On a terminal everything is coloured and the progress line moves; elsewhere the same facts come as
plain lines that a log file can keep.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

COLOURS = ("cyan", "magenta", "green", "blue", "bright_cyan", "bright_magenta")
LEVEL = re.compile(r"\b(WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
PLAIN_WIDTH = 240


class _Console(Console):
    def __init__(self, on_closed: Callable[[], None]) -> None:
        is_terminal = sys.stdout.isatty()
        super().__init__(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
        self._on_closed = on_closed

    def on_broken_pipe(self) -> None:
        """Go quiet when the reader of our output left, and say so."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self._on_closed()


class Screen:
    """The launcher's output."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._console = _Console(on_closed)
        self._status: Status | None = None
        self._progress = ""
        self._colours: dict[str, str] = {}

    def log(self, component: str, line: str) -> None:
        """Show one line of a process; the part in brackets is its prefix."""
        colour = self._colours.setdefault(component, COLOURS[len(self._colours) % len(COLOURS)])
        text = Text(line)
        if level := LEVEL.search(line):
            text.stylize("yellow" if level[1].startswith("WARN") else "red")
        text.stylize(f"bold {colour}", 0, line.index("]") + 1)
        self._console.print(text, soft_wrap=True)

    def say(self, text: str, style: str = "bold") -> None:
        """Show a line of the launcher's own."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def progress(self, stable: str, moving: str = "") -> None:
        """Show where the start or the stop stands; `moving` only where lines can be redrawn."""
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(stable)
                self._status.start()
            self._status.update(Text(f"{stable} {moving}"))
        elif stable != self._progress:
            self.say(stable)
        self._progress = stable

    def progress_done(self) -> None:
        """Take the progress line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def table(self, rows: Sequence[tuple[str, int, str]]) -> None:
        """Show the processes: name, process id, what each does."""
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for title in ("process", "pid", "what it does"):
            table.add_column(title, justify="right" if title == "pid" else "left", no_wrap=True)
        for name, pid, does in rows:
            table.add_row(name, str(pid), does)
        self._console.print(table)
