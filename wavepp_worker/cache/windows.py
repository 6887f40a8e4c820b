"""A rank's windows: the one place that maps a kind to its rules, and what all windows add up to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wavepp_worker.base.errors import check
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.base.types import Tokens
from wavepp_worker.cache.dense import DenseWindow
from wavepp_worker.cache.floors import floor_blocks, floor_states
from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.parts import Window
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.probe import Search, hint_depth
from wavepp_worker.cache.recurrent import RecurrentWindow
from wavepp_worker.cache.request import KnownRequest
from wavepp_worker.cache.sliding import SlidingWindow
from wavepp_worker.cache.window import WindowSpec


class WindowSet:
    """All windows of a rank, empty at first, and what they answer together.

    Args:
        specs: one per window, in the order of the block tables.
        block_tokens: B.
        floor_fraction, floor_headroom_blocks: see `floors`.

    Raises:
        ConfigError: see `SlidingWindow`.
    """

    def __init__(
        self,
        specs: Sequence[WindowSpec],
        block_tokens: int,
        floor_fraction: float,
        floor_headroom_blocks: int,
    ) -> None:
        check(len(specs) > 0, "a rank has at least one window")
        self._block_tokens = block_tokens
        self.index = HintIndex(len(specs))
        self.rules: list[Window] = []
        for number, spec in enumerate(specs):
            pool = BlockPool(number, spec.slots, spec.host_slots, self.index)
            floor = floor_blocks(spec.slots, floor_fraction, floor_headroom_blocks)
            self.rules.append(_make_window(spec, pool, floor, block_tokens))
        self.pools = [rules.pool for rules in self.rules]
        self._dense_pools = [rules.pool for rules in self.rules if rules.is_dense]
        searches = list(zip(self.rules, self.index.windows, strict=True))
        self._dense: list[Search] = [
            partial(rules.hint, present) for rules, present in searches if rules.is_dense
        ]
        self._sparse: list[Search] = [
            partial(rules.hint, present) for rules, present in searches if not rules.is_dense
        ]
        self.is_sparse = bool(self._sparse)
        self.has_states = any(spec.is_recurrent for spec in specs)

    def hint(self, request: KnownRequest, cap: int | None) -> tuple[Tokens, bool, int]:
        """Return (endpoint by the index, whether a sparse window lowered it, lookups made)."""
        limit = request.endpoint_max if cap is None else min(request.endpoint_max, cap)
        depth, matched, probes = hint_depth(
            self._dense, self._sparse, request.keys, limit // self._block_tokens
        )
        return Tokens(depth * self._block_tokens), depth < matched, probes

    def available(self) -> tuple[int, ...]:
        """Return the device slots that a new promise may use, per window."""
        return tuple([pool.available_count for pool in self.pools])

    def available_tokens(self) -> int:
        """Return what the tightest dense window could promise now.  [algorithms 8.2]

        Other windows are small by design and judged by prepare alone.  [A50]
        """
        counts = (pool.available_count for pool in self._dense_pools)
        return min((self._block_tokens * count for count in counts), default=UNLIMITED_TOKENS)

    def total_tokens(self) -> int:
        """Return what the smallest dense window holds."""
        counts = (pool.device.total_count for pool in self._dense_pools)
        return min((self._block_tokens * count for count in counts), default=UNLIMITED_TOKENS)


def _make_window(spec: WindowSpec, pool: BlockPool, floor: int, block_tokens: int) -> Window:
    if spec.is_recurrent:
        return RecurrentWindow(pool, floor_states(spec.slots))
    if spec.is_sliding:
        return SlidingWindow(pool, floor, spec, block_tokens)
    return DenseWindow(pool, floor)
