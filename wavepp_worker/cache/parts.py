"""What each kind of window brings: the protocol behind leases, escrows and sequences.

    Window        rules of one window on its pool
      seek     -> LeasePart       what it pins for one attempt        (spanned by `lease`)
      promise  -> Promise         what it reserves for one attempt    (spanned by `escrow`)
      install  -> SequencePart    what an admitted request holds      (spanned by `sequence`)

`dense`, `sliding` and `recurrent` implement it; nothing else asks for a window's kind.  Endpoints
are in tokens, depths in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from wavepp_worker.base.types import SequenceHash
from wavepp_worker.cache.block import Block
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.wire.mailbox import Copy, StateSlots

Vacate = Callable[[int, Block], bool]
"""(window, pinned block that an escrow owns) -> whether the promise found another slot."""


class LeasePart(Protocol):
    """The blocks of one window that a lease pins."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Pinned once each, root first."""
        ...

    @property
    def depth(self) -> int:
        """Endpoint that `blocks` serve."""
        ...

    def reach(self, limit: int) -> int:
        """Return the deepest endpoint up to `limit` that the tree can resume now."""
        ...

    def hold(self, depth: int, vacate: Vacate) -> int:
        """Pin what an endpoint at `depth`, a result of `reach`, needs beside what is pinned.

        Returns:
            `depth`; or the deepest endpoint that may be tried instead, if a block of this one
            backs a promise that has no other place to go.
        """
        ...

    def settle(self, *, is_use: bool) -> None:
        """Give back what the last `hold` did not ask for."""
        ...

    def release(self) -> None:
        """Give everything back, leaf first."""
        ...

    def surrender(self) -> list[Block]:
        """Hand the blocks over to a sequence, with their references."""
        ...

    def check_invariants(self, depth: int) -> None:
        """Compare with the tree: everything that `depth` needs, and nothing else.  [I8, I9]"""
        ...


class Promise(Protocol):
    """The device slots of one window that an escrow reserves."""

    @property
    def count(self) -> int:
        """Slots promised."""
        ...

    def missing(self, part: LeasePart, endpoint: int, floor: int) -> int:
        """Return how many slots are missing to promise the demand at `endpoint` above a floor."""
        ...

    def fill(self, part: LeasePart, endpoint: int) -> None:
        """Promise exactly the demand at `endpoint`; `missing` said that nothing is missing."""
        ...

    def vacate(self, block: Block) -> bool:
        """Move the promise away from `block`, which a claimer has pinned.  [algorithms 7.6]"""
        ...

    def exchange(self, copies: list[Copy]) -> Iterator[Block]:
        """Yield one taken slot for each that is promised, giving the promised one back first."""
        ...

    def release(self) -> None:
        """Give back whatever is still promised."""
        ...

    def owned(self) -> Iterator[Block]:
        """Yield every block, slot or host destination, that this promise owns."""
        ...

    def check_invariants(self, part: LeasePart, endpoint: int, *, is_committed: bool) -> None:
        """Compare with the demand.  [I17]"""
        ...


class SequencePart(Protocol):
    """The blocks of one window that an admitted request holds."""

    @property
    def blocks(self) -> Sequence[Block]:
        """Referenced once each by the sequence."""
        ...

    def table(self) -> tuple[int, ...]:
        """Return the block table as in `Install`."""
        ...

    def states(self) -> StateSlots | None:
        """Return the recurrent slots as in `Install`; None: not a recurrent window."""
        ...

    def publish(self, end: int, snapshots: Sequence[int]) -> int:
        """Attach what is complete before token `end`; return how many blocks were attached."""
        ...

    def free(self) -> None:
        """Give everything back, leaf first; private blocks become free."""
        ...

    def check_invariants(self) -> None:
        """Compare with the tree.  [I9, I23]"""
        ...


class Window(Protocol):
    """The rules of one window."""

    @property
    def pool(self) -> BlockPool:
        """The window's slots and tree."""
        ...

    @property
    def floor(self) -> int:
        """Slots that stay available after every prepare and commit."""
        ...

    @property
    def is_dense(self) -> bool:
        """Whether every endpoint below one that can be resumed can be resumed too."""
        ...

    @property
    def published_metric(self) -> str:
        """Counter of what the window's sequences attach."""
        ...

    def hint(
        self, present: Container[SequenceHash], keys: Sequence[SequenceHash], limit: int
    ) -> tuple[int, int]:
        """Return (deepest endpoint up to `limit` by the index, lookups made)."""
        ...

    def seek(self, request: KnownRequest) -> LeasePart:
        """Begin a lease; nothing is pinned yet."""
        ...

    def promise(self, request: KnownRequest) -> Promise:
        """Begin an escrow; nothing is reserved yet."""
        ...

    def install(
        self, request: KnownRequest, part: LeasePart, promise: Promise, copies: list[Copy]
    ) -> SequencePart:
        """Turn both into blocks that the request holds; references pass over.  [algorithms 10]"""
        ...
