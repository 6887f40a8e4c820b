"""Dense windows: attention over the whole prompt, so a prefix is every block of it.

tokens   0 ........ endpoint .............. prompt_tokens
table    [ adopted  |  own, private until published    ]
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from functools import partial
from itertools import islice

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.parts import LeasePart, Promise, Vacate
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.probe import dense_prefix
from wavepp_worker.cache.promises import SlotPromise
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.wire.mailbox import Copy, StateSlots


class DenseWindow:
    """Every block of a prefix is needed, and is a child of the block before it."""

    is_dense = True
    published_metric = "wavepp_published_blocks_total"

    def __init__(self, pool: BlockPool, floor: int) -> None:
        self.pool = pool
        self.floor = floor

    def hint(
        self, present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
    ) -> tuple[int, int]:
        """See `Window`."""
        return dense_prefix(present, keys, limit)

    def seek(self, request: KnownRequest) -> LeasePart:
        """See `Window`."""
        return DenseLease(self.pool, request)

    def promise(self, request: KnownRequest) -> Promise:
        """See `Window`."""
        return SlotPromise(request.rid, self.pool, partial(suffix_blocks, request))

    def install(
        self, request: KnownRequest, part: LeasePart, promise: Promise, copies: list[Copy]
    ) -> DenseSequence:
        """See `Window`.  Onboarding first: the host slots that it frees serve later victims."""
        slots = promise.exchange(copies)
        onboard_leased(self.pool, part.blocks, slots, copies)
        blocks = part.surrender()
        adopted_count = len(blocks)
        blocks += islice(slots, request.block_count - adopted_count)
        check(len(blocks) == request.block_count, "promise covers the prompt [I23]")
        return DenseSequence(self.pool, request, blocks, adopted_count)


class DenseLease:
    """The leading blocks of a prompt, pinned."""

    def __init__(self, pool: BlockPool, request: KnownRequest) -> None:
        self._pool = pool
        self._request = request
        self._path: list[Block] | None = None  # found, not pinned
        self.depth = 0
        self.blocks: list[Block] = []

    def reach(self, limit: int) -> int:
        """See `LeasePart`.  The tree is walked once, as far as the first limit."""
        if self._path is None:
            self._path = self._pool.tree.walk(self._request.keys, limit)
        return min(limit, len(self._path))

    def hold(self, depth: int, vacate: Vacate) -> int:
        """See `LeasePart`.

        The whole path is pinned before any promise on it moves, so that no replacement can be
        another block of the same path.  What lies beyond a cut is given back by `settle`.
        """
        self.depth = depth
        if self._path and not self.blocks:
            self.blocks = self._path[:depth]
            self._pool.pin(self.blocks)
            for position, block in enumerate(self.blocks):
                if block.owner is not None and not vacate(self._pool.window, block):
                    self.depth = position
                    break
        return self.depth

    def settle(self, *, is_use: bool) -> None:
        """See `LeasePart`."""
        self._pool.unpin(self.blocks[self.depth :], is_use=is_use)
        del self.blocks[self.depth :]
        self._path = self.blocks

    def release(self) -> None:
        """See `LeasePart`."""
        self._pool.unpin(self.blocks)
        self.blocks.clear()

    def surrender(self) -> list[Block]:
        """See `LeasePart`."""
        blocks, self.blocks = self.blocks, []
        return blocks

    def check_invariants(self, depth: int) -> None:
        """A chain from the root along the request's own keys.  [I8, I9]"""
        rid = self._request.rid
        check(len(self.blocks) == depth, "lease covers its endpoint [I8]", rid=rid)
        check_chain(self._pool, self.blocks, self._request)


class DenseSequence:
    """One reference on every block of a prompt."""

    def __init__(
        self, pool: BlockPool, request: KnownRequest, blocks: list[Block], adopted_count: int
    ) -> None:
        self._pool = pool
        self._request = request
        self._adopted_count = adopted_count
        self.blocks = blocks

    def table(self) -> tuple[int, ...]:
        """See `SequencePart`."""
        return tuple([block.slot for block in self.blocks])

    def states(self) -> StateSlots | None:
        """See `SequencePart`."""
        return None

    def publish(self, end: int, snapshots: Sequence[int]) -> int:
        """See `SequencePart`.

        A key that is present already keeps its block; ours stays private until the sequence is
        freed, because later chunks and the transfer read it through the table [A53].  Blocks that
        were detached since, because an unreferenced ancestor was evicted, are attached again.
        """
        first, stop = self._adopted_count, end // self._request.block_tokens
        tree, table, keys = self._pool.tree, self.blocks, self._request.keys
        node = table[first - 1] if first else tree.root
        attached = 0
        for position in range(first, stop):
            present = node.children.get(keys[position])
            if present is None:
                if node.is_host:
                    mark("publish.below_host_block")
                present = table[position]
                tree.attach(present, node, keys[position])
                attached += 1
            node = present
        if stop > first and node is not table[stop - 1]:
            mark("publish.duplicate")
        return attached

    def free(self) -> None:
        """See `SequencePart`."""
        self._pool.unpin(self.blocks)
        self.blocks.clear()

    def check_invariants(self) -> None:
        """The table covers the prompt; adopted blocks attached, own ones attached or private."""
        request, table = self._request, self.blocks
        check(len(table) == request.block_count, "table covers the prompt [I23]", rid=request.rid)
        check_chain(self._pool, table[: self._adopted_count], request)
        check_table(table, self._adopted_count, request)


def suffix_blocks(request: KnownRequest, endpoint: int) -> int:
    """Return the new blocks that a run from `endpoint` writes.  [algorithms E8]"""
    return request.block_count - endpoint // request.block_tokens


def onboard_leased(
    pool: BlockPool, blocks: Sequence[Block], slots: Iterator[Block], copies: list[Copy]
) -> None:
    """Bring leased blocks that lie on the host into device slots, root first."""
    for block in [block for block in blocks if block.is_host]:
        target = next(slots, None)
        if target is None:
            raise InvariantError(f"promise covers onboarding [I22] number={block.number}")
        mark("sequence.onboards")
        pool.onboard(block, target, copies)


def check_chain(pool: BlockPool, path: Sequence[Block], request: KnownRequest) -> None:
    """Raise InvariantError unless `path` leads from the root along the keys, referenced.  [I9]"""
    node = pool.tree.root
    for block, key in zip(path, request.keys, strict=False):
        is_in_place = block.parent is node and block.key == key
        check(is_in_place, "pinned block moved [I9]", rid=request.rid)
        check(block.refs > 0, "pinned block is unreferenced [I9]", rid=request.rid)
        node = block


def check_table(table: Sequence[Block], first: int, request: KnownRequest, start: int = 0) -> None:
    """Raise InvariantError unless a sequence's own blocks may be where they are.  [I9]

    Args:
        table: blocks of positions `start`, `start` + 1, ...
        first: first position of `table` that is not adopted.
    """
    numbers = {block.number for block in table}
    check(len(numbers) == len(table), "slot used twice [I23]", rid=request.rid)
    check(not any(block.is_host for block in table), "reads a host slot [I46]", rid=request.rid)
    for position in range(first, len(table)):
        block = table[position]
        if block.parent is not None:
            is_right = block.key == request.keys[start + position]
            check(is_right, "published key [I9]", rid=request.rid)
        else:
            check(block.refs == 1, "a private block has one holder [I9]", number=block.number)
