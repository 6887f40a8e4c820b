"""Encoding of all messages between WavePP's processes: msgpack arrays, size-checked, never pickle.

Every plane has one tagged union of message types; a `Codec` binds a union, so that a frame of the
wrong plane is refused.  Unknown trailing fields are ignored, which lets a newer sender add one.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from wavepp_worker.base.errors import PeerError
from wavepp_worker.base.limits import FRAME_BYTES_MAX

M = TypeVar("M")


class Codec(Generic[M]):
    """Encoder and decoder of one plane's messages."""

    def __init__(self, message_union: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_union)

    def encode(self, message: M) -> bytes:
        """Return the frame of `message`.

        Raises:
            PeerError: the frame would exceed `FRAME_BYTES_MAX`.
        """
        frame = self._encoder.encode(message)
        if len(frame) > FRAME_BYTES_MAX:
            raise PeerError(f"message of {len(frame)} bytes exceeds {FRAME_BYTES_MAX}")
        return frame

    def decode(self, frame: bytes | memoryview) -> M:
        """Return the message in `frame`.

        Raises:
            PeerError: too large, not msgpack, or not a message of this plane.
        """
        if len(frame) > FRAME_BYTES_MAX:
            raise PeerError(f"frame of {len(frame)} bytes exceeds {FRAME_BYTES_MAX}")
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise PeerError(f"undecodable frame: {error}") from error
