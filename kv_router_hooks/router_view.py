"""What the router is told: every rank's `KvDelta` in, stored and removed blocks with tokens out.

Pure.  Joins `Quorum` (who can resume a block) and `TokenCatalog` (what is in it).  Memory is
bounded by the blocks that ranks hold, those before them on their chains, and those of live
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from kv_router_hooks.catalog import TokenCatalog
from kv_router_hooks.quorum import Change, Quorum, Stored
from kv_router_hooks.window_rule import WindowRule
from wavepp_worker.base.errors import PeerError


class BlockStored(Struct, frozen=True):
    """Every stage can resume a prefix that holds this block."""

    key: bytes
    parent: bytes | None
    tokens: bytes  # u32 little-endian
    salt: str


class BlockRemoved(Struct, frozen=True):
    """Some stage cannot resume it any more."""

    key: bytes


RouterEvent = BlockStored | BlockRemoved


class RouterView:
    """The router's view of one worker.

    Args:
        windows: the rules of each rank's windows; index = rank, then window.
        block_tokens: B.
    """

    def __init__(self, windows: Sequence[Sequence[WindowRule]], block_tokens: int) -> None:
        self._windows = tuple(map(tuple, windows))
        self._quorum = Quorum(windows)
        self._catalog = TokenCatalog(block_tokens)
        self._sequences = [0] * len(windows)

    def open(
        self, rid: int, keys: Sequence[bytes], tokens: bytes, salt: str = ""
    ) -> list[RouterEvent]:
        """A request is about to be announced.

        Args:
            keys: one per full block, first block first.
            tokens: the whole prompt, u32 little-endian.

        Returns:
            Blocks that all ranks reported before anybody here knew their tokens: rare, seldom any.
        """
        changes: list[Change] = []
        for key in self._catalog.pin(rid, keys, tokens, salt):
            changes += self._quorum.learn(key, self._catalog[key].parent)
        return self._events(changes)

    def close(self, rid: int) -> None:
        """The request holds nothing on any rank any more.  A no-op for an unknown one."""
        for key in self._catalog.unpin(rid):
            self._drop_unused(key)

    def apply(
        self, rank: int, sequence: int, changes: Iterable[tuple[bool, int, bytes]]
    ) -> list[RouterEvent]:
        """Take one delta of one rank.

        Args:
            sequence: 1, 2, ... per rank.
            changes: (is stored, window, key) in mutation order.

        Raises:
            PeerError: a delta was lost, so the view cannot be right any more.
        """
        expected = self._sequences[rank] + 1
        if sequence != expected:
            raise PeerError(f"rank {rank}: cache delta {sequence} arrived, expected {expected}")
        self._sequences[rank] = sequence
        events: list[RouterEvent] = []
        for is_stored, window, key in changes:
            if is_stored:
                events += self._events(self._quorum.store(rank, window, key))
            else:
                events += self._events(self._quorum.remove(rank, window, key))
                self._drop_unused(key)
        return events

    def snapshot(self) -> list[RouterEvent]:
        """Return everything published as events, parents first."""
        return self._events(self._quorum.published())

    def published_keys(self) -> list[bytes]:
        """Return the keys of all published blocks."""
        return [stored.key for stored in self._quorum.published()]

    def resumable_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt all ranks can resume now."""
        return self._quorum.resumable_blocks(keys)

    def resumable_keys(self, rank: int, held: Sequence[Iterable[bytes]]) -> set[bytes]:
        """Return the blocks that one rank alone can resume.  Cost: O(held blocks).

        Args:
            held: the keys that each of its windows holds, as the rank itself lists them.  With a
                sparse window, a block whose prompt is not known here is left out.
        """
        rules = self._windows[rank]
        if all(rule.is_dense for rule in rules):
            return set.intersection(*map(set, held))
        alone = Quorum([rules])
        for window, keys in enumerate(held):
            for key in keys:
                self._learn_chain(alone, key)
                alone.store(0, window, key)
        return {stored.key for stored in alone.published()}

    @property
    def published_count(self) -> int:
        """Blocks the router knows."""
        return len(self._quorum)

    @property
    def catalog_count(self) -> int:
        """Blocks whose tokens are kept."""
        return len(self._catalog)

    def _events(self, changes: Iterable[Change]) -> list[RouterEvent]:
        events: list[RouterEvent] = []
        for change in changes:
            if isinstance(change, Stored):
                block = self._catalog[change.key]
                events.append(BlockStored(change.key, change.parent, block.tokens, block.salt))
            else:
                events.append(BlockRemoved(change.key))
        return events

    def _learn_chain(self, quorum: Quorum, key: bytes) -> None:
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None and at in self._catalog and not quorum.is_learned(at):
            chain.append(at)
            at = self._catalog[at].parent
        for at in reversed(chain):
            quorum.learn(at, self._catalog[at].parent)

    def _drop_unused(self, key: bytes) -> None:
        """Forget a block that nobody needs, then those before it that it alone kept."""
        at: bytes | None = key
        while at is not None and self._catalog.is_loose(at) and not self._quorum.is_needed(at):
            self._quorum.forget(at)
            parent = self._catalog[at].parent
            self._catalog.drop(at)
            at = parent
