"""The slots of one window: who may use which, and what is given up when room is needed.

    device tier   what waves read and write; promises are about these slots
    host tier     what the device has no room for; may have no slots at all

Moving content between tiers exchanges the slots of two blocks, so a lease, the tree and the index
do not notice [I3].  No operation scans the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from wavepp_worker.base.errors import check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import BlockId, RequestId
from wavepp_worker.cache.block import Block, exchange_slots
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.tier import SlotTier
from wavepp_worker.cache.tree import PrefixTree
from wavepp_worker.wire.mailbox import Copy


class BlockPool:
    """Device and host slots of one window, with their tree."""

    def __init__(self, window: int, slots: int, host_slots: int, index: HintIndex) -> None:
        self.window = window
        self.tree = PrefixTree(window, index)
        numbers = count()
        self._blocks = [Block(next(numbers), BlockId(slot)) for slot in range(slots)]
        self._blocks += [
            Block(next(numbers), BlockId(slot), is_host=True) for slot in range(host_slots)
        ]
        self.device = SlotTier(self._blocks, is_host=False)
        self.host = SlotTier(self._blocks, is_host=True)
        self._tiers = (self.device, self.host)  # by `is_host`
        self._age = 0
        self.counted = 0
        """Device slots promised by count, without naming them.  [A12]"""
        self.evicted_total = 0
        """Blocks that left the device to make room, offloaded or dropped."""
        self.dropped_total = 0
        """Blocks that lost their place in the tree to make room, on either tier."""
        self.offloaded_total = 0
        self.onboarded_total = 0

    @property
    def available_count(self) -> int:
        """Device slots that a new promise may use."""
        return self.device.available_count - self.counted

    # ── references ───────────────────────────────────────────────────────────────────────────

    def pin(self, blocks: Sequence[Block]) -> None:
        """Reference attached blocks, given root first.

        An owned block keeps its owner; the caller moves that reservation in the same section.
        """
        device, host = self._tiers
        for block in blocks:
            if block.refs == 0:
                tier = host if block.is_host else device
                tier.referenced_count += 1
                if block.is_evictable:
                    tier.order.remove(block)
            block.refs += 1

    def unpin(self, blocks: Sequence[Block], *, is_use: bool = True) -> None:
        """Give back one reference on each block, given root first; released leaf first.

        Leaf first makes a leaf older than its parent.  With `is_use` false a block keeps the age
        it had, as if it had never been pinned.
        """
        device, host = self._tiers
        for block in reversed(blocks):
            check(block.refs > 0, "unpinned without a reference [I9]", number=block.number)
            block.refs -= 1
            if block.refs == 0:
                tier = host if block.is_host else device
                tier.referenced_count -= 1
                if is_use:
                    self._age += 1
                    block.age = self._age
                if block.owner is None:
                    tier.settle(block)

    # ── promises ─────────────────────────────────────────────────────────────────────────────

    def reserve(self, count: int, owner: RequestId) -> dict[Block, Block | None]:
        """Promise available device slots; return each with the host destination of its content.

        A victim stays attached and matchable.  Its destination is reserved first [I20]; without
        one the victim will be dropped instead of offloaded [A41].
        """
        check(count <= self.available_count, "reserves what is available [I16]", count=count)
        slots: dict[Block, Block | None] = dict.fromkeys(self.device.reserve_free(count, owner))
        for _ in range(count - len(slots)):
            slot, destination = self.reserve_one(owner)
            slots[slot] = destination
        return slots

    def reserve_one(self, owner: RequestId) -> tuple[Block, Block | None]:
        """Promise one slot, as `reserve` does."""
        destination = None
        if self.host.total_count and not self.device.free:
            destination = self.reserve_host(owner)
        return self.device.reserve(owner), destination

    def reserve_host(self, owner: RequestId) -> Block | None:
        """Promise a host slot as a destination; None if all are in use."""
        if not self.host.available_count:
            mark("escrow.destination_missing")
            return None
        return self.host.reserve(owner)

    def unreserve(self, block: Block) -> None:
        """End a promise; an unreferenced block falls back to its old age."""
        check(block.owner is not None, "unreserved without an owner [I15]", number=block.number)
        block.owner = None
        tier = self._tiers[block.is_host]
        tier.reserved_count -= 1
        if block.refs == 0:
            tier.settle(block)

    # ── content ──────────────────────────────────────────────────────────────────────────────

    def take(self, copies: list[Copy]) -> Block:
        """Return one available device slot, emptied, with one reference for its sequence.

        Content goes to the host while a slot there is unused; the copy is appended to `copies`.
        """
        free = self.device.free
        if not free:
            victim = self.device.order.oldest()
            if not self.host.total_count:
                self._drop(victim)
            else:
                self._make_room(victim, copies)
        block = free.pop()
        block.refs = 1
        self.device.referenced_count += 1
        return block

    def onboard(self, block: Block, target: Block, copies: list[Copy]) -> None:
        """Move a leased block from the host into `target`, a slot just taken for it."""
        check(block.is_host and block.refs > 0, "onboards a leased host block", at=block.number)
        copies.append(Copy("onboard", self.window, block.slot, target.slot))
        exchange_slots(block, target)
        # The one reference that `target` was taken with is that of the block now in its slot.
        self.host.referenced_count -= 1
        target.refs = 0
        self.host.settle(target)
        self.onboarded_total += 1

    def evict(self, count: int, *, is_host: bool = False) -> int:
        """Drop `count` evictable blocks of a tier in eviction order, or all; return how many went.

        An evictable block below a referenced one goes with its ancestor, so it may be more.
        """
        order = self._tiers[is_host].order
        before = order.count
        while order.count and before - order.count < count:
            self._drop(order.oldest())
        return before - order.count

    def _make_room(self, victim: Block, copies: list[Copy]) -> None:
        """Empty a device slot by moving `victim` to the host, or by dropping it.  [A41]"""
        host, device = self.host, self.device
        if not host.free and host.order.count:
            mark("pool.host_block_dropped")
            self._drop(host.order.oldest())
        if device.free:
            # Device blocks hung below the dropped host block, perhaps the victim itself.
            mark("pool.host_drop_frees_device")
        elif host.free:
            self._offload(victim, host.free.pop(), copies)
        else:
            mark("pool.host_full")
            self._drop(victim)

    def _offload(self, victim: Block, target: Block, copies: list[Copy]) -> None:
        self.device.order.remove(victim)
        copies.append(Copy("offload", self.window, victim.slot, target.slot))
        exchange_slots(victim, target)
        self.host.order.add(victim)
        self.device.free.append(target)
        self.evicted_total += 1
        self.offloaded_total += 1

    def _drop(self, block: Block) -> None:
        """Detach an evictable block and all below it, children first; free it last.  [A49]

        A descendant that is referenced stays with its holder, one that is reserved stays
        reserved; only slots with neither become free.  A block of a sliding or recurrent window
        has nothing below it.
        """
        nodes = self.tree.subtree(block) if block.children else [block]
        for node in reversed(nodes):
            if node.is_evictable:
                tier = self._tiers[node.is_host]
                tier.order.remove(node)
                tier.free.append(node)
            else:
                mark("pool.drop_detaches_held")
            self.tree.detach(node)
            self.evicted_total += not node.is_host
        self.dropped_total += len(nodes)

    # ── audit ────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, refs: Mapping[int, int], owners: Mapping[int, int]) -> None:
        """Compare both tiers with what leases, sequences and escrows claim.  [I9, I15, I16]

        Args:
            refs: block number -> references claimed by leases and sequences.
            owners: block number -> request whose escrow lists the block.
        """
        self.tree.check_invariants()
        for tier in self._tiers:
            tier.check_invariants(refs, owners)
        check(self.counted >= 0, "promised by count [I17]", window=self.window)
        check(self.available_count >= 0, "promises are covered [I17]", window=self.window)
        for block in self._blocks:
            number = block.number
            if block.parent is None:
                check(not block.children, "a detached block has children [I2]", number=number)
                check(block.refs <= 1, "a private block has one holder [I9]", number=number)
                is_host_private = block.is_host and block.refs > 0
                check(not is_host_private, "private on the host [I9]", number=number)
