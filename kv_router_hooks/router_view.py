"""What the router is told: every rank's `KvDelta` in, stored and removed blocks with tokens out.

Pure.  Joins `Quorum` (who holds a block) and `TokenCatalog` (what is in it).  Memory is bounded
by the blocks that ranks hold plus those of live requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from kv_router_hooks.catalog import TokenCatalog
from kv_router_hooks.quorum import Change, Quorum, Stored
from wavepp_worker.base.errors import PeerError


class BlockStored(Struct, frozen=True):
    """Every stage can resume after this block."""

    key: bytes
    parent: bytes | None
    tokens: bytes  # u32 little-endian
    salt: str


class BlockRemoved(Struct, frozen=True):
    """Some stage cannot resume after this block any more."""

    key: bytes


RouterEvent = BlockStored | BlockRemoved


class RouterView:
    """The router's view of one worker.

    Args:
        window_counts: windows of each rank's cache; index = rank.
        block_tokens: B.
    """

    def __init__(self, window_counts: Sequence[int], block_tokens: int) -> None:
        self._quorum = Quorum(window_counts)
        self._catalog = TokenCatalog(block_tokens)
        self._sequences = [0] * len(window_counts)

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

    def _drop_unused(self, key: bytes) -> None:
        if self._catalog.is_loose(key) and not self._quorum.is_held(key):
            self._quorum.forget(key)
            self._catalog.drop(key)
