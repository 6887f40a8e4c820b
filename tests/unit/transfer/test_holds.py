"""Lifetimes of holds, on a scripted clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.transfer.holds import HoldTable, TransferHold

HOLD_S = 10.0


def make_table(holds_max: int = 8) -> HoldTable:
    return HoldTable(HOLD_S, holds_max)


def offer(table: HoldTable, rid: int, now: float = 0.0) -> None:
    table.offer(rid, f"hold-{rid}", [rid, rid + 100], 20, now)


def test_a_hold_is_opened_read_and_closed() -> None:
    table = make_table()
    offer(table, 1)
    hold = table.open("hold-1", "t", 1.0)
    assert isinstance(hold, TransferHold)
    assert (hold.block_ids, hold.tokens) == ((1, 101), 20)
    assert table.take_ended() == []
    assert table.close("t", 2.0)
    assert table.take_ended() == [1]
    assert table.take_ended() == []
    assert len(table) == 0


def test_a_hold_nobody_opens_ends_at_its_deadline_and_not_before() -> None:
    """FS-57: a short lease."""
    table = make_table()
    offer(table, 1)
    table.expire(9.999)
    assert table.take_ended() == []
    assert table.next_deadline() == 10.0
    table.expire(10.0)
    assert table.take_ended() == [1]
    assert table.next_deadline() is None


def test_opening_and_renewing_start_the_time_anew() -> None:
    """FS-62: decode can extend the hold."""
    table = make_table()
    offer(table, 1)
    table.open("hold-1", "t", 9.0)
    assert table.next_deadline() == 19.0
    assert table.renew("t", 18.0)
    assert table.next_deadline() == 28.0
    assert not table.renew("t", 28.0)
    assert table.take_ended() == [1]


@pytest.mark.parametrize("now", [10.0, 11.0])
def test_everything_late_is_refused_even_before_anybody_looked_at_the_clock(now: float) -> None:
    """FS-62, S16"""
    table = make_table()
    offer(table, 1)
    assert table.open("hold-1", "t", now) == "the hold is unknown, has expired or was cancelled"
    offer(table, 2, now)
    table.open("hold-2", "t", now)
    assert not table.close("t", now + HOLD_S)
    assert table.take_ended() == [1, 2]
    assert table.counts.read == 0


def test_a_second_open_is_refused_and_cannot_end_the_first() -> None:
    table = make_table()
    offer(table, 1)
    table.open("hold-1", "mine", 0.0)
    refusal = table.open("hold-1", "yours", 0.0)
    assert isinstance(refusal, str) and "already opened" in refusal
    assert not table.close("yours", 0.0)
    assert not table.decline("hold-1", 0.0)
    assert table.take_ended() == []
    assert table.close("mine", 0.0)


@pytest.mark.parametrize("ticket", ["", "taken"])
def test_a_bad_ticket_is_refused_and_reserves_nothing(ticket: str) -> None:
    table = make_table()
    offer(table, 1)
    offer(table, 2)
    table.open("hold-1", "taken", 0.0)
    assert isinstance(table.open("hold-2", ticket, 0.0), str)
    assert isinstance(table.open("hold-2", "fresh", 0.0), TransferHold)


def test_a_withdrawn_hold_is_gone_before_and_during_its_read() -> None:
    table = make_table()
    offer(table, 1)
    offer(table, 2)
    table.open("hold-2", "t", 0.0)
    assert table.withdraw(1) and table.withdraw(2)
    assert not table.withdraw(1)
    assert isinstance(table.open("hold-1", "u", 0.0), str)
    assert not table.close("t", 0.0)
    assert table.take_ended() == [1, 2]


def test_a_declined_hold_ends() -> None:
    """FS-61"""
    table = make_table()
    offer(table, 1)
    assert table.decline("hold-1", 0.0)
    assert not table.decline("hold-1", 0.0)
    assert table.take_ended() == [1]


def test_in_a_full_table_the_hold_that_ends_first_makes_room() -> None:
    table = make_table(holds_max=2)
    offer(table, 1, 0.0)
    offer(table, 2, 1.0)
    table.open("hold-1", "t", 2.0)  # now it is hold 2 that ends first
    offer(table, 3, 3.0)
    assert table.take_ended() == [2]
    assert table.close("t", 3.0)


def test_a_request_has_one_hold() -> None:
    table = make_table()
    offer(table, 1)
    with pytest.raises(InvariantError, match="one hold"):
        table.offer(1, "other", [1], 1, 0.0)


@given(st.lists(st.tuples(st.sampled_from("oOrcdwt"), st.integers(0, 5), st.integers(0, 6))))
def test_every_hold_ends_exactly_once_and_is_never_served_afterwards(
    steps: list[tuple[str, int, int]],
) -> None:
    table, now, ended = make_table(holds_max=3), 0.0, []
    offered: set[int] = set()
    deadlines: dict[int, float] = {}
    for action, rid, wait in steps:
        now += wait
        alive = rid in deadlines and now < deadlines[rid] and rid not in ended
        if action == "o" and rid not in offered:
            offer(table, rid, now)
            offered.add(rid)
            deadlines[rid] = now + HOLD_S
        elif action == "O":
            opened = table.open(f"hold-{rid}", f"t-{rid}", now)
            if isinstance(opened, TransferHold):
                assert alive
                deadlines[rid] = now + HOLD_S
        elif action == "r":
            if table.renew(f"t-{rid}", now):
                assert alive
                deadlines[rid] = now + HOLD_S
        elif action == "c":
            assert alive or not table.close(f"t-{rid}", now)
            if alive:
                table.close(f"t-{rid}", now)
        elif action == "d":
            assert alive or not table.decline(f"hold-{rid}", now)
        elif action == "w":
            table.withdraw(rid)
        else:
            table.expire(now)
        ended += table.take_ended()
        table.check_invariants()
    table.expire(now + HOLD_S)
    ended += table.take_ended()
    assert sorted(ended) == sorted(offered)
    assert len(table) == 0
