"""The two records of a request: what each rank knows, and what only the leader knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_worker.admission.phases import ALLOWED, OPEN_ATTEMPT, Phase
from wavepp_worker.base.errors import check
from wavepp_worker.wire.mailbox import Sampling
from wavepp_worker.wire.rounds import Record, RecordVote


@dataclass(slots=True)
class RankRequest:
    """A request on one rank.  Endpoints in tokens.

    `hints` and `candidate` are replicated: they change only in `merge`, equally on all ranks.
    """

    rid: int
    seq: int
    prompt_tokens: int
    sampling: Sampling | None
    snapshot_points: tuple[int, ...] = ()  # where chunks end and states may be kept
    phase: Phase = Phase.ANNOUNCED
    hint: int | None = None  # this rank's last vote; None: it owes one
    full_hint: int | None = None  # the last probe without a cap
    probed_version: int | None = None  # of the hint index, at the last probe
    hints: dict[int, int] = field(default_factory=dict)  # rank -> voted hint
    candidate: int | None = None  # min over ranks, once all have voted
    attempt: int = 0
    leased_at: float = 0.0  # when the first attempt began here
    endpoint: int = 0  # leased while an attempt is open, agreed once ADMITTED
    ino: int = 0  # > 0: ADMITTED
    is_holding: bool = False  # lease and escrow exist in the cache
    answers: dict[Record, RecordVote] = field(default_factory=dict)  # of the current attempt
    answer: RecordVote | None = None  # current state, for messages of older attempts

    def move(self, new: Phase) -> None:
        """Change the phase, if that step exists."""
        check(new in ALLOWED[self.phase], "no such step", rid=self.rid, old=self.phase, new=new)
        self.phase = new

    def check_invariants(self) -> None:
        """A request holds something only while an attempt is open.  [I29]"""
        check(
            not self.is_holding or self.phase in OPEN_ATTEMPT,
            "a request outside an attempt holds something",
            rid=self.rid,
            phase=self.phase,
        )


@dataclass(slots=True)
class Attempt:
    """A chain of attempts of one request, from its first LEASE to admission or release."""

    record: Record  # what the next broadcast asks
    is_oversized: bool
    is_solo: bool  # the request had failed before
    is_last_resort: bool
    was_quiet: bool  # nothing else could change when it was opened
    reported: set[int] = field(default_factory=set)  # ranks that answered the current attempt


@dataclass(slots=True)
class LeaderRequest:
    """What the leader alone knows of a request, from its arrival until all ranks voted gone.

    Waiting state (`must_wait` and below) belongs to the latest failed attempt.  [algorithms 8.4]
    """

    rid: int
    seq: int
    prompt_tokens: int
    attempt_number: int = 0
    attempt: Attempt | None = None
    companions: set[int] = field(default_factory=set)  # attempts open together with the latest
    is_oversized: bool = False
    ino: int = 0  # > 0: admitted
    is_cancelled: bool = False  # a cancel is wished for, or on its way
    is_withdrawn: bool = False  # a cancel record is on its way; nothing else is asked any more
    rejection: tuple[str, str] | None = None  # reported instead of gone
    has_failed: bool = False
    must_wait: bool = False
    retry_at: float = 0.0
    failures: tuple[tuple[int, int], ...] = ()  # (rank, capacity generation)
    has_closed_companion: bool = False
    is_last_resort_due: bool = False
    installed: set[int] = field(default_factory=set)  # ranks that acknowledged
    gone: set[int] = field(default_factory=set)  # ranks
