"""A span names a request twice, by its rid and by its ino; both must be right.  [I41, I45]"""

from __future__ import annotations

import pytest

from tests.unit.executor.test_loop_machine import follower, make_header, make_install
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.wire.waves import SPAN_FIRST, SpanEntry


def test_a_span_with_the_ino_of_another_request_is_fatal() -> None:
    rig = follower()
    rig.send(make_install(1, 7, 8), make_install(2, 8, 8))
    with pytest.raises(InvariantError, match="position mismatch"):
        rig.send(make_header(1, SpanEntry(7, 2, 0, 4, SPAN_FIRST)))
