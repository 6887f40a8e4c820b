"""Tokens and chain position of every block that a router may have to be told about.  Pure.

A rank's tree knows keys only; Dynamo's router wants the tokens.  The serving process has them
while a request lives, and keeps those of a block for as long as some rank holds it or a block
after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from wavepp_worker.base.errors import check

TOKEN_BYTES = 4


class CatalogBlock(Struct):
    """One full block of a prompt."""

    parent: bytes | None
    tokens: bytes  # u32 little-endian, exactly this block
    salt: str  # tenant salt of the prompt; part of the key
    pin_count: int = 0  # live requests whose prompt holds this block


class TokenCatalog:
    """Blocks by key.  An entry lives while it is pinned; after that its owner drops it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._blocks: dict[bytes, CatalogBlock] = {}
        self._prompts: dict[int, Sequence[bytes]] = {}  # rid → keys it pins

    def pin(self, rid: int, keys: Sequence[bytes], tokens: bytes, salt: str) -> list[bytes]:
        """Keep the blocks of a prompt until `unpin`; return the keys that were not known.

        Args:
            keys: one per full block, first block first.
            tokens: the whole prompt, u32 little-endian.
        """
        check(rid not in self._prompts, "request pinned twice", rid=rid)
        stride = self._block_bytes
        check(len(keys) == len(tokens) // stride, "one key per full block", keys=len(keys))
        self._prompts[rid] = keys
        fresh: list[bytes] = []
        parent: bytes | None = None
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                text = tokens[index * stride : (index + 1) * stride]
                block = self._blocks[key] = CatalogBlock(parent, text, salt)
                fresh.append(key)
            block.pin_count += 1
            parent = key
        return fresh

    def unpin(self, rid: int) -> list[bytes]:
        """End a request's hold on its blocks; return those that nobody pins, deepest first.

        A no-op for an unknown request.
        """
        loose: list[bytes] = []
        for key in reversed(self._prompts.pop(rid, ())):
            block = self._blocks[key]
            block.pin_count -= 1
            if not block.pin_count:
                loose.append(key)
        return loose

    def is_loose(self, key: bytes) -> bool:
        """Return whether `key` is known and no live request pins it."""
        block = self._blocks.get(key)
        return block is not None and not block.pin_count

    def drop(self, key: bytes) -> None:
        """Forget an unpinned block."""
        check(self.is_loose(key), "only unpinned blocks are dropped", key=key.hex())
        del self._blocks[key]

    def __getitem__(self, key: bytes) -> CatalogBlock:
        return self._blocks[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)
