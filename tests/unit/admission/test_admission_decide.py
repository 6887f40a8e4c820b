"""Table 6.4: every row, and the order of the rows."""

from __future__ import annotations

from itertools import product

import pytest

from wavepp_worker.admission.decide import Action, Verdict, answers_to, reconcile
from wavepp_worker.wire.rounds import (
    Record,
    RecordPhase,
    RecordVote,
    RoundVote,
    VoteStatus,
)

LEASE = Record(rid=1, attempt=2, phase=RecordPhase.LEASE, endpoint=96)


def vote(
    endpoint: int = 96, status: VoteStatus = VoteStatus.PREPARED, generation: int = 0
) -> RecordVote:
    is_committed = status == VoteStatus.COMMITTED
    return RecordVote(1, 2, RecordPhase.LEASE, status, endpoint, is_committed, generation)


def committed(endpoint: int = 96) -> RecordVote:
    return vote(endpoint, VoteStatus.COMMITTED)


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ([committed(), None], Verdict(Action.REPEAT)),
        ([committed(), vote(status=VoteStatus.PENDING)], Verdict(Action.REPEAT)),
        ([vote(status=VoteStatus.PREP_FAILED), None], Verdict(Action.REPEAT)),
        (
            [committed(), vote(0, VoteStatus.PREP_FAILED, 5), vote(0, VoteStatus.COMMIT_FAILED, 6)],
            Verdict(Action.RELEASE, failures=((1, 5), (2, 6))),
        ),
        ([committed(), vote(status=VoteStatus.UNKNOWN_RID)], Verdict(Action.RELEASE, 0, ((1, 0),))),
        ([committed(), committed()], Verdict(Action.ADMIT, 96)),
        ([committed(0)], Verdict(Action.ADMIT, 0)),
        ([vote(64), vote(64)], Verdict(Action.COMMIT, 64)),
        ([vote(72), vote(64), vote(80)], Verdict(Action.TRIM, 64)),
        ([committed(96), vote(64)], Verdict(Action.RETRY, 64)),
        ([committed(96), vote(96)], Verdict(Action.RETRY, 96)),
        ([committed(96), committed(64)], Verdict(Action.RETRY, 64)),
    ],
)
def test_each_row_of_the_table(answers: list[RecordVote | None], verdict: Verdict) -> None:
    assert reconcile(LEASE, answers) == verdict


@pytest.mark.parametrize(
    ("statuses", "action"),
    [
        ([VoteStatus.RELEASED, VoteStatus.RELEASED], Action.CLOSE),
        ([VoteStatus.RELEASED, VoteStatus.UNKNOWN_RID], Action.CLOSE),
        ([VoteStatus.RELEASED, None], Action.REPEAT),
        ([VoteStatus.RELEASED, VoteStatus.PREPARED], Action.REPEAT),
    ],
)
def test_release_is_repeated_until_all_ranks_released(
    statuses: list[VoteStatus | None], action: Action
) -> None:
    record = Record(rid=1, attempt=2, phase=RecordPhase.RELEASE, endpoint=0)
    answers = [None if status is None else vote(status=status) for status in statuses]
    assert reconcile(record, answers) == Verdict(action)


def test_an_open_verdict_always_lowers_what_is_not_agreed_yet() -> None:
    """I11, I13: all votes of up to three ranks at three endpoints."""
    options = [maker(endpoint) for maker in (vote, committed) for endpoint in (0, 4, 8)]
    for count in (1, 2, 3):
        for answers in product(options, repeat=count):
            verdict = reconcile(LEASE, list(answers))
            endpoints = [answer.endpoint for answer in answers]
            assert verdict.endpoint == min(endpoints)
            is_agreed = len(set(endpoints)) == 1
            assert (verdict.action is Action.ADMIT) == (
                is_agreed and all(answer.is_committed for answer in answers)
            )
            if verdict.action is Action.TRIM:
                assert verdict.endpoint < max(endpoints)
                assert not any(answer.is_committed for answer in answers)


def test_votes_of_another_attempt_or_phase_do_not_count() -> None:
    others = (
        RecordVote(1, 1, RecordPhase.LEASE, VoteStatus.COMMITTED, 96, True),
        RecordVote(1, 2, RecordPhase.TRIM, VoteStatus.COMMITTED, 96, True),
        RecordVote(7, 2, RecordPhase.LEASE, VoteStatus.COMMITTED, 96, True),
    )
    rounds = [
        RoundVote(epoch=1, round=1, rank=0, votes=others),
        RoundVote(epoch=1, round=1, rank=1, votes=(*others, committed(64))),
    ]
    assert answers_to(LEASE, rounds) == [None, committed(64)]
