"""Cache sections as steps of a generator: what the machine of one rank is written in.

A method that touches the cache yields one section and receives its result.  So the order of
sections is the order of the code, and the machine stays free of callbacks.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from wavepp_worker.admission.commands import Section
from wavepp_worker.admission.events import SectionResult
from wavepp_worker.base.errors import InvariantError

T = TypeVar("T")
R = TypeVar("R", bound=SectionResult)
Flow = Generator[Section, SectionResult, T]


def expect(result: SectionResult, kind: type[R]) -> R:
    """Return `result`, which must be of this kind."""
    if not isinstance(result, kind):
        raise InvariantError(f"a section answered {result!r}, expected {kind.__name__}")
    return result
