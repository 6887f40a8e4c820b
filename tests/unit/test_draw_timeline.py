"""The picture of a timeline: what is in it, and that every cause and phase has a color."""

from __future__ import annotations

import xml.dom.minidom
from typing import Any

from tools.draw_timeline import CAUSES, PHASES, WAVES, draw
from wavepp_worker.obs.story import PHASES as STORY_PHASES
from wavepp_worker.runtime import gaps


def device(name: str, began_us: float, ended_us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 3, "tid": 1, "name": name, "ts": began_us,
            "dur": ended_us - began_us, "args": args}  # fmt: skip


def named(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}


def phase(kind: str, name: str, at_us: float) -> dict[str, Any]:
    return {"ph": kind, "pid": 1, "name": name, "ts": at_us, "id2": {"local": "0x7"}}


TRACE = [
    named(1, "serving"),
    named(3, "LOOP_0"),
    device("wave 1", 0, 1000, wave=1),
    device("no header", 1000, 2000, cause="no header"),
    device("wave 2", 2000, 9000, wave=2),
    phase("b", "wait", 0), phase("e", "wait", 500),
    phase("b", "execution", 500), phase("e", "execution", 900),
]  # fmt: skip


def colors(picture: str) -> list[str]:
    """Return the bars' colors, without the background and the legends."""
    document = xml.dom.minidom.parseString(picture)
    bars = document.getElementsByTagName("rect")[1:]
    return [bar.getAttribute("fill") for bar in bars if not bar.getAttribute("stroke")]


def test_every_cause_and_phase_has_a_color() -> None:
    assert set(CAUSES) == set(gaps.CAUSES)
    assert set(PHASES) == set(STORY_PHASES) - {"hold"}


def test_waves_gaps_and_requests_are_drawn() -> None:
    picture = draw(TRACE, 0, 4000)
    assert colors(picture) == [
        WAVES[1], CAUSES["no header"], WAVES[0], PHASES["wait"], PHASES["execution"],
    ]  # fmt: skip
    assert ">LOOP_0<" in picture
    assert ">request 7<" in picture


def test_what_is_outside_is_left_out() -> None:
    assert colors(draw(TRACE, 1200, 500)) == [CAUSES["no header"]]
