"""What follows from all ranks' votes on one record: pure, and the same on every rank.

Table 6.4 of the algorithms, with L = lease endpoints:

    some vote missing or pending          REPEAT    the same record again
    some rank failed                      RELEASE   everywhere; the request waits for capacity
    all committed, L equal                ADMIT     every rank installs by itself   [P-COMMIT]
    none committed, L equal               COMMIT    at L
    none committed, L differ              TRIM      to min L                        [P-RECONCILE]
    some committed, not all of the above  RETRY     attempt + 1, LEASE at min L
    RELEASE answered by all               CLOSE     the attempt is over

Endpoints never rise within a chain of attempts, and each TRIM or RETRY lowers the common one, so
the chain ends at equality or at 0, which is valid everywhere.  [I11, I12, I13]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from wavepp_worker.wire.rounds import Record, RecordPhase, RecordVote, RoundVote, VoteStatus


class Action(StrEnum):
    """The verdict on one record."""

    REPEAT = "repeat"
    ADMIT = "admit"
    COMMIT = "commit"
    TRIM = "trim"
    RETRY = "retry"
    RELEASE = "release"
    CLOSE = "close"


class Verdict(Struct, frozen=True):
    """What happens next to an attempt.

    Attributes:
        endpoint: tokens; the new common endpoint of ADMIT, COMMIT, TRIM and RETRY.
        failures: RELEASE only: (rank, capacity generation inside the failing section).
    """

    action: Action
    endpoint: int = 0
    failures: tuple[tuple[int, int], ...] = ()


FAILED = frozenset({VoteStatus.PREP_FAILED, VoteStatus.COMMIT_FAILED, VoteStatus.UNKNOWN_RID})
CLOSED = frozenset({VoteStatus.RELEASED, VoteStatus.UNKNOWN_RID})


def reconcile(record: Record, answers: Sequence[RecordVote | None]) -> Verdict:
    """Return the verdict on `record`.

    Args:
        answers: per rank, its vote on exactly this attempt and phase in this round, or None.
            Votes of earlier rounds are never mixed in.
    """
    votes = [vote for vote in answers if vote is not None and vote.status != VoteStatus.PENDING]
    if len(votes) < len(answers):
        return Verdict(Action.REPEAT)
    if record.phase == RecordPhase.RELEASE:
        is_closed = all(vote.status in CLOSED for vote in votes)
        return Verdict(Action.CLOSE if is_closed else Action.REPEAT)
    failures = tuple(
        (rank, vote.generation) for rank, vote in enumerate(votes) if vote.status in FAILED
    )
    if failures:
        return Verdict(Action.RELEASE, failures=failures)
    lowest = min(vote.endpoint for vote in votes)
    is_equal = all(vote.endpoint == lowest for vote in votes)
    committed_count = sum(vote.is_committed for vote in votes)
    if committed_count == 0:
        return Verdict(Action.COMMIT if is_equal else Action.TRIM, lowest)
    if is_equal and committed_count == len(votes):
        return Verdict(Action.ADMIT, lowest)
    return Verdict(Action.RETRY, lowest)


def answers_to(record: Record, votes: Sequence[RoundVote]) -> list[RecordVote | None]:
    """Return, per rank, the vote on `record`'s attempt and phase in one round's votes."""
    return [
        next(
            (
                answer
                for answer in vote.votes
                if answer.rid == record.rid
                and answer.attempt == record.attempt
                and answer.phase == record.phase
            ),
            None,
        )
        for vote in votes
    ]
