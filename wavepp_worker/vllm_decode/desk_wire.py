"""Messages between the serving process and a stage's push desk: one answer to each question.

A stage does not know under which name decode asks for a prompt.  Serving tells it, once the prompt
is complete on every stage and before decode hears of it.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.vllm_decode.protocol import Text
from wavepp_worker.wire.codec import Codec


class Assign(Struct, array_like=True, frozen=True, tag="assign"):
    """Decode will ask for the prompt of this hold by `request_id`."""

    ask: int
    hold: str
    request_id: Text


class Assigned(Struct, array_like=True, frozen=True, tag="assigned"):
    """The stage waits for decode's registration."""

    ask: int
    engine_id: str  # of this life of the worker; the same on every stage
    payload: bytes  # what the side channel answers for this stage


class Unknown(Struct, array_like=True, frozen=True, tag="unknown"):
    """The hold has ended."""

    ask: int


PushReply = Assigned | Unknown
TO_PUSH: Codec[Assign] = Codec(Assign)
FROM_PUSH: Codec[PushReply] = Codec(PushReply)
