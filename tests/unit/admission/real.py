"""A fleet of ranks on real caches, and the little that LOOP does for them.

Prompts are lists of block numbers: equal leading numbers are an equal prefix.  A fleet keeps what
the ranks sent, as `rig.Fleet` does, and checks every cache's books after every section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.unit.admission.rig import B, Fleet
from wavepp_worker.admission.commands import ReportGone, SendInstall
from wavepp_worker.admission.events import Announced
from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.mailbox import Announce, Freed, Install, Sampling, WaveDone
from wavepp_worker.wire.rounds import Record, RecordPhase

SCOPE = scope_key("real")


def dense(slots: int, host_slots: int = 0) -> WindowSpec:
    return WindowSpec(slots=slots, host_slots=host_slots)


def states(slots: int, host_slots: int = 0) -> WindowSpec:
    return WindowSpec(kind="recurrent", slots=slots, host_slots=host_slots)


def tokens_of(blocks: Iterable[int], extra_tokens: int = 0) -> bytes:
    """Return a prompt of whole blocks, and some tokens of one more."""
    numbers = [n * B + offset for n in blocks for offset in range(B)] + [0] * extra_tokens
    return b"".join(number.to_bytes(4, "little") for number in numbers)


class RealFleet(Fleet):
    """P ranks, each with the windows given for it."""

    def __init__(
        self,
        *windows: Sequence[WindowSpec],
        floor_fraction: float = 0.0,
        floor_headroom_blocks: int = 1_000_000,
        block_tokens: int = B,
        check_always: bool = True,
        **changes: object,
    ) -> None:
        self.books = [
            RankCache(
                specs,
                block_tokens,
                floor_fraction,
                floor_headroom_blocks,
                check_always=check_always,
            )
            for specs in windows
        ]
        super().__init__(
            len(windows),
            list(self.books),
            block_tokens=block_tokens,
            floor_fraction=floor_fraction,
            floor_headroom_blocks=floor_headroom_blocks,
            **changes,
        )
        self.block_tokens = block_tokens
        self.round()

    def ask(self, rid: int, blocks: Iterable[int], extra_tokens: int = 0) -> None:
        """Announce a prompt."""
        self.ask_tokens(rid, tokens_of(blocks, extra_tokens))

    def ask_tokens(self, rid: int, tokens: bytes) -> None:
        keys = sequence_keys(tokens, self.block_tokens, SCOPE)
        announce = Announce(rid, len(tokens) // 4, keys, tokens, Sampling(seed=rid))
        self.feed(0, Announced(announce))

    def install(self, rid: int, rank: int = 0) -> Install:
        command = self.installs[rank][rid]
        assert isinstance(command, SendInstall)
        return command.install

    def is_admitted(self, rid: int) -> bool:
        """Return whether every rank installed it; at one endpoint, then.  [I13]"""
        found = [rid in installs for installs in self.installs]
        if all(found):
            numbers = {
                (install.endpoint, install.ino)
                for install in (self.install(rid, rank) for rank in range(len(self.ranks)))
            }
            check(len(numbers) == 1, "ranks admitted differently [I13, I45]", numbers=numbers)
        check(all(found) or not any(found), "some ranks admitted [I13]", rid=rid, found=found)
        return all(found)

    def until_admitted(self, rid: int, rounds: int = 60) -> int:
        """Run rounds until the request is admitted; return its endpoint in blocks."""
        for _ in range(rounds):
            if self.is_admitted(rid):
                return self.install(rid).endpoint // self.block_tokens
            self.round()
        raise AssertionError(f"request {rid} was not admitted in {rounds} rounds")

    def compute(
        self, rid: int, rank: int, *, end: int | None = None, points: Iterable[int] | None = None
    ) -> None:
        """LOOP of one rank ran the suffix up to `end` tokens.

        Args:
            points: snapshot points whose state it wrote; default: all that have a slot.
        """
        install = self.install(rid, rank)
        stop = install.prompt_tokens if end is None else end
        slots = {point for state in install.states for point, _ in state.snapshots}
        written = slots if points is None else slots & set(points)
        done = WaveDone(
            0, ((rid, stop),), tuple((rid, point) for point in sorted(written) if point <= stop)
        )
        self.ranks[rank].wave_done(done)

    def finish(self, rid: int) -> None:
        """Compute the whole request on all ranks, free it, and see it gone."""
        for rank in range(len(self.ranks)):
            self.compute(rid, rank)
            self.free(rid, rank)
        while ReportGone(rid) not in self.sent(ReportGone):
            self.round()

    def warm(self, rid: int, blocks: Iterable[int], extra_tokens: int = 1) -> None:
        """Run one request from announce to end."""
        self.ask(rid, blocks, extra_tokens)
        self.until_admitted(rid)
        self.finish(rid)

    def free(self, rid: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.note(rank, self.ranks[rank].freed(Freed(rid), Instant(self.now)))

    def steps(self, rid: int) -> list[tuple[int, RecordPhase, int]]:
        """Return (attempt, phase, endpoint in blocks) of a request's records, repeats once."""
        seen: list[Record] = []
        for bcast in self.bcasts:
            for record in bcast.records:
                if record.rid == rid and (not seen or seen[-1] != record):
                    seen.append(record)
        return [(r.attempt, r.phase, r.endpoint // self.block_tokens) for r in seen]

    def check_waiting_hold_nothing(self) -> None:
        """I14, I29: leases and escrows are those of open attempts, sequences those installed."""
        for rank in self.ranks:
            requests = rank.machine._replica.requests.values()
            holding = sum(request.is_holding for request in requests)
            view = rank.cache.view()
            check(
                view.lease_count == view.escrow_count == holding,
                "a request that waits or ended holds something [I14, I29]",
                view=view,
                holding=holding,
            )

    def check_empty(self) -> None:
        """I14: nothing is held any more, on any rank."""
        for rank in self.ranks:
            rank.cache.check_invariants()
            view = rank.cache.view()
            held = (view.lease_count, view.escrow_count, view.sequence_count)
            used = (*view.referenced, *view.reserved, *view.host_referenced, *view.host_reserved)
            check(held == (0, 0, 0) and not any(used), "something is still held [I14]", view=view)
            check(not rank.machine._replica.requests, "a request is remembered [I14]")
