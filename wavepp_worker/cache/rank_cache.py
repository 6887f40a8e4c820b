"""RankCache: what one rank can promise.  One method is one atomic section.

    learn ─ hint ─ acquire ─ (trim) ─ prepare ─ commit ─ materialize ─ publish* ─ free ─ forget
                      └────────── release: escrow, then lease ──────┘

The WAVE process is the only owner and runs each section to completion, so there is no lock.  All
positions are tokens from the start of the prompt; endpoints are multiples of `block_tokens`.
[algorithms 4-7, 10, 13]
Measured for a 200,000-token prompt at B = 64 (3,125 blocks): at most 4 ms a section.
The longest are claiming 2,800 victims (3.9), evicting 3,125 blocks (2.5), publishing them (1.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.types import RequestId, Tokens
from wavepp_worker.cache import escrow as escrows
from wavepp_worker.cache import lease as leases
from wavepp_worker.cache import sequence as sequences
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.cache.index import Change, HintIndex
from wavepp_worker.cache.invariants import check_books
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared, RankView, Shortfall
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.probe import hint_endpoint
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.sequence import Sequence
from wavepp_worker.cache.window import WindowSpec

__all__ = ["Committed", "Materialized", "Prepared", "RankCache", "RankView", "Shortfall"]


T = TypeVar("T")

COUNTERS = (
    "wavepp_hints_total",
    "wavepp_hint_probes_total",
    "wavepp_prepare_shortfalls_total",
    "wavepp_commit_shortfalls_total",
    "wavepp_substitutions_total",
    "wavepp_cut_claims_total",
    "wavepp_reused_tokens_total",
    "wavepp_published_blocks_total",
)


class RankCache:
    """The books of one rank's cache.

    Args:
        windows: one spec per window, in the order of the block tables.
        block_tokens: B.
        floor_fraction, floor_headroom_blocks: see `floors`.
        check_always: run `check_invariants` after every section that changes something.
    """

    def __init__(
        self,
        windows: Seq[WindowSpec],
        block_tokens: int,
        floor_fraction: float,
        floor_headroom_blocks: int,
        *,
        check_always: bool = False,
    ) -> None:
        check(len(windows) > 0, "a rank has at least one window")
        self._block_tokens = block_tokens
        self._index = HintIndex(len(windows))
        self._pools = [
            BlockPool(number, spec.slots, self._index) for number, spec in enumerate(windows)
        ]
        self._floors = [
            floor_blocks(spec.slots, floor_fraction, floor_headroom_blocks) for spec in windows
        ]
        self._no_floors = [0] * len(windows)
        self._requests: dict[RequestId, KnownRequest] = {}
        self._leases: dict[RequestId, Lease] = {}
        self._escrows: dict[RequestId, Escrow] = {}
        self._sequences: dict[RequestId, Sequence] = {}
        self._check_always = check_always
        self._ino = 0
        self._counters = dict.fromkeys(COUNTERS, 0)
        self.capacity_generation = 0
        """Grows when room appears, except by undoing an attempt that failed here.  [8.4]"""

    # ── knowledge without ownership ──────────────────────────────────────────────────────────

    def learn(self, rid: int, prompt_tokens: int, keys: bytes) -> None:
        """Remember a prompt's keys, KEY_BYTES per full block; holds nothing."""
        request_id = RequestId(rid)
        check(request_id not in self._requests, "request is known already", rid=rid)
        split = split_keys(keys)
        check(len(split) == prompt_tokens // self._block_tokens, "one key per full block", rid=rid)
        self._requests[request_id] = KnownRequest(
            request_id, Tokens(prompt_tokens), split, self._block_tokens
        )

    def forget(self, rid: int) -> None:
        """Drop a prompt's keys; a live sequence keeps its own.  Idempotent."""
        check(rid not in self._leases and rid not in self._escrows, "release first", rid=rid)
        self._requests.pop(RequestId(rid), None)

    def hint(self, rid: int, cap: int | None = None) -> int:
        """Return the endpoint that the index suggests, at most `cap`.  [P-HINT]"""
        request = _held(self._requests, rid, "known request")
        endpoint, probes = hint_endpoint(self._index, request, cap)
        self._counters["wavepp_hints_total"] += 1
        self._counters["wavepp_hint_probes_total"] += probes
        return endpoint

    @property
    def index_version(self) -> int:
        """Grows with every change of the index; unchanged means that hints are unchanged."""
        return self._index.version

    # ── lease ────────────────────────────────────────────────────────────────────────────────

    def acquire(self, rid: int, attempt: int, cap: int) -> int:
        """Pin the longest valid prefix up to `cap`; return its endpoint.  [P-LEASE]

        An older attempt's escrow and lease are released first.  [A43]
        """
        request = _held(self._requests, rid, "known request")
        check(rid not in self._sequences, "request is admitted", rid=rid)
        check(attempt > request.attempt, "attempts grow", rid=rid, attempt=attempt)
        self.release(rid)
        request.attempt = attempt
        before = self._available()
        lease = leases.acquire_lease(request, attempt, cap, self._pools, self._vacate)
        self._leases[request.rid] = lease
        self._end_section(before)
        return lease.endpoint

    def trim(self, rid: int, cap: int) -> int:
        """Lower a lease to at most `cap`; return its endpoint.  The escrow stays as it is."""
        lease = _held(self._leases, rid, "lease")
        escrow = self._escrows.get(lease.request.rid)
        check(escrow is None or not escrow.is_committed, "trims after commit", rid=rid)
        before = self._available()
        endpoint = leases.trim_lease(lease, cap, self._pools)
        self._end_section(before)
        return endpoint

    # ── escrow ───────────────────────────────────────────────────────────────────────────────

    def prepare(self, rid: int, *, no_floor: bool = False) -> Prepared | Shortfall:
        """Reserve what the request needs beyond its lease.  [P-ESCROW, algorithms 7.4]

        On a shortfall the lease is released in the same section.
        """
        lease = _held(self._leases, rid, "lease")
        request = lease.request
        check(rid not in self._escrows, "prepared already", rid=rid)
        need = escrows.demand_blocks(request, lease.endpoint)
        needs = (need,) * len(self._pools)
        floors = self._no_floors if no_floor else self._floors
        missing = escrows.missing_blocks(self._pools, floors, needs)
        before = self._available()
        if any(missing):
            leases.release_lease(self._leases.pop(request.rid), self._pools)
            self._counters["wavepp_prepare_shortfalls_total"] += 1
            self._end_section(before, is_news=False)
            return Shortfall(missing, self.capacity_generation)
        escrow = Escrow(request.rid, lease.endpoint, len(self._pools))
        escrows.grow_escrow(escrow, self._pools, needs)
        self._escrows[request.rid] = escrow
        self._end_section(before)
        return Prepared(lease.endpoint)

    def commit(self, rid: int, endpoint: int, *, no_floor: bool = False) -> Committed | Shortfall:
        """Fix the reservation at `endpoint`, which the lease has reached.  [algorithms 7.5]

        A shortfall leaves lease and reservation as they were [I18]; a repeated commit at the same
        endpoint changes nothing.
        """
        lease, escrow = _held(self._leases, rid, "lease"), _held(self._escrows, rid, "escrow")
        check(lease.endpoint == endpoint, "commits at the lease", rid=rid, endpoint=endpoint)
        if escrow.is_committed:
            return Committed(endpoint)
        extra = escrows.extra_needs(escrow, lease)
        floors = self._no_floors if no_floor else self._floors
        missing = escrows.missing_blocks(self._pools, floors, extra)
        if any(missing):
            escrow.has_failed = True
            self._counters["wavepp_commit_shortfalls_total"] += 1
            return Shortfall(missing, self.capacity_generation)
        before = self._available()
        escrows.grow_escrow(escrow, self._pools, extra)
        escrow.endpoint = lease.endpoint
        escrow.is_committed = True
        self._end_section(before)
        return Committed(endpoint)

    def release(self, rid: int) -> None:
        """End an attempt: escrow, then lease.  Idempotent.  [I21]"""
        escrow = self._escrows.pop(RequestId(rid), None)
        lease = self._leases.pop(RequestId(rid), None)
        if lease is None:
            check(escrow is None, "an escrow outlived its lease [I21]", rid=rid)
            return
        before = self._available()
        if escrow is not None:
            escrows.release_escrow(escrow, self._pools)
        leases.release_lease(lease, self._pools)
        self._end_section(before, is_news=escrow is None or not escrow.has_failed)

    # ── sequence ─────────────────────────────────────────────────────────────────────────────

    def materialize(self, rid: int, ino: int) -> Materialized:
        """Turn a committed attempt into a sequence.  [algorithms 10]

        Raises:
            InvariantError: not committed, or the promise was broken: fatal for the rank.
        """
        lease, escrow = _held(self._leases, rid, "lease"), _held(self._escrows, rid, "escrow")
        check(escrow.is_committed, "materializes uncommitted", rid=rid)
        check(ino > self._ino, "installs come in order", rid=rid, ino=ino, last=self._ino)
        self._ino = ino
        before = self._available()
        sequence = sequences.materialize(lease, escrow, self._pools)
        del self._escrows[escrow.rid]
        del self._leases[escrow.rid]
        self._sequences[escrow.rid] = sequence
        self._counters["wavepp_reused_tokens_total"] += lease.endpoint
        self._end_section(before)
        return Materialized(
            endpoint=sequence.endpoint,
            tables=tuple(tuple(block.slot for block in table) for table in sequence.tables),
        )

    def publish(self, rid: int, end: int) -> None:
        """Make the full blocks before token `end` matchable; a wave's fence passed.  [13]"""
        sequence = _held(self._sequences, rid, "sequence")
        check(0 <= end <= sequence.request.prompt_tokens, "publishes the prompt", rid=rid, end=end)
        before = self._available()
        attached = sequences.publish(sequence, end, self._pools)
        self._counters["wavepp_published_blocks_total"] += attached
        self._end_section(before)

    def free(self, rid: int) -> None:
        """LOOP reported `Freed`: no wave and no transfer names the sequence any more."""
        sequence = _held(self._sequences, rid, "sequence")
        before = self._available()
        del self._sequences[RequestId(rid)]
        sequences.free_sequence(sequence, self._pools)
        self._end_section(before)

    # ── capacity and views ───────────────────────────────────────────────────────────────────

    def drain_changes(self) -> tuple[Change, ...]:
        """Return (is_stored, window, key) since the last call, in mutation order."""
        return self._index.drain_changes()

    def available_tokens(self) -> int:
        """Tokens that the tightest dense window could promise now.  [algorithms 8.2]"""
        return self._block_tokens * min(self._available())

    def total_tokens(self) -> int:
        """Tokens that the smallest dense window holds."""
        return self._block_tokens * min(pool.total_count for pool in self._pools)

    def evict(self, window: int, count: int) -> int:
        """Empty up to `count` unused cached blocks of a window; return how many went."""
        before = self._available()
        evicted = self._pools[window].evict(count)
        self._end_section(before)
        return evicted

    def view(self) -> RankView:
        """Return keys and counts.  Cost: O(attached blocks)."""
        pools = self._pools
        return RankView(
            keys=tuple(tuple(block.key for block in pool.tree.attached()) for pool in pools),
            free=tuple(pool.free_count for pool in pools),
            cached=tuple(pool.evictable_count for pool in pools),
            referenced=tuple(pool.referenced_count for pool in pools),
            reserved=tuple(pool.reserved_count for pool in pools),
            total=tuple(pool.total_count for pool in pools),
            lease_count=len(self._leases),
            escrow_count=len(self._escrows),
            sequence_count=len(self._sequences),
        )

    def stats(self) -> dict[str, float]:
        """Return counters and gauges, summed over windows."""
        pools = self._pools
        values: dict[str, float] = dict(self._counters)
        values["wavepp_evicted_blocks_total"] = sum(pool.evicted_total for pool in pools)
        values["wavepp_free_blocks"] = sum(pool.free_count for pool in pools)
        values["wavepp_cached_blocks"] = sum(pool.evictable_count for pool in pools)
        values["wavepp_referenced_blocks"] = sum(pool.referenced_count for pool in pools)
        values["wavepp_reserved_blocks"] = sum(pool.reserved_count for pool in pools)
        values["wavepp_lease_count"] = len(self._leases)
        values["wavepp_escrow_count"] = len(self._escrows)
        values["wavepp_sequence_count"] = len(self._sequences)
        return values

    def check_invariants(self) -> None:
        """Re-derive every count, link and promise; raise InvariantError on a difference."""
        check_books(self._pools, self._leases, self._escrows, self._sequences)

    # ── parts of sections ────────────────────────────────────────────────────────────────────

    def _vacate(self, pool: BlockPool, block: Block, owner: RequestId) -> bool:
        has_moved = escrows.vacate(_held(self._escrows, owner, "escrow"), pool, block)
        name = "wavepp_substitutions_total" if has_moved else "wavepp_cut_claims_total"
        self._counters[name] += 1
        return has_moved

    def _available(self) -> tuple[int, ...]:
        return tuple(pool.available_count for pool in self._pools)

    def _end_section(self, before: tuple[int, ...], *, is_news: bool = True) -> None:
        if is_news and any(now > then for now, then in zip(self._available(), before, strict=True)):
            self.capacity_generation += 1
        if self._check_always:
            self.check_invariants()


def _held(table: Mapping[RequestId, T], rid: int, what: str) -> T:
    found = table.get(RequestId(rid))
    if found is None:
        raise InvariantError(f"no {what} of this request rid={rid}")
    return found
