"""Everything that an AdmissionMachine can be told.

Two families: what happens outside (the serving process, the rounds plane, LOOP, the clock), and
the results of the cache sections that the machine asked for.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.mailbox import Announce, Copy, StateSlots
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered, RoundVote


class Event(Struct, frozen=True):
    """Base of all inputs."""


# ── from outside ─────────────────────────────────────────────────────────────────────────────


class Announced(Event, frozen=True):
    """Leader: serving hands in a request."""

    announce: Announce


class CancelRequested(Event, frozen=True):
    """Leader: nobody waits for this request any more."""

    rid: int


class Asked(Event, frozen=True):
    """Leader: LOOP0 wants one more request, and waits."""

    may_refuse: bool


class ViewRequested(Event, frozen=True):
    """Leader: every rank shall report its cache view with this number."""

    number: int


class ShutdownRequested(Event, frozen=True):
    """Leader: end all ranks in order."""

    reason: str


class BroadcastReceived(Event, frozen=True):
    """Follower: a round begins."""

    bcast: RoundBcast


class VoteReceived(Event, frozen=True):
    """Leader: another rank's vote."""

    vote: RoundVote


class GatheredReceived(Event, frozen=True):
    """Follower: all votes of the open round."""

    gathered: RoundGathered


class SequenceFreed(Event, frozen=True):
    """LOOP gave the request's slots back, and the cache took them."""

    rid: int


class Tick(Event, frozen=True):
    """Leader: `next_deadline` may have passed."""


OutsideEvent = (
    Announced
    | CancelRequested
    | Asked
    | ViewRequested
    | ShutdownRequested
    | BroadcastReceived
    | VoteReceived
    | GatheredReceived
    | SequenceFreed
    | Tick
)


# ── results of cache sections ────────────────────────────────────────────────────────────────


class SectionResult(Event, frozen=True):
    """Base of the answers to sections; a section without a result answers `SectionDone`."""


class SectionDone(SectionResult, frozen=True):
    """Learn, ReleaseAttempt or Forget has run."""


class HintProbed(SectionResult, frozen=True):
    """The rank's hint endpoint, in tokens, and the version of the index that says so."""

    endpoint: int
    index_version: int


class LeaseTaken(SectionResult, frozen=True):
    """AcquireLease or TrimLease: the endpoint that is leased now, in tokens."""

    endpoint: int


class EscrowHeld(SectionResult, frozen=True):
    """PrepareEscrow or CommitEscrow succeeded."""


class EscrowShort(SectionResult, frozen=True):
    """PrepareEscrow failed (the lease is gone too), or CommitEscrow did (everything is kept).

    Attributes:
        generation: capacity generation read inside the failing section.  [algorithms 8.4]
    """

    generation: int


class SequenceMade(SectionResult, frozen=True):
    """Materialize: the sequence owns its slots, escrow and lease are released."""

    endpoint: int
    tables: tuple[tuple[int, ...], ...]
    copies: tuple[Copy, ...]
    states: tuple[StateSlots, ...]


class CapacityRead(SectionResult, frozen=True):
    """What a vote says about this rank's pools, and the version of its hint index.

    Attributes:
        available_tokens, total_tokens: of dense windows; UNLIMITED_TOKENS without one.  [A50]
        is_sparse: not every boundary of what is held can be resumed.
        has_states: some window is recurrent, so snapshot points are wanted.
    """

    available_tokens: int
    generation: int
    total_tokens: int
    index_version: int
    is_sparse: bool
    has_states: bool
