"""What an outsider can check of one worker's admission: broadcasts, Installs, and counts.

It never looks at a decision while it is made, only at what left a rank.  [I11, I13, I26, I27,
I29, I45, I48]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from wavepp_worker.admission.phases import OPEN_ATTEMPT, Phase
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.base.errors import check
from wavepp_worker.wire.mailbox import Install
from wavepp_worker.wire.rounds import Record, RecordPhase, RoundBcast


class Observer:
    """Everything seen so far that later sights are compared with."""

    def __init__(self, stages: int, batch_requests_max: int) -> None:
        self.installs: dict[int, tuple[int, int]] = {}  # rid -> ino, endpoint
        self.snapshot_points: dict[int, tuple[int, ...]] = {}
        self.inos = [0] * stages
        self.freed: list[set[int]] = [set() for _ in range(stages)]
        self.admitted: set[int] = set()  # by the leader
        self.announced: list[int] = []  # in broadcasts, oldest first
        self.chains: dict[int, Record] = {}  # last record of each request
        self.failed: set[int] = set()  # released at least once
        self.bypasses: Counter[int] = Counter()
        self._batch_requests_max = batch_requests_max

    def install(self, rank: int, install: Install) -> None:
        """One endpoint and one number on all ranks, and no number left out.  [I13, I45]"""
        seen = self.installs.setdefault(install.rid, (install.ino, install.endpoint))
        check(
            seen == (install.ino, install.endpoint),
            "one endpoint on all ranks [I13]",
            rank=rank,
            rid=install.rid,
            seen=seen,
            endpoint=install.endpoint,
        )
        check(install.ino == self.inos[rank] + 1, "install numbers have no gap [I45]", rank=rank)
        self.inos[rank] = install.ino
        if rank == 0:
            self.admitted.add(install.rid)
            self.snapshot_points[install.rid] = install.snapshot_points

    def free(self, rank: int, rid: int) -> None:
        """Every Install ends in exactly one Freed.  [I48]"""
        check(rid in self.installs and rid not in self.freed[rank], "freed once [I48]", rid=rid)
        self.freed[rank].add(rid)

    def forget(self, rid: int) -> None:
        """All ranks said that the request is gone."""
        self.installs.pop(rid, None)
        self.snapshot_points.pop(rid, None)
        self.chains.pop(rid, None)
        self.bypasses.pop(rid, None)
        for seen in (self.admitted, self.failed, *self.freed):
            seen.discard(rid)
        if rid in self.announced:
            self.announced.remove(rid)

    def books(self, inline: InlineRank) -> None:
        """Leases, escrows and sequences are those of open attempts and admissions.  [I14, I29]"""
        requests = inline.machine._replica.requests.values()
        view = inline.cache.view()
        holding = [request for request in requests if request.is_holding]
        check(all(request.phase in OPEN_ATTEMPT for request in holding), "waits and holds [I29]")
        check(view.lease_count == view.escrow_count == len(holding), "leases [I14]", view=view)
        admitted = sum(request.phase is Phase.ADMITTED for request in requests)
        check(view.sequence_count == admitted, "sequences [I14]", view=view)

    def broadcast(self, bcast: RoundBcast, ended: Container[int]) -> None:
        """Records follow each other, in arrival order, never more than K.  [I11, I26, I27]

        Args:
            ended: requests that have ended or whose cancel is under way.
        """
        self.announced += [entry.rid for entry in bcast.announces]
        records = {record.rid: record for record in bcast.records}
        check(len(records) == len(bcast.records), "one record per request", bcast=bcast)
        check(len(records) <= self._batch_requests_max, "at most K pending [I26]")
        check(not records.keys() & set(bcast.cancels), "a cancelled request is asked something")
        for record in bcast.records:
            last = self.chains.get(record.rid)
            if record == last:
                continue
            if last is None or last.phase == RecordPhase.RELEASE:
                check(record.phase == RecordPhase.LEASE, "a chain begins with a lease")
                self._check_order(record.rid, records, ended)
            elif record.phase == RecordPhase.COMMIT:
                check(record.endpoint <= last.endpoint, "endpoints never rise [I11]")
            elif record.phase != RecordPhase.RELEASE:
                check(record.endpoint < last.endpoint, "endpoints fall [I11]", last=last)
            check(record.attempt >= (last.attempt if last else 1), "attempts grow", last=last)
            self.chains[record.rid] = record
            if record.phase == RecordPhase.RELEASE:
                self.failed.add(record.rid)

    def _check_order(self, rid: int, records: dict[int, Record], ended: Container[int]) -> None:
        """Whoever is older is being tried too; bypasses are few; a solo retry is alone.  [I27]"""
        solo = self.failed & records.keys()
        check(not solo or records.keys() == {rid}, "a solo retry is alone [I27]", solo=solo)
        for older in self.announced:
            if older == rid:
                return
            if older in self.admitted or older in ended:
                continue
            check(older in records, "passes an older request [I27]", rid=rid, older=older)
            if older in self.chains:
                self.bypasses[older] += 1
                check(self.bypasses[older] < self._batch_requests_max, "bypasses [I27]")
            is_failed = records[older].phase == RecordPhase.RELEASE
            check(not is_failed, "passes a failed request [I27]", rid=rid, older=older)
