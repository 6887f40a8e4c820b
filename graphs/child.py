"""One child process of a graph: its lines, its end, and nothing left of its session afterwards.

Everything runs on the asyncio loop through descriptors (pidfd, pipe); no helper thread exists, so
forking stays safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping

from graphs.deployment import ProcessPlan

TAIL_LINES = 20
LINE_BYTES_MAX = 1 << 16  # a longer line is shown in pieces
READ_BYTES = 1 << 16
PR_SET_PDEATHSIG = 1
# How a worker logs that it was asked for its health too early; we ask, so it is no news.
EARLY_QUESTION = "response failed classification=Status code: 503"
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_libc = ctypes.CDLL(None, use_errno=True)


class Child:
    """A started process.

    Attributes:
        ended: resolves to the exit status once the process and its session are gone; negative:
            the signal's number.
        tail: its last lines.
        is_ready: set by the launcher when the process answered its readiness question.
    """

    def __init__(
        self, plan: ProcessPlan, env: Mapping[str, str], on_line: Callable[[str, str], None]
    ) -> None:
        self.plan = plan
        self.name = plan.name
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.is_ready = False
        self._on_line = on_line
        self._partial = b""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        parent = os.getpid()
        self._pipe, write_end = os.pipe()
        try:
            self._popen = subprocess.Popen(
                plan.command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for the launcher alone
                preexec_fn=lambda: _die_with(parent),
            )
        finally:
            os.close(write_end)
        self.pid = self._popen.pid
        os.set_blocking(self._pipe, False)
        self._loop.add_reader(self._pipe, self._read)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._end)

    def terminate(self) -> None:
        """Ask the process to end in order; it knows its own children."""
        if not self.ended.done():
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and everything in its session."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _end(self) -> None:
        # The zombie still keeps the process id, so the group can be swept without a race.
        self._loop.remove_reader(self._pidfd)
        self.kill()
        os.close(self._pidfd)
        status = self._popen.wait()
        self._read()
        if self._partial:
            self._emit(self._partial)
        self._close_pipe()
        self.ended.set_result(status)

    def _read(self) -> None:
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._close_pipe()
                return
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._emit(line)
            if len(self._partial) > LINE_BYTES_MAX:
                self._emit(self._partial)
                self._partial = b""

    def _emit(self, line: bytes) -> None:
        text = ANSI.sub("", line.decode(errors="replace")).rstrip()
        if text and (self.is_ready or EARLY_QUESTION not in text):
            self.tail.append(text)
            self._on_line(self.plan.component.name, f"[{self.name}] {text}")

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _die_with(parent: int) -> None:
    """In the child: be killed when the launcher is, however it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def describe_end(status: int) -> str:
    """Return "exit status 1" or "signal SIGKILL"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
