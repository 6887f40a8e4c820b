"""A gap's parts: what each cause means, and that they always cover the gap."""

from __future__ import annotations

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from wavepp_worker.runtime.gaps import CAUSES, GapPart, WaveMarks, gap_parts

Spans = tuple[tuple[float, float], ...]


def marks(wave: int, *times: float, copying: Spans = ()) -> WaveMarks:
    asked, received, began, ended, sent = times
    return WaveMarks(
        wave=wave, asked_at=asked, received_at=received, began_at=began, ended_at=ended,
        sent_at=sent, copying=copying,
    )  # fmt: skip


BEFORE = marks(1, 5.0, 5.0, 5.0, 10.0, 11.0)
AFTER = marks(2, 15.0, 17.0, 17.0, 20.0, 20.0)


def told(parts: list[GapPart]) -> list[tuple[str, float, float]]:
    return [(part.cause, part.began_at, part.ended_at) for part in parts]


def test_each_cause_ends_where_the_next_begins() -> None:
    assert told(gap_parts(BEFORE, AFTER, header_at=12.0, run_at=14.0)) == [
        ("send", 10.0, 11.0),
        ("no header", 11.0, 12.0),
        ("not installed", 12.0, 14.0),
        ("launch", 14.0, 15.0),
        ("receive", 15.0, 17.0),
    ]


def test_a_wave_that_was_queued_waits_for_its_activations_alone() -> None:
    assert told(gap_parts(BEFORE, AFTER, header_at=3.0, run_at=4.0)) == [
        ("send", 10.0, 11.0), ("launch", 11.0, 15.0), ("receive", 15.0, 17.0),
    ]  # fmt: skip


def test_copies_cut_into_what_else_was_waited_for() -> None:
    after = msgspec.structs.replace(AFTER, copying=((11.5, 12.5), (12.5, 13.0)))
    assert told(gap_parts(BEFORE, after, header_at=12.0, run_at=14.0)) == [
        ("send", 10.0, 11.0),
        ("no header", 11.0, 11.5),
        ("copy", 11.5, 13.0),
        ("not installed", 13.0, 14.0),
        ("launch", 14.0, 15.0),
        ("receive", 15.0, 17.0),
    ]


def test_a_stream_that_waits_for_copies_after_the_activations_says_so() -> None:
    after = marks(2, 11.0, 12.0, 14.0, 20.0, 20.0, copying=((12.0, 14.0),))
    assert told(gap_parts(BEFORE, after, header_at=3.0, run_at=4.0)) == [
        ("send", 10.0, 11.0), ("receive", 11.0, 12.0), ("copy", 12.0, 14.0),
    ]  # fmt: skip


TIMES = st.floats(0.0, 100.0)


@given(
    st.lists(TIMES, min_size=3, max_size=3),
    st.lists(TIMES, min_size=3, max_size=3),
    TIMES,
    TIMES,
    st.lists(st.tuples(TIMES, TIMES), max_size=4),
)
def test_the_parts_always_cover_the_gap(
    first: list[float], second: list[float], header: float, run: float, spans: list[tuple]
) -> None:
    """Whatever the clocks of several threads say; copies follow one another."""
    began, ended, sent = sorted(first)
    asked, received, started = sorted(100.0 + at for at in second)
    edges = sorted(edge for span in spans for edge in span)
    copying = tuple(zip(edges[::2], edges[1::2], strict=True))
    before = marks(1, began, began, began, ended, sent)
    after = marks(2, asked, received, started, 300.0, 300.0, copying=copying)
    parts = gap_parts(before, after, header * 2, run * 2)
    at = ended
    for part in parts:
        assert part.began_at == at < part.ended_at
        assert part.cause in CAUSES
        at = part.ended_at
    assert at == started
    assert all(a.cause != b.cause for a, b in itertools.pairwise(parts))
