"""Several windows and recurrent states in the LOOP machine: slots, and when snapshots count."""

from __future__ import annotations

import struct

from wavepp_worker.base.types import Epoch, Instant, Rank
from wavepp_worker.executor.commands import LoopCommand, OpenHold, RunWave, SendToFollowers, ToWave
from wavepp_worker.executor.events import HoldEnded, LoopEvent, Tick
from wavepp_worker.executor.loop import LoopMachine, LoopSettings
from wavepp_worker.executor.ports import ChunkState, WaveFenced
from wavepp_worker.planner.greedy import GreedyPlanner
from wavepp_worker.wire.mailbox import Freed, Install, StateSlots, WaveDone
from wavepp_worker.wire.waves import SPAN_FIRST, SPAN_LAST, SPAN_SNAPSHOT, SpanEntry, WaveHeader

B, M = 4, 16
NOW = Instant(1.0)
STATES = (StateSlots(1, 9, ((8, 5), (20, 6))),)
TABLES = ((3, 1, 4, 0, 2, 7), ())


def machine(rank: int = 0, stages: int = 1) -> LoopMachine:
    settings = LoopSettings(
        rank=Rank(rank),
        stages=stages,
        epoch=Epoch(1),
        block_tokens=B,
        ring_waves=8,
        admit_timeout_s=5.0,
        stall_timeout_s=60.0,
    )
    return LoopMachine(settings, GreedyPlanner(M, 4, B) if rank == 0 else None)


def install(**changes: object) -> Install:
    fields: dict[str, object] = {
        "ino": 1,
        "rid": 7,
        "prompt_tokens": 22,
        "endpoint": 0,
        "tables": TABLES,
        "states": STATES,
        "snapshot_points": (8, 20),
        "tokens": struct.pack("<22I", *range(22)),
    }
    return Install(**(fields | changes))  # type: ignore[arg-type]


def runs(commands: list[LoopCommand]) -> list[RunWave]:
    return [command for command in commands if isinstance(command, RunWave)]


def test_chunks_end_at_snapshot_points_and_name_their_slots() -> None:
    """I34: 22 tokens with points at 8 and 20: three chunks, two of which keep the state."""
    loop = machine()
    loop.handle(install(), NOW)
    waves = runs(loop.handle(Tick(), NOW))
    chunks = [wave.chunks[0] for wave in waves]
    assert [(c.start, c.length) for c in chunks] == [(0, 8), (8, 12), (20, 2)]
    assert [c.states for c in chunks] == [
        (ChunkState(1, 9, 5),),
        (ChunkState(1, 9, 6),),
        (ChunkState(1, 9, -1),),
    ]
    assert all(c.tables == TABLES for c in chunks)


def test_a_snapshot_counts_with_the_fence_of_its_own_wave() -> None:
    """I43: neither before its fence, nor with an earlier wave, nor twice."""
    loop = machine()
    loop.handle(install(), NOW)
    loop.handle(Tick(), NOW)
    done = [
        command.message
        for wave in (1, 2)
        for command in loop.handle(WaveFenced(wave), NOW)
        if isinstance(command, ToWave)
    ]
    last = loop.handle(WaveFenced(3, ((7, 1, -1.0),)), NOW)
    assert done == [WaveDone(1, ((7, 8),), ((7, 8),)), WaveDone(2, ((7, 20),), ((7, 20),))]
    assert last[:2] == [ToWave(WaveDone(3, ((7, 22),))), OpenHold(7, TABLES, 22, STATES)]
    assert loop.handle(HoldEnded(7), NOW) == [ToWave(Freed(7))]


def test_a_rank_without_slots_for_a_point_stores_nothing() -> None:
    """A47: the leader's points are everybody's; a rank keeps what it has slots for."""
    loop = machine()
    loop.handle(install(states=(StateSlots(1, 9, ((20, 6),)),)), NOW)
    loop.handle(Tick(), NOW)
    (first,) = loop.handle(WaveFenced(1), NOW)
    (second,) = loop.handle(WaveFenced(2), NOW)
    assert first == ToWave(WaveDone(1, ((7, 8),)))
    assert second == ToWave(WaveDone(2, ((7, 20),), ((7, 20),)))


def test_headers_tell_followers_which_spans_end_at_a_point() -> None:
    """The leader plans the points; a rank without recurrent windows splits there too."""
    leader, follower = machine(0, 2), machine(1, 2)
    leader.handle(install(tables=(TABLES[0],), states=()), NOW)
    headers = [
        command.message
        for command in leader.handle(Tick(), NOW)
        if isinstance(command, SendToFollowers)
    ]
    flags = [SPAN_FIRST | SPAN_SNAPSHOT, SPAN_SNAPSHOT, SPAN_LAST]
    assert [header.spans[0].flags for header in headers] == flags  # type: ignore[union-attr]
    follower.handle(install(tokens=b"", snapshot_points=()), NOW)
    ran = runs([c for header in headers for c in follower.handle(as_event(header), NOW)])
    assert [wave.chunks[0].states[0].snapshot for wave in ran] == [5, 6, -1]


def as_event(header: object) -> LoopEvent:
    assert isinstance(header, WaveHeader)
    assert all(isinstance(span, SpanEntry) for span in header.spans)
    return header
