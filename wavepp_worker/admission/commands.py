"""Everything that an AdmissionMachine can ask for.

Sections run on this rank's cache, one at a time, and are answered by a result event before the
machine is told anything else.  Outward commands leave the rank's books and are never answered.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.admission.phases import Phase
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.mailbox import Install, Refused, Waiting
from wavepp_worker.wire.rounds import RoundBcast, RoundGathered, RoundVote

# ── cache sections ───────────────────────────────────────────────────────────────────────────


class Section(Struct, frozen=True):
    """Base of all cache sections."""


class Learn(Section, frozen=True):
    """Remember a request's keys and the points where a state may be kept; no references."""

    rid: int
    prompt_tokens: int
    keys: bytes
    snapshot_points: tuple[int, ...] = ()


class Probe(Section, frozen=True):
    """Read the hint endpoint, at most `cap` tokens: from the index, or by a walk of the tree."""

    rid: int
    cap: int | None = None
    is_walk: bool = False


class AcquireLease(Section, frozen=True):
    """Lease the longest valid endpoint <= cap tokens."""

    rid: int
    attempt: int
    cap: int


class TrimLease(Section, frozen=True):
    """Lower the lease to the longest valid endpoint <= cap tokens."""

    rid: int
    cap: int


class PrepareEscrow(Section, frozen=True):
    """Reserve what the suffix needs; on a shortfall the lease is released as well."""

    rid: int
    no_floor: bool


class CommitEscrow(Section, frozen=True):
    """Fix the escrow at the lease's endpoint, in tokens."""

    rid: int
    endpoint: int
    no_floor: bool


class ReleaseAttempt(Section, frozen=True):
    """Release the escrow, then the lease."""

    rid: int


class Materialize(Section, frozen=True):
    """Turn lease and escrow into a sequence with real blocks."""

    rid: int
    ino: int


class Forget(Section, frozen=True):
    """Drop the request's keys."""

    rid: int


class ReadCapacity(Section, frozen=True):
    """Read what a vote says of this rank's pools, and the version of its index, together."""


# ── outward commands ─────────────────────────────────────────────────────────────────────────


class Outward(Struct, frozen=True):
    """Base of all commands that leave the machine's rank or describe it."""


class SendBroadcast(Outward, frozen=True):
    """Leader: to every other rank."""

    bcast: RoundBcast


class SendVote(Outward, frozen=True):
    """Follower: to the leader."""

    vote: RoundVote


class SendGathered(Outward, frozen=True):
    """Leader: to every other rank."""

    gathered: RoundGathered


class SendInstall(Outward, frozen=True):
    """To this rank's LOOP: tokens only on rank 0, sampling only on the last rank."""

    install: Install


class SendDrop(Outward, frozen=True):
    """Rank 0, to LOOP0: an admitted request was cancelled.  [A55]"""

    rid: int
    ino: int


class SendAdmitting(Outward, frozen=True):
    """Rank 0, to LOOP0: how many attempts are open; sent when it changed."""

    count: int


class TellAsker(Outward, frozen=True):
    """Rank 0, to LOOP0, where it asks for requests: how many wait, when that changed; or no."""

    message: Waiting | Refused


class SendCacheView(Outward, frozen=True):
    """To serving: this rank's cache view under the given number."""

    number: int


class ReportReady(Outward, frozen=True):
    """Rank 0, to serving, once: every rank voted; the smallest rank's cache in tokens.

    UNLIMITED_TOKENS if no rank has a dense window: then the length of a prompt costs no slots.
    """

    total_tokens: int


class ReportRejected(Outward, frozen=True):
    """Rank 0, to serving: the end of this request; no ReportGone follows."""

    rid: int
    code: str
    text: str


class ReportGone(Outward, frozen=True):
    """Rank 0, to serving: the request holds nothing on any rank; nobody remembers it."""

    rid: int


class ShutDown(Outward, frozen=True):
    """Tell LOOP and exit 0."""

    reason: str


class Transition(Outward, frozen=True):
    """A line of a request's story on this rank; `old` is None for the first."""

    rid: int
    old: Phase | None
    new: Phase
    at: Instant
    cause: str


Command = Section | Outward
