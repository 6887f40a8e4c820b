"""From lease to hold, a request's prefix stays where it is: seen from votes and deltas alone.

A vote says that a rank leases [0, e).  From then until that rank frees the request, or says that
the attempt is over, its deltas must not take away anything that e needs:

    dense       every block of [0, e)               until Freed
    sliding     the blocks before e that it sees    until Freed
    recurrent   the snapshot at exactly e           until the Install, which copies it

[I8, I9, I-GAPLESS]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import KEY_BYTES
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.rounds import Record, RecordPhase, RoundVote, VoteStatus

HOLDING = (
    VoteStatus.LEASED,
    VoteStatus.PREPARED,
    VoteStatus.COMMITTED,
    VoteStatus.COMMIT_FAILED,  # lease and reservation stay until the RELEASE  [I18]
)
Place = tuple[int, bytes]  # window, key


class _Pin(Struct):
    """What one request needs on one rank."""

    endpoint: int
    record: Record | None  # that was answered last; None: a sequence
    places: tuple[Place, ...]


class PinsWatch:
    """One rank's tree as its deltas tell it, and what its votes say must stay in it.

    Args:
        specs: the windows of this rank.
        block_tokens: B.
        keys_of: a request's keys, one after the other.
    """

    def __init__(
        self,
        rank: int,
        specs: Sequence[WindowSpec],
        block_tokens: int,
        keys_of: Callable[[int], bytes],
    ) -> None:
        self._rank, self._specs, self._block_tokens = rank, specs, block_tokens
        self._keys_of = keys_of
        self._present: Counter[Place] = Counter()
        self._needed: Counter[Place] = Counter()
        self._pins: dict[int, _Pin] = {}

    def changed(self, changes: Sequence[tuple[bool, int, bytes]]) -> None:
        """The rank tells of changes of its tree.  [I9]"""
        for is_stored, window, key in changes:
            self._present[window, key] += 1 if is_stored else -1
        for is_stored, window, key in changes:
            if not is_stored and not self._present[window, key]:
                self._check_unneeded((window, key))
                del self._present[window, key]

    def _check_unneeded(self, place: Place) -> None:
        if self._needed[place]:
            rid = next(rid for rid, pin in self._pins.items() if place in pin.places)
            check(
                False,
                "a block went away under a lease or a sequence [I9, I-GAPLESS]",
                rank=self._rank,
                window=place[0],
                rid=rid,
            )

    def ordered(self, records: Sequence[Record], cancels: Sequence[int]) -> None:
        """A broadcast that this rank applies long before its vote shows: what it may give up."""
        for rid in cancels:
            pin = self._pins.get(rid)
            if pin is not None and pin.record is not None:
                self._unpin(rid)  # an installed one stays until Freed  [A55]
        for record in records:
            pin = self._pins.get(record.rid)
            is_new = pin is not None and pin.record != record
            if is_new and record.phase != RecordPhase.COMMIT:
                self._unpin(record.rid)

    def voted(self, vote: RoundVote, records: Sequence[Record]) -> None:
        """The rank's vote on `records`: what it leases, and what not any more."""
        for answer, record in zip(vote.votes, records, strict=True):
            pin = self._pins.get(answer.rid)
            if answer.status not in HOLDING:
                self._unpin(answer.rid)
            elif pin is None or pin.endpoint != answer.endpoint:
                self._unpin(answer.rid)
                self._pin(answer.rid, record, answer.endpoint)
            else:
                pin.record = record
        for rid in vote.gone:
            self._unpin(rid)

    def installed(self, rid: int, endpoint: int) -> None:
        """The lease becomes a sequence."""
        self._unpin(rid)
        self._pin(rid, None, endpoint)

    def freed(self, rid: int) -> None:
        """LOOP gave the slots back."""
        self._unpin(rid)

    def quiet(self) -> None:
        """Nothing is needed any more.  [I44]"""
        check(not self._pins, "leases are left [I44]", rank=self._rank, rids=sorted(self._pins))

    def _pin(self, rid: int, record: Record | None, endpoint: int) -> None:
        """Note what is needed for [0, endpoint); by a lease, or without a record a sequence."""
        places = tuple(self._places(rid, endpoint, is_lease=record is not None))
        for place in places:
            check(
                self._present[place] > 0,
                "leased or reused, but not in the tree [I8, I-GAPLESS]",
                rank=self._rank,
                rid=rid,
                endpoint=endpoint,
                window=place[0],
            )
        self._needed.update(places)
        self._pins[rid] = _Pin(endpoint, record, places)

    def _unpin(self, rid: int) -> None:
        pin = self._pins.pop(rid, None)
        for place in pin.places if pin is not None else ():
            self._needed[place] -= 1
            if not self._needed[place]:
                del self._needed[place]

    def _places(self, rid: int, endpoint: int, *, is_lease: bool) -> Iterator[Place]:
        blocks, keys = endpoint // self._block_tokens, self._keys_of(rid)
        for window, spec in enumerate(self._specs):
            if not blocks or (spec.is_recurrent and not is_lease):
                continue
            first = 0
            if spec.is_recurrent:
                first = blocks - 1
            elif spec.is_sliding:
                first = max(0, blocks - spec.needed_blocks(self._block_tokens))
            for block in range(first, blocks):
                yield window, keys[KEY_BYTES * block : KEY_BYTES * (block + 1)]
