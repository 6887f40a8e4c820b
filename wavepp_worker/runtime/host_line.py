"""One connection between two hosts of a worker, and what must be equal on both.

A host that dies closes its connection, so the other end learns of it at once; a cut network does
not, and `receive` then ends after `SILENCE_S`.  Clocks of two hosts are never compared.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec

from wavepp_worker import __version__
from wavepp_worker.base.errors import PeerError
from wavepp_worker.config.derive import Plan
from wavepp_worker.config.schema import Config
from wavepp_worker.wire.hosts import HostMessage, decode_line, encode_line

BEAT_S = 1.0
SILENCE_S = 4.0  # a host that says nothing for so long is lost
# Keys that each host sets for itself.  Weights are compared by the plan's fingerprint.
LOCAL_KEYS = {
    "cluster": ("host", "group", "devices", "threads", "join_port", "start_timeout_s"),
    "model": ("path",),
}
LOCAL_SECTIONS = ("obs", "debug")


class HostLine:
    """Sends at once, receives one message at a time; closed at most once is enough."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, message: HostMessage) -> None:
        """Queue a message; a lost connection shows in `receive`."""
        if not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until what was sent has left; never fails."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except (OSError, TimeoutError):
            return

    async def receive(self, silence_s: float = SILENCE_S) -> HostMessage:
        """Return the next message.

        Raises:
            PeerError: the connection ended, nothing came for `silence_s`, or it was no message.
        """
        try:
            async with asyncio.timeout(silence_s):
                line = await self._reader.readline()
        except TimeoutError:
            raise PeerError(f"it said nothing for {silence_s:g} s") from None
        except ValueError:  # longer than the stream's limit
            raise PeerError("its message is too long") from None
        except OSError as error:
            raise PeerError(f"its connection failed: {error}") from error
        if not line.endswith(b"\n"):
            raise PeerError("its connection ended")
        return decode_line(line)

    def close(self) -> None:
        """Drop the connection.  Idempotent."""
        self._writer.close()


def shared_digests(config: Config, plan: Plan) -> dict[str, str]:
    """Return what must be equal on all hosts: version, and a digest per section and of the plan."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    shared = {
        name: {k: v for k, v in section.items() if k not in LOCAL_KEYS.get(name, ())}
        for name, section in tree.items()
        if name not in LOCAL_SECTIONS
    }
    digests = {name: _digest(section) for name, section in shared.items()}
    return {
        "version": __version__,
        "weights and plan": _digest(msgspec.to_builtins(plan)),
    } | digests


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """Return where two hosts' digests differ, with both; empty if they agree."""
    names = sorted(here.keys() | there.keys())
    return "; ".join(
        f"{name}: {here.get(name, 'nothing')} on the first host, {there.get(name, 'nothing')} here"
        for name in names
        if here.get(name) != there.get(name)
    )


def _digest(tree: object) -> str:
    return hashlib.sha256(msgspec.json.encode(tree, order="sorted")).hexdigest()[:12]
