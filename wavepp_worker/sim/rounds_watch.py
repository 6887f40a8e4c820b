"""Rounds as an outsider sees them: from broadcasts and votes alone, what must come next.

The watch derives candidates, the outcome of every record and all admissions by itself, and holds
the leader's next broadcast and every rank's Installs against them.

    broadcast    numbering, arrival order, what the last votes allow      I7 I11 I12 I26 I27 I31
    vote         one answer per record of this round                      I30 I31
    gathered     what the votes decide: table 6.4 of the algorithms       I8 I13
    installed    the admissions, in their order, on every rank            I13 I45
    progress     in an empty worker, the head is admitted soon            I28

A single rank sends no messages that could be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct, field

from wavepp_worker.base.errors import check
from wavepp_worker.wire.rounds import (
    FLAG_NO_FLOOR,
    AnnounceEntry,
    Record,
    RecordPhase,
    RecordVote,
    RoundBcast,
    RoundGathered,
    RoundVote,
    VoteStatus,
)

FAILURES = (VoteStatus.PREP_FAILED, VoteStatus.COMMIT_FAILED, VoteStatus.UNKNOWN_RID)
ENDED = (VoteStatus.RELEASED, VoteStatus.UNKNOWN_RID)
ATTEMPTS_ALONE = 3  # one of any kind, a solo one, the last resort  [A51, A52]
ROUNDS_PER_ATTEMPT = 24  # beside one per distinct endpoint: releases, waits of T_idle

Step = tuple[int, int, int]  # phase, attempt, endpoint of a record


class _Queued(Struct):
    """A request that is not admitted yet."""

    rid: int
    seq: int
    blocks: int  # of its prompt
    hints: dict[int, int] = field(default_factory=dict)  # rank -> last vote
    attempt: int = 0  # highest opened
    record: Record | None = None  # of the open attempt
    following: Step | None = None  # what the votes say comes next; None: the attempt is over
    steps: int = 0  # LEASE and TRIM records of the open chain
    has_failed: bool = False
    bypasses: int = 0
    rounds_alone: int = 0  # as head of an empty worker


class _Admitted(Struct):
    """A request that is installed, or about to be, somewhere."""

    was_solo: bool
    acks: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)


class RoundsWatch:
    """What the rounds plane of one epoch shows.

    Args:
        ranks: P.
        batch: K.
        block_tokens: B.
        has_refinement: hints are voted several times before they count.
        loses_votes: links lose answers, so that rounds repeat without bound.
        has_left: whether a request's client has left, so that it may end at any moment.
    """

    def __init__(
        self,
        *,
        ranks: int,
        batch: int,
        block_tokens: int,
        has_refinement: bool,
        loses_votes: bool,
        has_left: Callable[[int], bool],
    ) -> None:
        self._ranks, self._batch, self._block_tokens = ranks, batch, block_tokens
        self._has_refinement, self._loses_votes = has_refinement, loses_votes
        self._has_left = has_left
        self._open: RoundBcast | None = None
        self._round = self._seq = 0
        self._queue: dict[int, _Queued] = {}  # in arrival order
        self._admitted: dict[int, _Admitted] = {}
        self._admissions: list[tuple[int, int]] = []  # rid, endpoint; ino = index + 1
        self._installed = [0] * ranks
        self.cancelling: frozenset[int] = frozenset()
        """Requests whose cancel record is in the open round."""

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of the open round."""
        return self._open.records if self._open is not None else ()

    # ── broadcast ────────────────────────────────────────────────────────────────────────────

    def broadcast(self, bcast: RoundBcast) -> None:
        """The leader begins a round."""
        check(bcast.round == self._round + 1, "rounds are numbered [I31]", round=bcast.round)
        check(self._open is None, "a round ends before the next [I31]", round=bcast.round)
        self._round, self._open = bcast.round, bcast
        self.cancelling = frozenset(bcast.cancels)
        for rid in bcast.cancels:
            self._queue.pop(rid, None)
        opened = self._follow_records(bcast.records)
        for entry in bcast.announces:
            self._announce(entry)
        self._check_pending(opened)
        for queued in opened:
            self._check_order(queued)

    def _announce(self, entry: AnnounceEntry) -> None:
        check(entry.seq > self._seq, "announced in arrival order [I31]", rid=entry.rid)
        self._seq = entry.seq
        blocks = -(-entry.prompt_tokens // self._block_tokens)
        self._queue[entry.rid] = _Queued(entry.rid, entry.seq, blocks)

    def _follow_records(self, records: Sequence[Record]) -> list[_Queued]:
        """Compare the round's records with what the last votes allow; return what was opened."""
        order, opened = [], []
        for record in records:
            check(record.rid in self._queue, "a record of a waiting request [I32]", record=record)
            queued = self._queue[record.rid]
            order.append(queued.seq)
            if queued.record is None:
                opened.append(queued)
                self._open_attempt(queued, record)
            else:
                self._follow(queued, queued.record, record)
            queued.record = record
        check(order == sorted(set(order)), "one record each, by arrival [I31]", order=order)
        asked = set(order)
        for queued in self._queue.values():
            if queued.record is not None and queued.seq not in asked:
                check(queued.following is None, "an open attempt has a record", rid=queued.rid)
                queued.record = None
        return opened

    def _open_attempt(self, queued: _Queued, record: Record) -> None:
        is_next = record.phase == RecordPhase.LEASE and record.attempt == queued.attempt + 1
        check(is_next, "an attempt begins with a lease", record=record)
        check(len(queued.hints) == self._ranks, "all ranks voted a hint [I7]", rid=queued.rid)
        is_last_resort = record.endpoint == 0 and bool(record.flags & FLAG_NO_FLOOR)
        check(
            record.endpoint == min(queued.hints.values()) or is_last_resort,
            "the candidate is the lowest hint [I7]",
            record=record,
            hints=queued.hints,
        )
        queued.attempt, queued.steps = record.attempt, 1

    def _follow(self, queued: _Queued, last: Record, record: Record) -> None:
        """One step of an attempt: what the votes on the last one say."""
        found = (record.phase, record.attempt, record.endpoint)
        check(
            found == queued.following,
            "the next record is what the votes say [I13, I31]",
            record=record,
            expected=queued.following,
        )
        if record == last:
            return
        queued.attempt = record.attempt
        if record.phase in (RecordPhase.LEASE, RecordPhase.TRIM):
            is_lower = record.endpoint < last.endpoint
            check(is_lower, "endpoints fall within a chain [I11]", record=record)
            queued.steps += 1
            check(queued.steps <= queued.blocks + 2, "a chain is short [I12]", rid=record.rid)
        elif record.phase == RecordPhase.RELEASE:
            queued.has_failed = True

    def _check_pending(self, opened: Sequence[_Queued]) -> None:
        """At most K attempts and unacknowledged installs; one that has failed is alone.  [I26]"""
        trying = [queued for queued in self._queue.values() if queued.record is not None]
        due = [done for done in self._admitted.values() if len(done.acks) < self._ranks]
        count = len(trying) + len(due)
        check(count <= self._batch, "at most K requests are pending [I26]", pending=count)
        for queued in opened:
            others = [other for other in trying if other is not queued]
            is_alone = not others and not due
            check(is_alone or not queued.has_failed, "a retry is alone [A51]", rid=queued.rid)
            has_retry = any(o.has_failed for o in others) or any(done.was_solo for done in due)
            check(not has_retry, "nothing is selected beside a retry [A51]", rid=queued.rid)

    def _check_order(self, opened: _Queued) -> None:
        """Nothing is selected past an older request that could be, or that was refused.  [I27]"""
        for other in self._queue.values() if not self._has_refinement else ():
            is_waiting = (
                other.seq < opened.seq
                and other.record is None
                and len(other.hints) == self._ranks
                and not self._has_left(other.rid)
            )
            check(
                not is_waiting,
                "a younger request was selected past a waiting one [I27]",
                older=other.rid,
                younger=opened.rid,
            )

    # ── votes ────────────────────────────────────────────────────────────────────────────────

    def voted(self, vote: RoundVote) -> None:
        """A rank answers, before any link touches it: it has applied just this round."""
        is_due = self._open is not None and vote.round == self._round
        check(is_due, "a vote in the open round [I31]", rank=vote.rank, round=vote.round)
        asked = [(r.rid, r.attempt, r.phase) for r in self.records]
        answered = [(v.rid, v.attempt, v.phase) for v in vote.votes]
        check(asked == answered, "one answer per record, in order [I31]", rank=vote.rank)

    def gathered(self, gathered: RoundGathered) -> None:
        """The leader has all votes: derive what follows."""
        votes = gathered.votes
        order = [vote.rank for vote in votes]
        check(order == list(range(self._ranks)), "every rank votes in every round [I31]")
        check(gathered.round == self._round, "votes of the open round [I31]", round=gathered.round)
        records, self._open = self.records, None
        for vote in votes:
            self._note_hints(vote)
            self._note_ends(vote)
        for record in records:
            self._derive(self._queue[record.rid], record, _answers(record, votes))
        self._check_progress()

    def _note_hints(self, vote: RoundVote) -> None:
        for hint in vote.hints:
            check(hint.endpoint % self._block_tokens == 0, "hints end on blocks [I5]", rid=hint.rid)
            queued = self._queue.get(hint.rid)
            if queued is not None:
                limit = (queued.blocks - 1) * self._block_tokens
                check(hint.endpoint <= limit, "a token is left to compute [I5]", rid=hint.rid)
                queued.hints[vote.rank] = hint.endpoint

    def _note_ends(self, vote: RoundVote) -> None:
        for rid in vote.installed:
            if rid in self._admitted:
                self._admitted[rid].acks.add(vote.rank)
        for rid in vote.gone:
            done = self._admitted.get(rid)
            if done is not None:
                done.gone.add(vote.rank)
                if len(done.gone) == self._ranks == len(done.acks):
                    del self._admitted[rid]

    def _derive(self, queued: _Queued, record: Record, answers: Sequence[RecordVote]) -> None:
        """Table 6.4: from the answers of one round to the next step."""
        repeat = (record.phase, record.attempt, record.endpoint)
        if len(answers) < self._ranks:
            queued.following = repeat
        elif record.phase == RecordPhase.RELEASE:
            is_over = all(answer.status in ENDED for answer in answers)
            queued.following = None if is_over else repeat
        elif any(answer.status in FAILURES for answer in answers):
            queued.following = (RecordPhase.RELEASE, record.attempt, 0)
        else:
            self._reconcile(queued, record, answers)

    def _reconcile(self, queued: _Queued, record: Record, answers: Sequence[RecordVote]) -> None:
        ends = {answer.endpoint for answer in answers}
        check(max(ends) <= record.endpoint, "a lease is at most the cap [I8]", record=record)
        lowest = min(ends)
        committed = sum(answer.is_committed for answer in answers)
        if not committed:
            phase = RecordPhase.COMMIT if len(ends) == 1 else RecordPhase.TRIM
            queued.following = (phase, record.attempt, lowest)
        elif committed < self._ranks or len(ends) > 1:
            queued.following = (RecordPhase.LEASE, record.attempt + 1, lowest)
        else:
            self._admit(queued, lowest)

    def _admit(self, queued: _Queued, endpoint: int) -> None:
        """All ranks committed at one endpoint: each installs by itself.  [I13, A51]"""
        del self._queue[queued.rid]
        self._admitted[queued.rid] = _Admitted(queued.has_failed)
        self._admissions.append((queued.rid, endpoint))
        for other in self._queue.values():
            if other.has_failed and other.seq < queued.seq and not self._has_left(other.rid):
                other.bypasses += 1
                check(
                    other.bypasses < self._batch,
                    "too many younger requests passed one that had failed [I27]",
                    rid=other.rid,
                )

    # ── what follows ─────────────────────────────────────────────────────────────────────────

    def installed(self, rank: int, rid: int, ino: int, endpoint: int) -> None:
        """A rank has materialised a request: the next of the derived admissions.  [I13, I45]"""
        self._installed[rank] += 1
        check(ino == self._installed[rank], "ino has no gaps [I45]", rank=rank, rid=rid, ino=ino)
        if self._ranks == 1:
            return
        check(ino <= len(self._admissions), "installed, but not admitted [I13]", rank=rank, rid=rid)
        decided = self._admissions[ino - 1]
        check(
            decided == (rid, endpoint),
            "installs are the decisions, in their order [I13, I45]",
            rank=rank,
            rid=rid,
            decided=decided,
            found=(rid, endpoint),
        )

    def _check_progress(self) -> None:
        """With nothing admitted anywhere, the head of the queue gets in within some rounds."""
        waiting = (queued for queued in self._queue.values() if not self._has_left(queued.rid))
        head = next(waiting, None)
        if head is None or self._loses_votes or self._has_refinement:
            return
        has_live = any(len(done.gone) < self._ranks for done in self._admitted.values())
        is_known = len(head.hints) == self._ranks
        head.rounds_alone = head.rounds_alone + 1 if is_known and not has_live else 0
        limit = ATTEMPTS_ALONE * (head.blocks + ROUNDS_PER_ATTEMPT)
        check(
            head.rounds_alone <= limit,
            "an empty worker does not admit its oldest request [I28]",
            rid=head.rid,
            rounds=head.rounds_alone,
        )

    def quiet(self) -> None:
        """Nothing waits, and what was admitted has ended everywhere.  [I44]"""
        check(not self._queue, "requests wait [I44]", rids=sorted(self._queue))
        left = sorted(rid for rid, done in self._admitted.items() if len(done.gone) < self._ranks)
        check(not left, "admitted requests are alive somewhere [I44]", rids=left)
        is_equal = len(set(self._installed)) == 1
        check(is_equal, "all ranks installed the same [I45]", counts=self._installed)


def _answers(record: Record, votes: Sequence[RoundVote]) -> list[RecordVote]:
    """Return the answers of one round to one record; fewer than ranks if some were lost."""
    key = (record.rid, record.attempt, record.phase)
    return [
        answer
        for vote in votes
        for answer in vote.votes
        if (answer.rid, answer.attempt, answer.phase) == key and answer.status != VoteStatus.PENDING
    ]
