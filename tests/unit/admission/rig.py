"""A cache whose answers are written down, and a fleet of ranks in lockstep rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from wavepp_worker.admission.commands import (
    Outward,
    SendBroadcast,
    SendGathered,
    SendInstall,
    SendVote,
    Transition,
)
from wavepp_worker.admission.events import (
    Announced,
    BroadcastReceived,
    CancelRequested,
    GatheredReceived,
    OutsideEvent,
    Tick,
    VoteReceived,
)
from wavepp_worker.admission.leader import Leader
from wavepp_worker.admission.sections import InlineRank
from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.types import Instant
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared, Shortfall
from wavepp_worker.wire.mailbox import Announce, Freed, Sampling, StateSlots
from wavepp_worker.wire.rounds import Record, RoundBcast, RoundVote

B = 4
EPOCH = 3


class Call(Struct, frozen=True):
    """One cache method that ran."""

    name: str
    rid: int
    value: int = 0


class ScriptedCache:
    """Answers like a RankCache, from `valid` endpoints and a list of failures to come."""

    def __init__(self, total_tokens: int = 1_000) -> None:
        self.valid: dict[int, list[int]] = {}  # rid -> endpoints that can be leased; 0 always can
        self.hints: dict[int, int] = {}  # rid -> hint, where it differs from the largest valid
        self.failures: list[tuple[str, int]] = []  # (section, rid): fails once, in any order
        self.calls: list[Call] = []
        self.available = self.total = total_tokens
        self.capacity_generation = 0
        self.index_version = 0
        self.leases: dict[int, int] = {}
        self.points: dict[int, tuple[int, ...]] = {}  # rid -> snapshot points it was told
        self.is_sparse = False
        self.has_states = False

    def _best(self, rid: int, cap: int) -> int:
        return max([0, *(e for e in self.valid.get(rid, []) if e <= cap)])

    def _call(self, name: str, rid: int, value: int = 0) -> bool:
        """Note the call; return whether it shall fail."""
        self.calls.append(Call(name, rid, value))
        if (name, rid) in self.failures:
            self.failures.remove((name, rid))
            return True
        return False

    def learn(
        self, rid: int, prompt_tokens: int, keys: bytes, snapshot_points: tuple[int, ...] = ()
    ) -> None:
        self._call("learn", rid, prompt_tokens)
        self.points[rid] = snapshot_points

    def forget(self, rid: int) -> None:
        assert rid not in self.leases
        self._call("forget", rid)

    def hint(self, rid: int, cap: int | None = None) -> int:
        if cap is None:
            return self.hints.get(rid, self._best(rid, 1 << 40))
        return self._best(rid, cap)

    def acquire(self, rid: int, attempt: int, cap: int) -> int:
        assert rid not in self.leases, "release comes first"
        self._call("acquire", rid, cap)
        self.leases[rid] = self._best(rid, cap)
        return self.leases[rid]

    def trim(self, rid: int, cap: int) -> int:
        self._call("trim", rid, cap)
        self.leases[rid] = self._best(rid, min(cap, self.leases[rid]))
        return self.leases[rid]

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        if self._call("prepare", rid, int(no_floor)):
            del self.leases[rid]
            return Shortfall((1,), self.capacity_generation)
        return Prepared(self.leases[rid])

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        assert endpoint == self.leases[rid]
        if self._call("commit", rid, endpoint):
            return Shortfall((1,), self.capacity_generation)
        return Committed(endpoint)

    def release(self, rid: int) -> None:
        self._call("release", rid)
        del self.leases[rid]

    def materialize(self, rid: int, ino: int) -> Materialized:
        self._call("materialize", rid, ino)
        states = (StateSlots(0, 7),) if self.has_states else ()
        return Materialized(self.leases.pop(rid), ((1, 2, 3),), states=states)

    def publish(self, rid: int, end: int, snapshots: Sequence[int] = ()) -> None:
        self._call("publish", rid, end)
        for point in snapshots:
            self._call("snapshot", rid, point)

    def free(self, rid: int) -> None:
        self._call("free", rid)

    def available_tokens(self) -> int:
        return self.available

    def total_tokens(self) -> int:
        return self.total

    def names(self, rid: int) -> list[str]:
        """Return what ran for one request, and forget it."""
        names = [call.name for call in self.calls if call.rid == rid]
        self.calls = [call for call in self.calls if call.rid != rid]
        return names


class Fleet:
    """P ranks; `round` runs one whole round.

    `bcasts`, `outward[rank]` (without stories) and `installs[rank]` keep everything that was sent.
    """

    def __init__(
        self,
        stages: int,
        caches: list[object] | None = None,
        *,
        sparse: bool = False,
        **changes: object,
    ) -> None:
        self.now = 10.0
        self.caches: list[ScriptedCache] = caches or [  # type: ignore[assignment]
            ScriptedCache() for _ in range(stages)
        ]
        self.ranks = [
            InlineRank(
                make_settings(rank=rank, stages=stages, **changes),
                cache,  # type: ignore[arg-type]
            )
            for rank, cache in enumerate(self.caches)
        ]
        if sparse:
            self.caches[-1].is_sparse = True  # one is enough
        self.bcasts: list[RoundBcast] = []
        self.votes: list[RoundVote] = []  # of the last round, followers only
        self.outward: list[list[Outward]] = [[] for _ in range(stages)]
        self.installs: list[dict[int, SendInstall]] = [{} for _ in range(stages)]
        self.stories: list[Transition] = []

    @property
    def leader(self) -> Leader:
        leader = self.ranks[0].machine._leader
        assert leader is not None
        return leader

    @property
    def records(self) -> list[Record]:
        """Return the records of the last broadcast."""
        return list(self.bcasts[-1].records)

    def announce(self, *rids: int, tokens: int = 40) -> None:
        for rid in rids:
            keys = bytes(32 * (tokens // B))
            prompt = rid.to_bytes(4, "little") * tokens
            self.feed(0, Announced(Announce(rid, tokens, keys, prompt, Sampling(seed=rid))))

    def cancel(self, rid: int) -> None:
        self.feed(0, CancelRequested(rid))

    def free(self, rid: int, *ranks: int) -> None:
        """LOOP frees the request on some ranks; on all if none is named."""
        for rank in ranks or range(len(self.ranks)):
            self.note(rank, self.ranks[rank].freed(Freed(rid), Instant(self.now)))

    def feed(self, rank: int, event: OutsideEvent) -> list[Outward]:
        return self.note(rank, self.ranks[rank].handle(event, Instant(self.now)))

    def note(self, rank: int, commands: list[Outward]) -> list[Outward]:
        for command in commands:
            if isinstance(command, Transition):
                self.stories.append(command)
                continue
            self.outward[rank].append(command)
            if isinstance(command, SendInstall):
                self.installs[rank][command.install.rid] = command
            if isinstance(command, SendBroadcast):
                self.bcasts.append(command.bcast)
        return commands

    def round(
        self,
        count: int = 1,
        *,
        between: Callable[[], None] = lambda: None,
        edit: Callable[[RoundVote], RoundVote] = lambda vote: vote,
    ) -> None:
        """Run whole rounds, each at its deadline; `between` runs before the first vote arrives."""
        for _ in range(count):
            deadline = self.ranks[0].next_deadline()
            assert deadline is not None
            self.now = max(self.now, deadline)
            out = self.feed(0, Tick())
            frames = [c.bcast for c in out if isinstance(c, SendBroadcast)]
            votes = [
                c.vote
                for rank in range(1, len(self.ranks))
                for c in self.feed(rank, BroadcastReceived(frames[0]))
                if isinstance(c, SendVote)
            ]
            between()
            self.votes = [edit(vote) for vote in votes]
            for vote in self.votes:
                out = self.feed(0, VoteReceived(vote))
            for command in out:
                if isinstance(command, SendGathered):
                    for rank in range(1, len(self.ranks)):
                        self.feed(rank, GatheredReceived(command.gathered))
            for rank in self.ranks:
                rank.machine.check_invariants()

    def sent(self, kind: type[Outward], rank: int = 0) -> list[Outward]:
        return [command for command in self.outward[rank] if isinstance(command, kind)]

    def wait(self, seconds: float) -> None:
        self.now += seconds


def make_settings(**changes: object) -> AdmissionSettings:
    base: dict[str, object] = {
        "rank": 0,
        "stages": 1,
        "epoch": EPOCH,
        "block_tokens": B,
        "snapshot_interval_tokens": 16 * B,
        "headroom_tokens": 0,
        "floor_fraction": 0.0,
        "floor_headroom_blocks": 0,
        "batch_requests_max": 4,
    }
    return AdmissionSettings(**(base | changes))  # type: ignore[arg-type]
