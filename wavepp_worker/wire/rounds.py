"""Messages of the rounds plane (WAVE to WAVE).  [algorithms 9.2]

One round = `RoundBcast` from the leader to every rank, one `RoundVote` from every rank to the
leader, and `RoundGathered` (all votes) from the leader to every rank.
"""

from __future__ import annotations

from enum import IntEnum

from msgspec import Struct

from wavepp_worker.wire.codec import Codec
from wavepp_worker.wire.mailbox import Sampling


class RecordPhase(IntEnum):
    """What a record asks every rank to do for one attempt."""

    LEASE = 1
    TRIM = 2
    COMMIT = 3
    RELEASE = 4


FLAG_COMMIT = 1  # LEASE: auto_commit; TRIM: commit_if_exact
FLAG_NO_FLOOR = 2  # oversized exception or last resort: floors are waived


class VoteStatus(IntEnum):
    """A rank's answer to a record."""

    PENDING = 0
    LEASED = 1
    PREPARED = 2
    COMMITTED = 3
    PREP_FAILED = 4
    COMMIT_FAILED = 5
    RELEASED = 6
    UNKNOWN_RID = 7


class AnnounceEntry(Struct, array_like=True, frozen=True):
    """A request as every rank learns of it: keys, never tokens.  [A37]"""

    rid: int
    seq: int  # arrival order at the leader
    prompt_tokens: int
    keys: bytes  # KEY_BYTES per full block, concatenated
    snapshot_points: tuple[int, ...] = ()
    sampling: Sampling | None = None


class Record(Struct, array_like=True, frozen=True):
    """One instruction for one attempt; identified by all its fields."""

    rid: int
    attempt: int
    phase: RecordPhase
    endpoint: int  # tokens
    flags: int = 0


class RoundBcast(Struct, array_like=True, frozen=True, tag="bcast"):
    """What the leader asks in one round."""

    epoch: int
    round: int
    announces: tuple[AnnounceEntry, ...] = ()
    records: tuple[Record, ...] = ()
    cancels: tuple[int, ...] = ()  # rids, repeated until every rank voted gone
    view_request: int = 0  # nonzero: every WAVE sends a CacheView with this number to serving
    shutdown: bool = False
    reason: str = ""


class RecordVote(Struct, array_like=True, frozen=True):
    """The answer to one record."""

    rid: int
    attempt: int
    phase: RecordPhase
    status: VoteStatus
    endpoint: int
    is_committed: bool = False
    generation: int = 0  # capacity_gen read inside the failing section  [algorithms 8.4]


class HintVote(Struct, array_like=True, frozen=True):
    """A rank's hint endpoint for one request, in tokens."""

    rid: int
    endpoint: int


class RoundVote(Struct, array_like=True, frozen=True, tag="vote"):
    """One rank's report in one round."""

    epoch: int
    round: int
    rank: int
    hints: tuple[HintVote, ...] = ()  # new or changed only
    votes: tuple[RecordVote, ...] = ()
    installed: tuple[int, ...] = ()  # rids whose Install was sent since the last vote
    gone: tuple[int, ...] = ()  # rids whose slots on this rank are free; voted once each
    available_tokens: int = 0
    capacity_generation: int = 0
    total_tokens: int = 0  # size of the smallest dense pool of this rank, in tokens
    is_sparse: bool = False  # some window cannot resume at every boundary of what it holds
    has_states: bool = False  # some window is recurrent: snapshot points are wanted
    fatal: str = ""


class RoundGathered(Struct, array_like=True, frozen=True, tag="gathered"):
    """All votes of one round, in rank order."""

    epoch: int
    round: int
    votes: tuple[RoundVote, ...]


RoundMessage = RoundBcast | RoundVote | RoundGathered
ROUNDS: Codec[RoundMessage] = Codec(RoundMessage)
