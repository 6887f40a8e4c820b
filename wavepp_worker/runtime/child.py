"""One child process of the supervisor: its exit, noticed by pidfd, and its output, by pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from wavepp_worker.base.errors import check

LINE_BYTES_MAX = 4096  # longer lines are passed on in pieces
LINES_KEPT = 20  # for the reason of its death
READ_BYTES = 65_536  # a pipe's capacity: at most one read per wake-up, so no child starves others


class Child:
    """Starts `command` at once; lives on the running asyncio loop.

    Args:
        name: put in front of every line of output, which goes to our stderr.
        on_exit: called once, with this object, after the process has exited.

    Attributes:
        gone: done when the process has exited.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        on_exit: Callable[[Child], None],
    ) -> None:
        self.name = name
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._status: int | None = None
        self._partial = b""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._output, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write_end, True)
        try:
            # Its own process group: Ctrl-C and signals to a group are for the serving process.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                process_group=0,
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._output, self._pass_output)
        self._loop.add_reader(self._pidfd, self._reap)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has exited; a recycled pid is never hit."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    @property
    def status(self) -> int | None:
        """Exit status, -N if signal N killed it, None while it lives."""
        return self._status

    def obituary(self) -> str:
        """Return how the process ended."""
        check(self._status is not None, "the process lives", name=self.name)
        status = self._status or 0
        if status < 0:
            return f"{self.name} (pid {self.pid}) was killed by {signal.Signals(-status).name}"
        return f"{self.name} (pid {self.pid}) exited with status {status}"

    def tail(self) -> str:
        """Return the last lines of output, on one line."""
        return " | ".join(self._lines)

    def _reap(self) -> None:
        self._status = self._process.wait()  # it has exited: returns at once
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        while self._pass_output():
            pass
        self.gone.set_result(None)
        self._on_exit(self)

    def _pass_output(self) -> bool:
        """Pass on what is in the pipe; return whether there may be more."""
        if self._output < 0:
            return False
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            if self._status is None:
                return False
            data = b""  # a grandchild keeps the pipe open; we are done with it
        if not data:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data or len(self._partial) > LINE_BYTES_MAX:
            lines.append(self._partial)
            self._partial = b""
        self._print([line for line in lines if line])
        return bool(data)

    def _print(self, lines: Sequence[bytes]) -> None:
        texts = [
            line[at : at + LINE_BYTES_MAX].decode(errors="replace")
            for line in lines
            for at in range(0, len(line), LINE_BYTES_MAX)
        ]
        self._lines.extend(texts)
        with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone
            sys.stderr.write("".join(f"[{self.name}] {text}\n" for text in texts))
            sys.stderr.flush()
