"""Hints of one rank, and the candidates that all ranks derive from everybody's.

    probe     the index alone: no reference, no reservation              [P-HINT]
    merge     candidate = min over ranks of the last votes, replicated   [I7]
    refresh   waiting requests are probed again when this rank's index has changed; a candidate
              may fall and rise while no attempt is open                 [A9]
    refine    where some rank is sparse, each rank lowers its hint to what it has at or below the
              candidate, until all hints are equal: c, min f_s(c), ...   [A8]

A refined hint says nothing of what lies above the candidate.  So when the full hint of one rank
has changed and is above it, that vote makes every rank start again from its full hint in the next
round.  (A new point between candidate and full hint is not seen: it is a hint.)
[algorithms 5]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from wavepp_worker.admission.commands import Probe
from wavepp_worker.admission.events import HintProbed
from wavepp_worker.admission.flow import Flow, expect
from wavepp_worker.admission.phases import Phase
from wavepp_worker.admission.request import RankRequest
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.wire.rounds import HintVote, RoundVote


class Hints:
    """One rank's hints; `candidate` and `hints` of a request change only in `merge`."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._is_refining = False  # replicated: derived from merged votes
        self._refreshed_at: Instant | None = None
        self._due: dict[int, int] = {}  # rid -> hint for the next vote
        self._unsettled: set[int] = set()  # live requests without a settled candidate

    @property
    def has_unsettled(self) -> bool:
        """Whether some request that waits has no settled candidate yet."""
        return bool(self._unsettled)

    def begin(self, request: RankRequest) -> Flow[None]:
        """Probe a request that was announced just now."""
        self._unsettled.add(request.rid)
        yield from self.probe(request)

    def end(self, rid: int) -> None:
        """The request needs no candidate any more."""
        self._unsettled.discard(rid)

    def is_settled(self, request: RankRequest) -> bool:
        """Return whether the candidate is known and, if hints are refined, agreed."""
        if request.candidate is None or len(request.hints) < self._settings.stages:
            return False
        return not self._is_refining or all(
            hint == request.candidate for hint in request.hints.values()
        )

    def probe(self, request: RankRequest) -> Flow[None]:
        """Vote the full hint, if it is not what this rank voted last."""
        probed = yield from self._read(request, None)
        request.full_hint = probed.endpoint
        self._vote(request, probed.endpoint)

    def refresh(
        self, requests: Mapping[int, RankRequest], index_version: int, now: Instant
    ) -> Flow[None]:
        """Probe waiting requests again where that can change something.

        Args:
            requests: all live requests of this rank, in arrival order.
            index_version: of the hint index, now.
        """
        if self._is_refining:
            for request in [r for r in requests.values() if r.phase is Phase.HINTED]:
                yield from self._go_on(request)
        last = self._refreshed_at
        if last is not None and now - last < self._settings.round_idle_s:
            return
        # Lazily: looking at all that wait would cost something in every round.
        waiting = (r for r in requests.values() if r.phase is Phase.HINTED)
        for request in list(islice(waiting, self._settings.batch_requests_max)):
            # Only settled ones: so every chain of refinements ends, whatever the index does.
            if request.probed_version != index_version and self.is_settled(request):
                self._refreshed_at = now
                yield from self._probe_again(request)

    def take_votes(self) -> tuple[HintVote, ...]:
        """Return the hints of the next vote: new or changed ones only."""
        votes = tuple(HintVote(rid, endpoint) for rid, endpoint in self._due.items())
        self._due.clear()
        return votes

    def merge(
        self, requests: Mapping[int, RankRequest], votes: Sequence[RoundVote]
    ) -> list[RankRequest]:
        """Take all ranks' hints in; return the requests that have their first candidate now."""
        self._is_refining = self._settings.hint_refine and any(vote.is_sparse for vote in votes)
        changes: dict[int, dict[int, int]] = {}  # rid -> rank -> hint
        for vote in votes:
            for hint in vote.hints:
                changes.setdefault(hint.rid, {})[vote.rank] = hint.endpoint
        first = []
        for rid, hints in changes.items():
            request = requests.get(rid)
            if request is None:
                continue  # cancelled in this very round
            if self._take(request, hints):
                first.append(request)
            if self.is_settled(request):
                self._unsettled.discard(rid)
            elif request.phase is not Phase.ADMITTED:
                self._unsettled.add(rid)
        return first

    def _take(self, request: RankRequest, hints: Mapping[int, int]) -> bool:
        """Take new hints in; return whether they make the first candidate."""
        if self._is_rise(request, hints):
            mark("admission.refine_again")
            request.hints.clear()
            request.hint = None
            return False
        request.hints.update(hints)
        if len(request.hints) < self._settings.stages:
            return False
        is_first = request.candidate is None
        candidate = min(request.hints.values())
        if request.candidate is not None and candidate > request.candidate:
            mark("admission.candidate_rises")
        request.candidate = candidate
        return is_first

    def _is_rise(self, request: RankRequest, hints: Mapping[int, int]) -> bool:
        """Return whether some rank found more than what all had agreed on."""
        if not self._is_refining or not self.is_settled(request):
            return False
        return request.candidate is not None and max(hints.values()) > request.candidate

    def _go_on(self, request: RankRequest) -> Flow[None]:
        """Take the next step of a refinement that has begun, or begin it again."""
        if request.hint is None:
            yield from self.probe(request)
        elif request.candidate is not None and request.hint > request.candidate:
            yield from self._refine(request)

    def _probe_again(self, request: RankRequest) -> Flow[None]:
        before = request.full_hint
        probed = yield from self._read(request, None)
        request.full_hint = probed.endpoint
        if self._is_refining and probed.endpoint == before:
            yield from self._refine(request)  # what it had at the candidate may be gone
        else:
            self._vote(request, probed.endpoint)

    def _refine(self, request: RankRequest) -> Flow[None]:
        mark("admission.refine")
        probed = yield from self._read(request, request.candidate)
        self._vote(request, probed.endpoint)

    def _read(self, request: RankRequest, cap: int | None) -> Flow[HintProbed]:
        probed = expect((yield Probe(request.rid, cap, self._settings.is_asked)), HintProbed)
        request.probed_version = probed.index_version
        return probed

    def _vote(self, request: RankRequest, endpoint: int) -> None:
        if endpoint != request.hint:
            request.hint = self._due[request.rid] = endpoint
