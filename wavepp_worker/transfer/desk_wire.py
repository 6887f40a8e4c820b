"""Messages between a decode worker's reader and a stage's hold desk.

    reader ── Open, Renew, Close, Decline ──▶ desk        one reply to each, in order
    desk   ── Opened, Refused, Held, Expired ──▶ reader

`ask` numbers a reader's questions, so that a late reply is never taken for the next one.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.codec import Codec

DESK_VERSION = 2  # of these messages and of the block layout that they describe


class Open(Struct, array_like=True, frozen=True, tag="open"):
    """Start reading a hold.  A hold is opened once."""

    ask: int
    version: int
    hold: str
    ticket: str  # made up by the reader, unguessable: names this read in Renew and Close
    fingerprint: str
    block_tokens: int
    agent_known: str = ""  # NIXL agent of this desk whose metadata the reader has loaded


class Renew(Struct, array_like=True, frozen=True, tag="renew"):
    """The read goes on: start the hold's time anew."""

    ask: int
    ticket: str


class Close(Struct, array_like=True, frozen=True, tag="close"):
    """The reader is done, or gives up; the hold ends."""

    ask: int
    ticket: str


class Decline(Struct, array_like=True, frozen=True, tag="decline"):
    """Nobody will open this hold; it ends.  Answered like `Close`."""

    ask: int
    hold: str


class OpenedState(Struct, array_like=True, frozen=True):
    """Where the state after the prompt lies: one slot, `slot_bytes` long.

    The stage's recurrent layers in order, each `layer_bytes` long: the state, fp32 and of
    `state_shape`, then the convolution's tail, of the model's type and `tail_shape`.
    """

    pool_base: int
    pool_slots: int
    slot_bytes: int
    layer_bytes: int
    state_shape: tuple[int, ...]
    tail_shape: tuple[int, ...]
    slot: int


class Opened(Struct, array_like=True, frozen=True, tag="opened"):
    """Where the bytes of one stage lie.

    Block `i` of the request is `block_bytes` long, at `pool_base + block_ids[i] * block_bytes`:
    the attention layers of `layers` in order, each `layer_bytes` long; none without such layers.
    """

    ask: int
    hold_s: float
    agent: str
    metadata: bytes  # NIXL's blob; empty if the reader knows the agent
    metadata_digest: bytes  # SHA-256 of the agent's blob
    memory: str  # "DRAM" | "VRAM"
    device: int
    pool_base: int
    pool_blocks: int
    block_bytes: int
    layer_bytes: int
    layers: tuple[int, int]
    dtype: str
    block_ids: tuple[int, ...]
    tokens: int
    state: OpenedState | None = None  # of a stage with recurrent layers


class Refused(Struct, array_like=True, frozen=True, tag="refused"):
    """The hold cannot be read; nothing was reserved."""

    ask: int
    reason: str


class Held(Struct, array_like=True, frozen=True, tag="held"):
    """Until now the slots kept their content: what was read may be used.  [A54]"""

    ask: int


class Expired(Struct, array_like=True, frozen=True, tag="expired"):
    """The hold ended before this message: what was read must be discarded.  [A54, S16]"""

    ask: int


DeskRequest = Open | Renew | Close | Decline
DeskReply = Opened | Refused | Held | Expired
TO_DESK: Codec[DeskRequest] = Codec(DeskRequest)
FROM_DESK: Codec[DeskReply] = Codec(DeskReply)
