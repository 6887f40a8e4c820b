"""What a rank knows of a request before and besides any promise."""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import RequestId, SequenceHash, Tokens
from wavepp_worker.base.units import ceil_div, endpoint_max


class KnownRequest:
    """Length, keys and snapshot points of one prompt; holds no block."""

    __slots__ = (
        "attempt",
        "block_count",
        "block_tokens",
        "endpoint_max",
        "keys",
        "prompt_tokens",
        "rid",
        "snapshot_points",
    )

    def __init__(
        self,
        rid: RequestId,
        prompt_tokens: Tokens,
        keys: Sequence[SequenceHash],
        block_tokens: int,
        snapshot_points: Sequence[int] = (),
    ) -> None:
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.block_tokens = block_tokens
        self.keys = keys
        """One per full block."""
        self.block_count = ceil_div(prompt_tokens, block_tokens)
        """Blocks of the whole prompt, the partial last one included."""
        self.endpoint_max = endpoint_max(prompt_tokens, block_tokens)
        """Deepest endpoint, in tokens: the last prompt token is always computed."""
        self.snapshot_points = tuple(snapshot_points)
        """Tokens after which recurrent state is worth keeping, rising.  [A33]"""
        self.attempt = 0
        """Highest attempt that took a lease here; attempts only grow."""
        check(
            all(
                0 < point <= self.endpoint_max and point % block_tokens == 0
                for point in self.snapshot_points
            )
            and list(self.snapshot_points) == sorted(set(self.snapshot_points)),
            "snapshot points are rising block boundaries",
            rid=rid,
            points=self.snapshot_points,
        )

    def points_after(self, endpoint: int) -> tuple[int, ...]:
        """Return the snapshot points that a run from `endpoint` passes, rising."""
        return tuple(point for point in self.snapshot_points if point > endpoint)
