"""The prefix tree of one window: which blocks can be matched, and in what shape.

    dense    root ── H_0 ── H_1 ── H_2      an attached block's ancestors are all attached, so the
                        └── H_1' ── H_2'    depths present on any chain form a prefix  [I2]
    other    root ── H_4, H_5, H_5', ...    a block stands for itself: all are children of the root

Every attach and detach is told to the index at once.  The tree knows no references, no tiers and
no slots' conditions; `pool` decides what may be detached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import BlockId, SequenceHash
from wavepp_worker.cache.block import NO_KEY, Block
from wavepp_worker.cache.index import HintIndex


class PrefixTree:
    """Attached blocks of one window, each under the block before it."""

    def __init__(self, window: int, index: HintIndex) -> None:
        self._window = window
        self._index = index
        self.root = Block(-1, BlockId(-1))
        self.attached_count = 0

    def walk(self, keys: Sequence[SequenceHash], limit: int) -> list[Block]:
        """Return the longest matching prefix of a dense window, at most `limit` blocks, root first.

        Cost: one dictionary lookup per block.
        """
        blocks: list[Block] = []
        node = self.root
        for key in islice(keys, limit):
            child = node.children.get(key)
            if child is None:
                break
            blocks.append(child)
            node = child
        return blocks

    def attach(self, block: Block, parent: Block, key: SequenceHash) -> None:
        """Make `block` the child of `parent` under `key`."""
        check(block.parent is None and not block.children, "attached twice [I1]", of=block.number)
        check(key not in parent.children, "key is present [I1]", of=block.number)
        check(parent is self.root or parent.parent is not None, "parent is detached [I2]")
        block.key, block.parent = key, parent
        parent.children[key] = block
        self.attached_count += 1
        self._index.stored(self._window, key)

    def detach(self, block: Block) -> None:
        """Remove a block that has no children left; its key becomes unknown."""
        check(not block.children, "children are detached first [I2]", of=block.number)
        check(block.parent is not None, "not attached [I1]", of=block.number)
        if block.parent is not None:
            del block.parent.children[block.key]
        self._index.removed(self._window, block.key)
        block.key, block.parent = NO_KEY, None
        self.attached_count -= 1

    def subtree(self, block: Block) -> list[Block]:
        """Return `block` and its descendants, every parent before its children."""
        found = [block]
        for node in found:  # grows while it is read: breadth first, without recursion
            found.extend(node.children.values())
        return found

    def attached(self) -> Iterator[Block]:
        """Yield every attached block, parents before children."""
        return islice(self.subtree(self.root), 1, None)

    def check_invariants(self) -> None:
        """Re-derive links, prefix closure and the index from the tree's own shape.  [I1, I2]"""
        counts: dict[SequenceHash, int] = {}
        for block in self.attached():
            parent = block.parent
            check(parent is not None, "a reached block has a parent [I2]", of=block.number)
            if parent is not None:
                check(parent.children.get(block.key) is block, "parent link [I2]", of=block.number)
            counts[block.key] = counts.get(block.key, 0) + 1
        check(sum(counts.values()) == self.attached_count, "attached count [I1]")
        check(counts == self._index.windows[self._window], "index equals the tree [I1]")
