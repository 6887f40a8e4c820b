"""Recurrent windows: one state per layer, so a prefix is the snapshot at exactly its end.

    snapshot at the endpoint ── copy ──▶ working state ── waves ──▶ copies at snapshot points

Device slots serve working states and snapshots alike.  A state cannot be rolled back: lowering an
endpoint means finding an earlier snapshot.  The snapshot itself is only read, by the first copy of
an Install; it need not come back to the device for that.  [algorithms E1, 6, 7, A12, A47, A48]
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.parts import LeasePart, Promise, Vacate
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.probe import snapshot_depth
from wavepp_worker.cache.promises import CountPromise
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.sliding import check_attached
from wavepp_worker.wire.mailbox import Copy, StateSlots


class RecurrentWindow:
    """Snapshots stand for themselves; slots are promised by count."""

    is_dense = False
    published_metric = "wavepp_snapshots_published_total"

    def __init__(self, pool: BlockPool, floor: int) -> None:
        self.pool = pool
        self.floor = floor

    def hint(
        self, present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
    ) -> tuple[int, int]:
        """See `Window`."""
        return snapshot_depth(present, keys, limit)

    def seek(self, request: KnownRequest) -> LeasePart:
        """See `Window`."""
        return SnapshotLease(self.pool, request)

    def promise(self, request: KnownRequest) -> Promise:
        """See `Window`."""
        return CountPromise(request, self.pool, self.floor)

    def install(
        self, request: KnownRequest, part: LeasePart, promise: Promise, copies: list[Copy]
    ) -> RecurrentSequence:
        """See `Window`.

        The snapshot stays pinned by the lease until its slot cannot be taken here any more; after
        the Install its copy is ahead of every later use of the slot.  [algorithms 10 (f), 16.2]
        """
        slots = promise.exchange(copies)
        working = next(slots, None)
        if working is None:
            raise InvariantError(f"promise covers the working state [I22] rid={request.rid}")
        copies.append(self._first_copy(part.blocks, working))
        kept = list(slots)
        points = request.points_after(part.depth * request.block_tokens)
        check(len(kept) <= len(points), "a snapshot per point [I23]", rid=request.rid)
        snapshots = dict(zip(points[len(points) - len(kept) :], kept, strict=True))
        return RecurrentSequence(self.pool, request, working, snapshots)

    def _first_copy(self, blocks: Sequence[Block], working: Block) -> Copy:
        """Return what the working state begins with."""
        window = self.pool.window
        if not blocks:
            return Copy("zero_state", window, -1, working.slot)
        (snapshot,) = blocks
        if snapshot.is_host:
            mark("sequence.onboards_state")
            self.pool.onboarded_total += 1
            return Copy("onboard_state", window, snapshot.slot, working.slot)
        return Copy("load_state", window, snapshot.slot, working.slot)


class SnapshotLease:
    """The snapshot at exactly the endpoint, pinned; none at 0."""

    def __init__(self, pool: BlockPool, request: KnownRequest) -> None:
        self._pool = pool
        self._request = request
        self._spare: list[Block] = []  # pinned for deeper endpoints
        self.depth = 0
        self.blocks: list[Block] = []

    def reach(self, limit: int) -> int:
        """See `LeasePart`."""
        return snapshot_depth(self._pool.tree.root.children, self._request.keys, limit)[0]

    def hold(self, depth: int, vacate: Vacate) -> int:
        """See `LeasePart`: the earlier snapshot is taken before the later is given back.  [I10]"""
        if depth == self.depth:
            return depth
        found: list[Block] = []
        if depth > 0:
            found.append(self._pool.tree.root.children[self._request.keys[depth - 1]])
            if not self._may_pin(found[0]):
                mark("lease.snapshot_refused")
                return depth - 1
        self._pool.pin(found)
        self._spare += self.blocks
        self.blocks, self.depth = found, depth
        return depth

    def _may_pin(self, snapshot: Block) -> bool:
        """Whether every promise by count keeps its slot, also when the lease pins this.  [A48]"""
        if snapshot.refs > 0 or snapshot.is_host or self._pool.available_count > 0:
            return True
        held = (*self.blocks, *self._spare)  # given back at the end of this section
        has_return = any(block.refs == 1 and not block.is_host for block in held)
        if has_return:
            mark("lease.snapshot_swapped")
        return has_return

    def settle(self, *, is_use: bool) -> None:
        """See `LeasePart`."""
        self._pool.unpin(self._spare, is_use=is_use)
        self._spare.clear()

    def release(self) -> None:
        """See `LeasePart`."""
        self._pool.unpin(self.blocks)
        self.blocks = []

    def surrender(self) -> list[Block]:
        """See `LeasePart`."""
        blocks, self.blocks = self.blocks, []
        return blocks

    def check_invariants(self, depth: int) -> None:
        """The snapshot at exactly the endpoint, attached and referenced.  [I8, I9]"""
        rid = self._request.rid
        keys = [self._request.keys[depth - 1]] if depth else []
        check(self.depth == depth, "lease is at its endpoint [I8]", rid=rid, depth=self.depth)
        check(
            [block.key for block in self.blocks] == keys, "snapshot at the endpoint [I8]", rid=rid
        )
        check_attached(self._pool, self.blocks)


class RecurrentSequence:
    """A working state, and one slot for each snapshot that is not published yet."""

    def __init__(
        self,
        pool: BlockPool,
        request: KnownRequest,
        working: Block,
        snapshots: dict[int, Block],
    ) -> None:
        self._pool = pool
        self._request = request
        self._working = working
        self._unpublished = snapshots
        self._states = StateSlots(
            pool.window,
            working.slot,
            tuple((point, block.slot) for point, block in snapshots.items()),
        )

    @property
    def blocks(self) -> list[Block]:
        """See `SequencePart`."""
        return [self._working, *self._unpublished.values()]

    def table(self) -> tuple[int, ...]:
        """See `SequencePart`."""
        return ()

    def states(self) -> StateSlots | None:
        """Return the slots as installed."""
        return self._states

    def publish(self, end: int, snapshots: Sequence[int]) -> int:
        """See `SequencePart`.

        The request never reads a snapshot slot, so it leaves the sequence at once: attached
        without a reference, or free if the key is there already.
        """
        root, attached = self._pool.tree.root, 0
        for point in snapshots:
            is_expected = point in self._request.snapshot_points and point <= end
            check(is_expected, "a snapshot at a point [I43]", rid=self._request.rid, point=point)
            block = self._unpublished.pop(point, None)
            if block is None:
                continue  # stored by another window only
            key = self._request.keys[point // self._request.block_tokens - 1]
            if key in root.children:
                mark("publish.snapshot_duplicate")
            else:
                self._pool.tree.attach(block, root, key)
                attached += 1
            self._pool.unpin([block])
        return attached

    def free(self) -> None:
        """See `SequencePart`."""
        self._pool.unpin(self.blocks)
        self._unpublished.clear()

    def check_invariants(self) -> None:
        """Every slot is private and on the device.  [I9]"""
        for block in self.blocks:
            is_private = block.parent is None and block.refs == 1 and not block.is_host
            check(is_private, "a state has one holder [I9]", number=block.number)
