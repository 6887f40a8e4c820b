"""What one window of a rank must hold for a prompt to be resumed after a block.  Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class WindowRule(Struct, frozen=True):
    """One window's rule.

    Attributes:
        needed_blocks: blocks in a row that must be held, the resumed-after block being the last
            of them; at the start of a prompt as many as there are.  None: all blocks of the
            prefix (a dense window).
    """

    needed_blocks: int | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the whole prefix must be held."""
        return self.needed_blocks is None


DENSE: Final = WindowRule()
RECURRENT: Final = WindowRule(1)
"""The snapshot at exactly this block; a sliding window needs `WindowRule(its needed blocks)`."""
