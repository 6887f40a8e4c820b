"""A request that only waits costs nothing per round, on any rank.  [algorithms 9.3]"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest

from tests.unit.admission.rig import Fleet
from wavepp_worker.admission.phases import Phase

V = TypeVar("V")


class Watched(dict[int, V]):
    """Counts the values that are looked at one after another."""

    def __init__(self, content: dict[int, V]) -> None:
        super().__init__(content)
        self.seen = 0

    def values(self) -> Iterator[V]:  # type: ignore[override]
        for value in super().values():
            self.seen += 1
            yield value


@pytest.mark.parametrize("waiting", [1, 16, 200])
def test_a_round_looks_at_no_more_requests_however_many_wait(waiting: int) -> None:
    fleet = Fleet(2, batch_requests_max=4)
    for cache in fleet.caches:
        cache.available = 0  # the oldest one is refused, and blocks the others
    fleet.announce(*range(1, waiting + 1))
    fleet.round(waiting // 16 + 4)
    replicas = [rank.machine._replica for rank in fleet.ranks]
    assert all(r.phase is Phase.HINTED for replica in replicas for r in replica.requests.values())
    for replica in replicas:
        replica.requests = Watched(replica.requests)
    for rank in fleet.ranks:
        rank.machine.check_invariants = lambda: None  # type: ignore[method-assign]  # an audit
    queue = fleet.leader.queue
    queue._queued = Watched(queue._queued)
    fleet.round()
    assert queue._queued.seen <= 2
    for replica in replicas:
        assert replica.requests.seen <= 4, "as many as may be probed again"
