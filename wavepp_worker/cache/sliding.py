"""Sliding windows: attention over the last `span_tokens`, so a prefix is its last few blocks.

tokens   0 ....... | needed | endpoint ...................... prompt_tokens
table    -1  -1 -1 | adopted| own 0  1  2 .. ring-1  0  1  2 ..           ]
                                                     `last lap` is kept

A chunk never reads further back than the span, so the slots of the suffix are used in turn.  Only
the last block that a slot ever holds may be published: any other may be overwritten by a wave that
runs before the publication is handled.  [A6]
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from itertools import islice

from wavepp_worker.base.errors import ConfigError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.dense import check_table, onboard_leased, suffix_blocks
from wavepp_worker.cache.parts import LeasePart, Promise, Vacate
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.probe import sliding_depth
from wavepp_worker.cache.promises import SlotPromise
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.wire.mailbox import Copy, StateSlots


class SlidingWindow:
    """Only the last blocks before an endpoint are needed; every block stands for itself.

    Raises:
        ConfigError: the pool is smaller than what one long prompt uses.
    """

    is_dense = False
    published_metric = "wavepp_published_blocks_total"

    def __init__(self, pool: BlockPool, floor: int, spec: WindowSpec, block_tokens: int) -> None:
        self.pool = pool
        self.floor = floor
        self._needed = spec.needed_blocks(block_tokens)
        self._ring = spec.ring_blocks(block_tokens)
        if spec.slots < self._ring:
            raise ConfigError(
                f"a sliding cache window of span_tokens={spec.span_tokens} and "
                f"chunk_tokens={spec.chunk_tokens} needs {self._ring} slots, got {spec.slots}"
            )

    def hint(
        self, present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
    ) -> tuple[int, int]:
        """See `Window`."""
        return sliding_depth(present, keys, limit, self._needed)

    def seek(self, request: KnownRequest) -> LeasePart:
        """See `Window`."""
        return SlidingLease(self.pool, request, self._needed)

    def promise(self, request: KnownRequest) -> Promise:
        """See `Window`."""
        return SlotPromise(request.rid, self.pool, partial(self._ring_slots, request))

    def _ring_slots(self, request: KnownRequest, endpoint: int) -> int:
        return min(self._ring, suffix_blocks(request, endpoint))

    def install(
        self, request: KnownRequest, part: LeasePart, promise: Promise, copies: list[Copy]
    ) -> SlidingSequence:
        """See `Window`."""
        depth = part.depth
        own_count = min(self._ring, request.block_count - depth)
        slots = promise.exchange(copies)
        onboard_leased(self.pool, part.blocks, slots, copies)
        own = list(islice(slots, own_count))
        check(len(own) == own_count, "promise covers the ring [I23]", rid=request.rid)
        return SlidingSequence(self.pool, request, part.surrender(), depth, own)


class SlidingLease:
    """The last blocks before an endpoint, pinned."""

    def __init__(self, pool: BlockPool, request: KnownRequest, needed: int) -> None:
        self._pool = pool
        self._request = request
        self._needed = needed
        self._spare: list[list[Block]] = []  # pinned for deeper endpoints
        self.depth = 0
        self.blocks: list[Block] = []

    def reach(self, limit: int) -> int:
        """See `LeasePart`."""
        present = self._pool.tree.root.children
        return sliding_depth(present, self._request.keys, limit, self._needed)[0]

    def hold(self, depth: int, vacate: Vacate) -> int:
        """See `LeasePart`: all needed blocks are pinned before any promise moves."""
        if depth == self.depth:
            return depth
        first = max(0, depth - self._needed)
        present = self._pool.tree.root.children
        found = [present[key] for key in self._request.keys[first:depth]]
        self._pool.pin(found)
        for position, block in enumerate(found, first):
            if block.owner is not None and not vacate(self._pool.window, block):
                self._pool.unpin(found, is_use=False)
                return position
        self._spare.append(self.blocks)
        self.blocks, self.depth = found, depth
        return depth

    def settle(self, *, is_use: bool) -> None:
        """See `LeasePart`."""
        for blocks in self._spare:
            self._pool.unpin(blocks, is_use=is_use)
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
        """Exactly the blocks that the endpoint needs, attached and referenced.  [I8, I9]"""
        rid, keys = self._request.rid, self._request.keys
        first = max(0, depth - self._needed)
        found = [block.key for block in self.blocks]
        check(self.depth == depth, "lease covers its endpoint [I8]", rid=rid, depth=self.depth)
        check(found == list(keys[first:depth]), "lease covers its span [I8]", rid=rid)
        check_attached(self._pool, self.blocks)


class SlidingSequence:
    """The adopted blocks before the endpoint, and the slots that the suffix uses in turn."""

    def __init__(
        self,
        pool: BlockPool,
        request: KnownRequest,
        adopted: list[Block],
        first: int,
        own: list[Block],
    ) -> None:
        self._pool = pool
        self._request = request
        self._adopted = adopted
        self._first = first  # position of own[0]
        # The last lap in the order of positions, so that a leaf is freed before its parent.
        self._lap = request.block_count - len(own)
        self._own = own
        self.blocks = adopted + [self._at(p) for p in range(self._lap, request.block_count)]

    def _at(self, position: int) -> Block:
        return self._own[(position - self._first) % len(self._own)]

    def table(self) -> tuple[int, ...]:
        """See `SequencePart`."""
        adopted = [block.slot for block in self._adopted]
        count = self._request.block_count
        return (
            *(-1 for _ in range(self._first - len(adopted))),
            *adopted,
            *(self._at(position).slot for position in range(self._first, count)),
        )

    def states(self) -> StateSlots | None:
        """See `SequencePart`."""
        return None

    def publish(self, end: int, snapshots: Sequence[int]) -> int:
        """See `SequencePart`: the last lap only; a key that is present keeps its block [A53]."""
        root, keys = self._pool.tree.root, self._request.keys
        stop = end // self._request.block_tokens
        if self._first < min(self._lap, stop):
            mark("publish.block_written_over")
        attached = 0
        for position in range(self._lap, stop):
            key, block = keys[position], self._at(position)
            present = root.children.get(key)
            if present is None:
                self._pool.tree.attach(block, root, key)
                attached += 1
            elif present is not block:
                mark("publish.duplicate")
        return attached

    def free(self) -> None:
        """See `SequencePart`."""
        self._pool.unpin(self.blocks)
        self.blocks = []

    def check_invariants(self) -> None:
        """Adopted blocks are attached; own ones attached under the right key, or private."""
        check_attached(self._pool, self._adopted)
        start = self._lap - len(self._adopted)
        check_table(self.blocks, len(self._adopted), self._request, start)


def check_attached(pool: BlockPool, blocks: Sequence[Block]) -> None:
    """Raise InvariantError unless every block is a referenced child of the root.  [I9]"""
    for block in blocks:
        is_attached = pool.tree.root.children.get(block.key) is block
        check(is_attached, "pinned block moved [I9]", number=block.number)
        check(block.refs > 0, "pinned block is unreferenced [I9]", number=block.number)
