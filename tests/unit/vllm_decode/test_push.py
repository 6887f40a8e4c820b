"""Push hand-offs on a scripted clock, and in random orders against an independent observer."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.vllm_decode.protocol import PushRegistration
from wavepp_worker.vllm_decode.push import (
    AbortWrite,
    Cancelled,
    Command,
    Connect,
    Disconnect,
    Dropped,
    Event,
    Outcome,
    PeerConnected,
    PeerLost,
    PromptStored,
    PushMachine,
    PushSettings,
    Registered,
    Release,
    TimePassed,
    Write,
    WriteEnded,
)

SUFFIX = "-0123abcd"
CONNECT = Connect("decode", "127.0.0.1", 5600)


def make_machine(**changes: Any) -> PushMachine:
    values: dict[str, Any] = {
        "engine_id": "wavepp",
        "stages": 2,
        "hold_s": 10.0,
        "registration_s": 20.0,
    }
    return PushMachine(PushSettings(**values | changes))


def stored(rid: int = 1, name: str = "a", blocks: tuple[int, ...] = (40, 41, 42)) -> PromptStored:
    return PromptStored(rid, name, blocks)


def registered(name: str = "a", suffix: str = SUFFIX, **changes: Any) -> Registered:
    values: dict[str, Any] = {
        "request_id": name + suffix,
        "decode_engine_id": "decode",
        "decode_host": "127.0.0.1",
        "decode_port": 5600,
        "decode_tp_size": 1,
        "local_block_ids": ((7, 8),),
        "remote_engine_id": "wavepp",
        "remote_host": "127.0.0.1",
        "remote_port": 5700,
        "remote_tp_size": 1,
        "remote_pp_size": 2,
    }
    return Registered(PushRegistration(**values | changes))


WRITE = Write(1, "decode", ((41, 7), (42, 8)), b"a-0123abcd:1")


def run(machine: PushMachine, *events: Event, now: float = 0.0) -> list[Command]:
    commands: list[Command] = []
    for event in events:
        commands += machine.handle(event, now)
        machine.check_invariants()
    return commands


def test_a_registration_first_is_connected_and_waits_for_the_prompt() -> None:
    machine = make_machine()
    assert run(machine, registered()) == [CONNECT]
    assert run(machine, PeerConnected("decode", 100)) == []
    assert run(machine, stored()) == [WRITE]
    assert run(machine, WriteEnded(1, True)) == [Release(1, Outcome.WRITTEN)]
    assert machine.next_deadline() is None


def test_a_prompt_first_waits_for_the_registration_and_the_connection() -> None:
    machine = make_machine()
    assert run(machine, stored()) == []
    assert run(machine, registered()) == [CONNECT]
    assert run(machine, PeerConnected("decode", 100)) == [WRITE]


def test_a_connected_engine_is_not_connected_again() -> None:
    machine = make_machine()
    run(machine, registered("b"), PeerConnected("decode", 100))
    assert run(machine, stored(), registered()) == [WRITE]


def test_a_prompt_without_a_registration_is_released_at_its_deadline() -> None:
    machine = make_machine()
    run(machine, stored())
    assert machine.next_deadline() == 10.0
    assert run(machine, TimePassed(), now=9.9) == []
    assert run(machine, TimePassed(), now=10.0) == [Release(1, Outcome.EXPIRED)]
    assert run(machine, registered(), PeerConnected("decode", 100), now=11.0) == [CONNECT]


def test_a_registration_past_its_deadline_is_never_written_to() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100))
    assert machine.next_deadline() == 20.0
    late = run(machine, stored(), now=20.0)
    assert late == [Dropped("a-0123abcd", "its prompt was not stored in time")]
    assert run(machine, registered(), now=21.0) == []


def test_a_repeated_registration_does_not_extend_its_deadline() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100))
    assert run(machine, registered(), now=15.0) == []
    assert machine.next_deadline() == 20.0


def test_a_write_is_aborted_at_the_registrations_deadline_and_holds_its_slots_until_quiet() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert machine.next_deadline() == 20.0
    assert run(machine, TimePassed(), now=20.0) == [AbortWrite(1)]
    assert machine.next_deadline() is None
    assert run(machine, TimePassed(), Cancelled(1), now=30.0) == []
    assert run(machine, WriteEnded(1, False), now=31.0) == [Release(1, Outcome.EXPIRED)]


def test_one_registration_has_one_write_however_often_it_and_its_prompt_come() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored(), WriteEnded(1, True))
    assert run(machine, registered(), stored(2), registered()) == []
    again = run(machine, registered(suffix="-89abcdef"))
    assert [type(command) for command in again] == [Write]


def test_a_failed_write_is_not_tried_again() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert run(machine, WriteEnded(1, False)) == [Release(1, Outcome.FAILED)]
    assert run(machine, stored(2), registered()) == []


def test_a_lost_peer_drops_what_waits_and_aborts_what_is_written() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored(), registered("b"))
    assert run(machine, PeerLost("decode")) == [
        Dropped("b-0123abcd", "decode cannot be reached"),
        AbortWrite(1),
    ]
    assert run(machine, WriteEnded(1, False)) == [Release(1, Outcome.FAILED)]
    assert run(machine, registered("c")) == [CONNECT]


def test_cancelling_releases_at_once_or_after_the_write() -> None:
    machine = make_machine()
    assert run(machine, stored(5), Cancelled(5)) == [Release(5, Outcome.CANCELLED)]
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert run(machine, Cancelled(1)) == [AbortWrite(1)]
    assert run(machine, WriteEnded(1, False), Cancelled(1)) == [Release(1, Outcome.CANCELLED)]


def test_a_prompt_computed_again_replaces_the_one_that_waits() -> None:
    assert run(make_machine(), stored(1), stored(2)) == [Release(1, Outcome.REPLACED)]


def test_full_tables_give_up_the_oldest_prompt_and_the_newest_registration() -> None:
    machine = make_machine(prompts_max=1, registrations_max=1)
    assert run(machine, stored(1, "a"), stored(2, "b")) == [Release(1, Outcome.CROWDED_OUT)]
    assert run(machine, registered("c"), registered("d")) == [
        CONNECT,
        Dropped("d-0123abcd", "too many registrations wait"),
    ]
    machine = make_machine(prompts_max=1)
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert run(machine, stored(2, "b")) == [Release(2, Outcome.CROWDED_OUT)]


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": "another"},
        {"remote_pp_size": 3},
        {"decode_tp_size": 2},
        {"local_block_ids": ((1,), (2,))},
        {"local_block_ids": ((1, 2, 3, 4),)},
        {"local_block_ids": ((100,),)},
    ],
)
def test_registrations_that_do_not_fit_are_dropped_unwritten(changes: dict[str, Any]) -> None:
    machine = make_machine()
    run(machine, registered("x"), PeerConnected("decode", 100), stored())
    commands = run(machine, registered(**changes))
    assert [type(command) for command in commands] == [Dropped]
    assert run(machine, TimePassed(), now=10.0) == [Release(1, Outcome.EXPIRED)]


def test_a_whole_hit_on_decode_needs_the_notice_only() -> None:
    machine = make_machine()
    run(machine, registered(local_block_ids=((),)), PeerConnected("decode", 100))
    assert run(machine, stored()) == [Write(1, "decode", (), b"a-0123abcd:1")]


def test_a_write_that_ended_at_its_deadline_is_not_aborted() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert run(machine, WriteEnded(1, True), now=25.0) == [Release(1, Outcome.WRITTEN)]


def test_a_new_engine_takes_the_place_of_an_idle_one_only() -> None:
    machine = make_machine(peers_max=1)
    other = Connect("other", "127.0.0.1", 5600)
    run(machine, registered(), PeerConnected("decode", 100), stored())
    assert run(machine, registered("b", decode_engine_id="other")) == [
        Dropped("b-0123abcd", "too many decode engines are in use")
    ]
    run(machine, WriteEnded(1, True))
    assert run(machine, registered("c", decode_engine_id="other")) == [Disconnect("decode"), other]
    assert run(machine, PeerConnected("decode", 100)) == [Disconnect("decode")]


def test_a_write_that_ends_twice_is_a_mistake() -> None:
    machine = make_machine()
    run(machine, registered(), PeerConnected("decode", 100), stored(), WriteEnded(1, True))
    with pytest.raises(InvariantError, match="ends once"):
        machine.handle(WriteEnded(1, True), 0.0)


class Observer:
    """What a stage's driver and a decode worker see; knows nothing of the machine's state."""

    def __init__(self) -> None:
        self.received_at: dict[str, float] = {}
        self.writing: dict[int, str] = {}
        self.aborted: set[int] = set()
        self.owned: set[int] = set()
        self.notices: Counter[bytes] = Counter()
        self.outcomes: Counter[Outcome] = Counter()

    def see(self, commands: list[Command], now: float) -> None:
        for command in commands:
            match command:
                case Write(rid, _, _, notice):
                    name = notice.removesuffix(b":1").decode()
                    assert rid in self.owned and rid not in self.writing
                    assert now < self.received_at[name] + 20.0
                    self.notices[notice] += 1
                    assert self.notices[notice] == 1
                    self.writing[rid] = name
                case AbortWrite(rid):
                    assert rid in self.writing and rid not in self.aborted
                    self.aborted.add(rid)
                case Release(rid, outcome):
                    assert rid not in self.writing
                    self.owned.remove(rid)
                    self.outcomes[outcome] += 1
        for rid, name in self.writing.items():
            assert now < self.received_at[name] + 20.0 or rid in self.aborted


def walk(seed: int, steps: int = 120) -> Observer:
    """Random orders of everything that can happen, then silence until all deadlines passed."""
    draw = random.Random(seed)
    machine, seen = make_machine(prompts_max=4, registrations_max=4), Observer()
    now, rid = 0.0, 0

    def tell(event: Event) -> None:
        if isinstance(event, PromptStored):
            seen.owned.add(event.rid)
        if isinstance(event, Registered):
            seen.received_at.setdefault(event.registration.request_id, now)
        if isinstance(event, WriteEnded):
            del seen.writing[event.rid]
            seen.aborted.discard(event.rid)
        seen.see(machine.handle(event, now), now)
        machine.check_invariants()

    for _ in range(steps):
        now += draw.choice((0.0, 0.0, 0.5, 3.0))
        match draw.randrange(7):
            case 0:
                rid += 1
                tell(stored(rid, draw.choice("abcdef")))
            case 1 | 2:
                tell(registered(draw.choice("abcdef"), f"-{draw.randrange(6):08x}"))
            case 3:
                tell(PeerConnected("decode", 100))
            case 4 if seen.writing:
                tell(WriteEnded(draw.choice(sorted(seen.writing)), draw.random() < 0.7))
            case 5 if rid:
                tell(Cancelled(draw.randint(1, rid)))
            case 6 if draw.random() < 0.2:
                tell(PeerLost("decode"))
            case _:
                tell(TimePassed())
    for _ in range(100):
        deadline = machine.next_deadline()
        if deadline is None and not seen.writing:
            break
        now = max(now, deadline or now)
        tell(TimePassed())
        for open_rid in sorted(seen.writing):
            tell(WriteEnded(open_rid, False))
    assert machine.next_deadline() is None
    assert not seen.owned, "every prompt's slots come back"
    return seen


@given(st.integers(0, 1 << 32))
def test_in_any_order_nothing_is_written_late_or_twice_and_nothing_leaks(seed: int) -> None:
    walk(seed)


def test_random_walks_reach_every_outcome() -> None:
    outcomes: Counter[Outcome] = Counter()
    for seed in range(60):
        outcomes += walk(seed).outcomes
    assert set(outcomes) == set(Outcome)
