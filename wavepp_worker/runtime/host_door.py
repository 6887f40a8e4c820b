"""Where other hosts join a worker: a TCP listener on the first host, beside its supervisor.

    other host ── Join ─▶ HostDoor ── Welcome ─▶ other host starts its ranks
    a connection ends, falls silent or says Lost ─▶ on_lost: the worker fails as a unit

A rank joins once in an epoch: whoever comes again, or for another epoch, is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from wavepp_worker.base.errors import PeerError
from wavepp_worker.runtime.host_line import BEAT_S, HostLine, differences
from wavepp_worker.wire.hosts import (
    LINE_BYTES_MAX,
    REASON_CHARS_MAX,
    Beat,
    End,
    Join,
    Lost,
    Refused,
    Welcome,
)

logger = logging.getLogger(__name__)

CONNECTIONS_MAX = 256  # at once; more are dropped unheard


class HostDoor:
    """Lets hosts in and watches them.

    Args:
        welcome: what every host is told.
        group: whoever does not know it is refused.
        digests: of this host, as `shared_digests` returns them.
        ranks: that other hosts run.
        on_lost: called with the reason when a host that was let in is lost.
    """

    def __init__(
        self,
        welcome: Welcome,
        group: str,
        digests: dict[str, str],
        ranks: set[int],
        on_lost: Callable[[str], None],
    ) -> None:
        self._welcome, self._group, self._digests = welcome, group, digests
        self._free = set(ranks)
        self._on_lost = on_lost
        self._hosts: set[HostLine] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()
        self._connections = 0
        self._is_ending = False
        self._server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int) -> None:
        """Listen; OSError if that is not possible."""
        self._server = await asyncio.start_server(self._attend, host, port, limit=LINE_BYTES_MAX)
        self._beats = asyncio.get_running_loop().create_task(self._beat())
        logger.info("waiting for hosts: address=%s:%d ranks=%s", host, port, sorted(self._free))

    def end(self, reason: str, *, failed: bool) -> None:
        """Tell every host that the worker ends.  Only the first call counts."""
        if not self._is_ending:
            self._is_ending = True
            for line in self._hosts:
                line.send(End(reason[:REASON_CHARS_MAX], failed))

    async def close(self, grace_s: float) -> None:
        """Wait until all hosts have left, at most `grace_s`, and drop what is left.  Idempotent."""
        self.end("the first host ends", failed=True)
        try:
            async with asyncio.timeout(grace_s):
                await self._all_gone.wait()
        except TimeoutError:
            logger.warning("hosts did not leave in %g s: count=%d", grace_s, len(self._hosts))
        if self._beats is not None:
            self._beats.cancel()
        if self._server is not None:
            self._server.close()
        for line in self._hosts:
            line.close()

    def refusal(self, join: Join) -> str:
        """Return why a host cannot join; empty if it can."""
        if not secrets.compare_digest(join.group.encode(), self._group.encode()):
            return "the group id is not this worker's"
        if join.epoch not in (0, self._welcome.epoch):
            return (
                f"epoch {join.epoch} is over: the first host runs epoch {self._welcome.epoch}; "
                "start this host anew, without --epoch"
            )
        if differing := differences(self._digests, join.digests):
            return f"configurations differ: {differing}"
        ranks = set(join.ranks)
        if self._is_ending or not ranks or len(ranks) < len(join.ranks) or not ranks <= self._free:
            return (
                f"ranks {sorted(join.ranks)} cannot join epoch {self._welcome.epoch}: "
                f"it waits for ranks {[] if self._is_ending else sorted(self._free)}"
            )
        return ""

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = HostLine(reader, writer)
        if self._connections >= CONNECTIONS_MAX:
            line.close()
            return
        self._connections += 1
        try:
            join = await line.receive()
            if not isinstance(join, Join):
                return
            if reason := self.refusal(join):
                logger.warning("a host was refused: host=%r reason=%s", join.host, reason)
                line.send(Refused(reason[:REASON_CHARS_MAX]))
                await line.flush()
                return
            await self._watch(line, join)
        except PeerError as error:
            logger.info("a connection was dropped: %s", error)
        finally:
            self._connections -= 1
            line.close()

    async def _watch(self, line: HostLine, join: Join) -> None:
        name = f"host {join.host} (ranks {', '.join(map(str, sorted(join.ranks)))})"
        self._free -= set(join.ranks)
        self._hosts.add(line)
        self._all_gone.clear()
        line.send(self._welcome)
        logger.info("%s joined: epoch=%d", name, self._welcome.epoch)
        try:
            reason = f"{name} was lost: {await _last_words(line)}"
        finally:
            self._hosts.discard(line)
            if not self._hosts:
                self._all_gone.set()
        if not self._is_ending:
            self._on_lost(reason)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for line in self._hosts:
                line.send(Beat())


async def _last_words(line: HostLine) -> str:
    """Return why a host left, once it has."""
    while True:
        try:
            message = await line.receive()
        except PeerError as error:
            return str(error)
        if isinstance(message, Lost):
            return message.reason
