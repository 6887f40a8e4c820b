"""One window's slots under any order of calls: pins, promises, evictions and moves between tiers.

The model knows who holds and who owns each block, when it was last used, and where the copies put
every key.  It decides by itself which block must go next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId, SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.sim.machines_choice import Choose
from wavepp_worker.sim.machines_slots import DEVICE, HOST
from wavepp_worker.wire.mailbox import Copy

PoolFactory = Callable[[int, int, int, HintIndex], BlockPool]
WINDOW = 0


@dataclass
class PoolDriver:
    """A pool under test beside its model; every choice comes from `choose`."""

    make_pool: PoolFactory
    slots: int
    host_slots: int
    is_flat: bool  # a sliding or recurrent window: all blocks are children of the root
    holds: list[list[Block]] = field(default_factory=list)  # root first, one reference each
    owned: dict[Block, RequestId] = field(default_factory=dict)
    at: dict[SequenceHash, tuple[str, int]] = field(default_factory=dict)
    used: dict[Block, int] = field(default_factory=dict)  # turn of the last use
    turn: int = 0

    def __post_init__(self) -> None:
        self.index = HintIndex(1)
        self.pool = self.make_pool(WINDOW, self.slots, self.host_slots, self.index)

    # ── calls ────────────────────────────────────────────────────────────────────────────────

    def take(self, choose: Choose) -> None:
        """A sequence takes a slot: an empty one, or that of the oldest block without children."""
        if self.pool.available_count <= 0:
            return
        has_free, victim = self.pool.device.free_count > 0, self._oldest()
        key = victim.key if victim is not None else None
        copies: list[Copy] = []
        block = self.pool.take(copies)
        check(not block.is_host and block.parent is None and block.refs == 1, "taken", at=block)
        self._follow(copies)
        if not has_free and key is not None:
            is_gone = self.at.get(key, (HOST, 0))[0] == HOST
            check(is_gone, "the oldest leaf makes room", victim=victim)
        if has_free:
            check(not copies, "nothing moves while slots are empty", copies=copies)
        self.holds.append([block])

    def publish(self, choose: Choose) -> None:
        """A private block becomes matchable, below any block that is."""
        private = [held[0] for held in self.holds if held[0].parent is None]
        if not private:
            return
        root = self.pool.tree.root
        parent = root if self.is_flat else choose([root, *self.pool.tree.attached()])
        self.turn += 1
        key = SequenceHash(self.turn.to_bytes(4, "big"))
        block = choose(private)
        self.pool.tree.attach(block, parent, key)
        self.at[key] = (DEVICE, block.slot)

    def pin(self, choose: Choose) -> None:
        """A lease pins a path that no escrow owns a block of."""
        block = self._any_attached(choose)
        path = self._path(block) if block is not None else []
        if path and not self.owned.keys() & set(path):
            self.pool.pin(path)
            self.holds.append(path)

    def unpin(self, choose: Choose) -> None:
        """A holder ends; a block is as young as its last use."""
        if not self.holds:
            return
        held = self.holds.pop(choose(range(len(self.holds))))
        is_use = choose((True, True, False)) or held[0].parent is None
        self.pool.unpin(held, is_use=is_use)
        for block in reversed(held):
            if block.refs == 0 and is_use:
                self.turn += 1
                self.used[block] = self.turn

    def reserve(self, choose: Choose) -> None:
        """An escrow takes the next slot, and a destination first if that slot holds content."""
        if self.pool.available_count <= 0:
            return
        owner = RequestId(choose((1, 2, 3)))
        has_free, victim = self.pool.device.free_count > 0, self._oldest()
        has_destination = self.pool.host.available_count > 0
        ((block, destination),) = self.pool.reserve(1, owner).items()
        check(has_free == (block.parent is None), "empty slots first", block=block)
        check(has_free or block is victim, "the oldest leaf is reserved", victim=victim)
        is_needed = not has_free and has_destination
        check((destination is not None) == is_needed, "destination [I20]", destination=destination)
        for got in (block, destination):
            if got is not None:
                self.owned[got] = owner

    def unreserve(self, choose: Choose) -> None:
        """A promise ends; its block keeps its age."""
        if self.owned:
            block = choose(sorted(self.owned, key=lambda owned: owned.number))
            del self.owned[block]
            self.pool.unreserve(block)

    def count(self, choose: Choose) -> None:
        """A promise by count is made or ended."""
        if self.pool.counted and choose((True, False)):
            self.pool.counted -= 1
        elif self.pool.available_count > 0:
            self.pool.counted += 1

    def onboard(self, choose: Choose) -> None:
        """A pinned host block moves to a slot taken for it."""
        pinned = [block for held in self.holds for block in held if block.is_host]
        if not pinned or self.pool.available_count <= 0:
            return
        block, copies = choose(pinned), []  # type: tuple[Block, list[Copy]]
        target = self.pool.take(copies)
        self.pool.onboard(block, target, copies)
        check(not block.is_host, "is on the device now", block=block)
        self._follow(copies)

    def evict(self, choose: Choose) -> None:
        """Unused content is dropped."""
        is_host, count = choose((False, True)), choose((1, 2, 5))
        tier = self.pool.host if is_host else self.pool.device
        before = tier.evictable_count
        went = self.pool.evict(count, is_host=is_host)
        check(went >= min(count, before), "evicts what there is", went=went)
        self._follow([])

    # ── the model ────────────────────────────────────────────────────────────────────────────

    def _any_attached(self, choose: Choose) -> Block | None:
        blocks = list(self.pool.tree.attached())
        return choose(blocks) if blocks else None

    def _path(self, block: Block) -> list[Block]:
        path = [block]
        while path[-1].parent is not None and path[-1].parent is not self.pool.tree.root:
            path.append(path[-1].parent)
        return path[::-1]

    def _unused(self) -> list[Block]:
        blocks = self.pool.tree.attached()
        return [b for b in blocks if not b.is_host and not b.refs and b not in self.owned]

    def _oldest(self) -> Block | None:
        """Return the unused device block without unused device children that was used first."""
        unused = set(self._unused())
        leaves = [b for b in unused if not unused.intersection(b.children.values())]
        return min(leaves, key=lambda b: (self.used.get(b, 0), b.number), default=None)

    def _follow(self, copies: Sequence[Copy]) -> None:
        """Move keys as the copies say, then forget those that were dropped."""
        for copy in copies:
            source, target = (DEVICE, HOST) if copy.kind == "offload" else (HOST, DEVICE)
            moved = [key for key, place in self.at.items() if place == (source, copy.source)]
            check(len(moved) == 1, "copies what is cached", copy=copy, moved=moved)
            self.at[moved[0]] = (target, copy.target)
        present = {block.key for block in self.pool.tree.attached()}
        for key in self.at.keys() - present:
            del self.at[key]

    def compare(self) -> None:
        """Compare conditions, places, ages and the index.  [I1, I9, I15, I16]"""
        pool = self.pool
        refs = Counter(block.number for held in self.holds for block in held)
        owners = {block.number: owner for block, owner in self.owned.items()}
        pool.check_invariants(refs, owners)
        blocks = {block for held in self.holds for block in held} | self.owned.keys()
        on_device = sum(not block.is_host for block in blocks)
        available = self.slots - on_device - pool.counted
        check(pool.available_count == available >= 0, "available [I16]", available=available)
        on_host = len(blocks) - on_device
        check(pool.host.available_count == self.host_slots - on_host, "host [I16]")
        places = {
            block.key: (HOST if block.is_host else DEVICE, int(block.slot))
            for block in pool.tree.attached()
        }
        check(places == self.at, "keys are where the copies put them", places=places, at=self.at)
        check(self.index.windows[WINDOW] == dict.fromkeys(self.at, 1), "index [I1]")
