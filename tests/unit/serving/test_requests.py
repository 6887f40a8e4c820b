"""The book of live requests: who wins each race, and what is counted."""

from __future__ import annotations

import itertools
import math

import pytest

from wavepp_worker.base.errors import (
    DeviceError,
    OverloadedError,
    PeerError,
    RequestError,
    TransferError,
)
from wavepp_worker.serving.requests import LiveRequest, LiveRequests
from wavepp_worker.wire.mailbox import Finished, Gone, Ready, Rejected, StageHandoff


def make_ready(rid: int, rank: int) -> Ready:
    return Ready(rid, rank, StageHandoff(rank, (rank, rank + 1), f"tcp://h:{rank}", f"hold{rank}"))


def make_finished(rid: int, logprob: float = -0.5) -> Finished:
    return Finished(rid, endpoint=16, token=7, logprob=logprob)


def answer(book: LiveRequests, request: LiveRequest) -> None:
    for rank in range(2):
        book.take(make_ready(request.rid, rank))
    book.take(make_finished(request.rid))


async def test_the_parts_of_an_answer_may_come_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        book = LiveRequests(2, 8)
        request = book.open()
        parts = [
            make_ready(request.rid, 0),
            make_ready(request.rid, 1),
            make_finished(request.rid),
        ]
        for count, index in enumerate(order):
            assert not request.outcome.done(), f"answered after {count} parts"
            assert not book.take(parts[index])
        assert request.outcome.result() == make_finished(request.rid)
        assert [handoff.stage for handoff in request.handoffs()] == [0, 1]


async def test_at_most_one_of_answer_and_cancel() -> None:
    """I49"""
    book = LiveRequests(2, 8)
    answered, cancelled = book.open(), book.open()
    answer(book, answered)
    assert book.finish(answered)
    assert not book.finish(answered)
    assert not book.cancel(answered)
    assert book.cancel(cancelled)
    assert not book.cancel(cancelled)
    assert not book.finish(cancelled)


async def test_a_cancelled_request_ignores_what_still_comes_and_ends_with_gone() -> None:
    """FS-51, I49: a cancelled request that still drains is not disturbed and ends once."""
    book = LiveRequests(2, 8)
    request = book.open()
    assert book.cancel(request)
    answer(book, request)
    assert book.live_count == 1
    assert book.take(Gone(request.rid))
    assert book.live_count == 0
    assert not book.take(Gone(request.rid)), "only once"
    answer(book, request)
    assert book.live_count == 0


async def test_nothing_is_cancelled_that_the_ranks_have_ended() -> None:
    book = LiveRequests(2, 8)
    request = book.open()
    book.take(Rejected(request.rid, "prompt_exceeds_cache", "too long"))
    assert not book.cancel(request)


async def test_rejections_become_the_right_errors() -> None:
    book = LiveRequests(2, 8)
    for code, kind in (("overloaded", OverloadedError), ("prompt_exceeds_cache", RequestError)):
        request = book.open()
        assert book.take(Rejected(request.rid, code, "a reason"))
        with pytest.raises(kind, match="a reason"):
            request.outcome.result()
    assert book.live_count == 0


async def test_gone_without_an_answer_may_be_computed_again() -> None:
    book = LiveRequests(2, 8)
    request = book.open()
    book.take(make_finished(request.rid))
    assert book.take(Gone(request.rid))
    with pytest.raises(TransferError):
        request.outcome.result()


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
async def test_an_output_that_is_no_number_is_not_handed_out(logprob: float) -> None:
    book = LiveRequests(1, 8)
    request = book.open()
    book.take(make_ready(request.rid, 0))
    book.take(make_finished(request.rid, logprob))
    with pytest.raises(DeviceError):
        request.outcome.result()


async def test_the_queue_is_bounded_by_unanswered_requests() -> None:
    book = LiveRequests(2, 2)
    first, second = book.open(), book.open()
    with pytest.raises(OverloadedError, match="2 requests"):
        book.open()
    answer(book, first)
    book.finish(first)  # its holds stay, but it waits no longer
    assert (book.live_count, book.unanswered_count) == (2, 1)
    third = book.open()
    book.cancel(second)  # still drains on the ranks
    with pytest.raises(OverloadedError):
        book.open()
    for request in (first, second, third):
        book.take(Gone(request.rid))
    assert (book.live_count, book.unanswered_count) == (0, 0)


async def test_rids_are_never_used_again() -> None:
    """FS-51"""
    book = LiveRequests(1, 8)
    seen = set()
    for _ in range(5):
        request = book.open()
        seen.add(request.rid)
        book.cancel(request)
        book.take(Gone(request.rid))
    assert len(seen) == 5


async def test_a_lost_worker_ends_all_waits_and_takes_nothing_new() -> None:
    book = LiveRequests(2, 8)
    waiting, answered = book.open(), book.open()
    answer(book, answered)
    book.finish(answered)
    assert book.fail_all("wave1 was killed") == 1
    with pytest.raises(PeerError, match="wave1"):
        waiting.outcome.result()
    assert answered.outcome.result().token == 7
    assert not book.cancel(waiting), "nobody is left to be told"
    with pytest.raises(PeerError, match="wave1"):
        book.open()
    assert book.live_count == 0
