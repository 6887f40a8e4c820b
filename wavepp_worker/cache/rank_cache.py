"""RankCache: what one rank can promise.  One method is one atomic section.

    learn ─ hint ─ acquire ─ (trim) ─ prepare ─ commit ─ materialize ─ publish* ─ free ─ forget
                      └────────── release: escrow, then lease ──────┘

The WAVE process is the only owner and runs each section to completion, so there is no lock.  All
positions are tokens from the start of the prompt; endpoints are multiples of `block_tokens`.
[algorithms 4-7, 10, 13]
Measured for a 200,000-token prompt at B = 64 (3,125 blocks), on one core of a shared machine: a
hint 0.01 ms, a lease 0.9, prepare 0.4, materialisation 1.5.  The longest sections are those that
give something up for every block: claiming 3,100 victims (6.5), materialising over 3,125 victims
(8, and 15 if the host tier is full), evicting 3,125 blocks (5.5), publishing them (2.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TypeVar

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import RequestId, Tokens
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.books import pool_stats, view_of
from wavepp_worker.cache.escrow import Escrow
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.cache.index import Change
from wavepp_worker.cache.invariants import check_books, check_waiting
from wavepp_worker.cache.lease import Lease
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared, RankView, Shortfall
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.sequence import Sequence, materialize
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.cache.windows import WindowSet

__all__ = ["Committed", "Materialized", "Prepared", "RankCache", "RankView", "Shortfall"]


T = TypeVar("T")

COUNTERS = (
    "wavepp_hints_total",
    "wavepp_hint_probes_total",
    "wavepp_snapshot_limited_hints_total",
    "wavepp_snapshot_fallbacks_total",
    "wavepp_prepare_shortfalls_total",
    "wavepp_commit_shortfalls_total",
    "wavepp_substitutions_total",
    "wavepp_cut_claims_total",
    "wavepp_destination_claims_total",
    "wavepp_reused_tokens_total",
    "wavepp_published_blocks_total",
    "wavepp_snapshots_published_total",
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
        self._block_tokens = block_tokens
        self._windows = WindowSet(windows, block_tokens, floor_fraction, floor_headroom_blocks)
        self._index = self._windows.index
        self._pools = self._windows.pools
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

    def learn(
        self, rid: int, prompt_tokens: int, keys: bytes, snapshot_points: Seq[int] = ()
    ) -> None:
        """Remember a prompt's keys, KEY_BYTES per full block; holds nothing.

        Args:
            snapshot_points: see `snapshots`; needed where `has_states`.
        """
        request_id = RequestId(rid)
        check(request_id not in self._requests, "request is known already", rid=rid)
        split = split_keys(keys)
        check(len(split) == prompt_tokens // self._block_tokens, "one key per full block", rid=rid)
        self._requests[request_id] = KnownRequest(
            request_id, Tokens(prompt_tokens), split, self._block_tokens, snapshot_points
        )

    def forget(self, rid: int) -> None:
        """Drop a prompt's keys; a live sequence keeps its own.  Idempotent."""
        check(rid not in self._leases and rid not in self._escrows, "release first", rid=rid)
        self._requests.pop(RequestId(rid), None)

    def hint(self, rid: int, cap: int | None = None) -> int:
        """Return the endpoint that the index suggests, at most `cap`.  [P-HINT, I5]"""
        request = _held(self._requests, rid, "known request")
        endpoint, is_limited, probes = self._windows.hint(request, cap)
        self._counters["wavepp_hints_total"] += 1
        self._counters["wavepp_hint_probes_total"] += probes
        self._counters["wavepp_snapshot_limited_hints_total"] += is_limited
        return endpoint

    def walk(self, rid: int, cap: int | None = None) -> int:
        """Return what `hint` tells, from the tree itself; holds nothing.

        The first of the two walks of naive admission: its cost grows with the prompt.
        """
        request = _held(self._requests, rid, "known request")
        lease = Lease(request, request.attempt, self._windows.rules)
        return lease.reach(request.endpoint_max if cap is None else cap)

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
        before = self._windows.available()
        lease = Lease(request, attempt, self._windows.rules)
        lease.acquire(cap, self._vacate)
        self._leases[request.rid] = lease
        self._counters["wavepp_snapshot_fallbacks_total"] += (
            self.is_sparse and lease.endpoint < lease.matched
        )
        self._end_section(before)
        return lease.endpoint

    def trim(self, rid: int, cap: int) -> int:
        """Lower a lease to at most `cap`; return its endpoint.  The escrow stays as it is."""
        lease = _held(self._leases, rid, "lease")
        escrow = self._escrows.get(lease.request.rid)
        check(escrow is None or not escrow.is_committed, "trims after commit", rid=rid)
        before = self._windows.available()
        wanted = min(lease.endpoint, cap - cap % self._block_tokens)
        endpoint = lease.trim(cap, self._vacate)
        if endpoint < wanted:
            mark("lease.trim_falls_further")
            self._counters["wavepp_snapshot_fallbacks_total"] += 1
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
        escrow = Escrow(lease, self._windows.rules)
        missing = escrow.missing(lease, no_floor=no_floor)
        before = self._windows.available()
        if any(missing):
            self._leases.pop(request.rid).release()
            self._counters["wavepp_prepare_shortfalls_total"] += 1
            mark("escrow.prepare_failed")
            self._end_section(before, is_news=False)
            return Shortfall(missing, self.capacity_generation)
        escrow.fill(lease)
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
        missing = escrow.missing(lease, no_floor=no_floor)
        if any(missing):
            escrow.has_failed = True
            self._counters["wavepp_commit_shortfalls_total"] += 1
            mark("escrow.commit_failed")
            return Shortfall(missing, self.capacity_generation)
        before = self._windows.available()
        escrow.fill(lease)
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
        before = self._windows.available()
        if escrow is not None:
            escrow.release()
        lease.release()
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
        before = self._windows.available()
        sequence, installed = materialize(lease, escrow, self._windows.rules)
        del self._escrows[escrow.rid]
        del self._leases[escrow.rid]
        self._sequences[escrow.rid] = sequence
        self._counters["wavepp_reused_tokens_total"] += lease.endpoint
        self._end_section(before)
        return installed

    def publish(self, rid: int, end: int, snapshots: Seq[int] = ()) -> None:
        """Make the full blocks before token `end` matchable; a wave's fence passed.  [13]

        Args:
            snapshots: snapshot points whose state the wave has stored, each told once.
        """
        sequence = _held(self._sequences, rid, "sequence")
        check(0 <= end <= sequence.request.prompt_tokens, "publishes the prompt", rid=rid, end=end)
        before = self._windows.available()
        for number, window in enumerate(self._windows.rules):
            attached = sequence.publish(number, end, snapshots)
            self._counters[window.published_metric] += attached
        self._end_section(before)

    def free(self, rid: int) -> None:
        """LOOP reported `Freed`: no wave and no transfer names the sequence any more."""
        sequence = _held(self._sequences, rid, "sequence")
        before = self._windows.available()
        del self._sequences[RequestId(rid)]
        sequence.free()
        self._end_section(before)

    # ── capacity and views ───────────────────────────────────────────────────────────────────

    def drain_changes(self) -> tuple[Change, ...]:
        """Return (is_stored, window, key) since the last call, in mutation order."""
        return self._index.drain_changes()

    def available_tokens(self) -> int:
        """Tokens that the tightest dense window could promise now; unlimited without one."""
        return self._windows.available_tokens()

    def total_tokens(self) -> int:
        """Tokens that the smallest dense window holds; unlimited without one."""
        return self._windows.total_tokens()

    @property
    def is_sparse(self) -> bool:
        """Whether some window cannot be resumed at every boundary of what it holds."""
        return self._windows.is_sparse

    @property
    def has_states(self) -> bool:
        """Whether some window keeps snapshots."""
        return self._windows.has_states

    def evict(self, window: int, count: int, *, is_host: bool = False) -> int:
        """Drop up to `count` unused cached blocks of a window's tier; return how many went.

        For tests: it loses content that materialisation would offload.
        """
        before = self._windows.available()
        evicted = self._pools[window].evict(count, is_host=is_host)
        self._end_section(before)
        return evicted

    def view(self) -> RankView:
        """Return keys and counts.  Cost: O(attached blocks)."""
        return view_of(self._pools, len(self._leases), len(self._escrows), len(self._sequences))

    def stats(self) -> dict[str, float]:
        """Return counters, summed over windows, and gauges by their metric names."""
        tokens = {}
        if self.total_tokens() < UNLIMITED_TOKENS:
            tokens = {
                "wavepp_available_tokens": self.available_tokens(),
                "wavepp_pool_tokens": self.total_tokens(),
            }
        return {
            **self._counters,
            **pool_stats(self._pools),
            **tokens,
            "wavepp_lease_count": len(self._leases),
            "wavepp_escrow_count": len(self._escrows),
            "wavepp_sequence_count": len(self._sequences),
        }

    def check_invariants(self, waiting: Seq[int] = ()) -> None:
        """Re-derive every count, link and promise; raise InvariantError on a difference.

        Args:
            waiting: requests that must hold nothing.  [I29]
        """
        check_books(self._windows.rules, self._leases, self._escrows, self._sequences)
        check_waiting(waiting, self._leases, self._escrows, self._sequences)

    # ── parts of sections ────────────────────────────────────────────────────────────────────

    def _vacate(self, window: int, block: Block) -> bool:
        escrow = _held(self._escrows, block.owner or 0, "escrow")
        has_moved = escrow.promises[window].vacate(block)
        if block.is_host:
            self._counters["wavepp_destination_claims_total"] += 1
        else:
            name = "wavepp_substitutions_total" if has_moved else "wavepp_cut_claims_total"
            self._counters[name] += 1
        return has_moved

    def _end_section(self, before: tuple[int, ...], *, is_news: bool = True) -> None:
        if is_news and any(
            now > then for now, then in zip(self._windows.available(), before, strict=True)
        ):
            self.capacity_generation += 1
        if self._check_always:
            self.check_invariants()


def _held(table: Mapping[RequestId, T], rid: int, what: str) -> T:
    found = table.get(RequestId(rid))
    if found is None:
        raise InvariantError(f"no {what} of this request rid={rid}")
    return found
