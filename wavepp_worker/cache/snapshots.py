"""Where recurrent state is kept: pure arithmetic, the same on every rank.

A state belongs to one exact prefix, so a prompt can be resumed only at a point that was chosen
when it ran.  Points are every interval, and the deepest endpoint of all.  [A33]

    n = 3S + 7 tokens    |-----S-----|-----S-----|-----S--|B|..     S: interval, B: block
    points                           S          2S       3S  E_max(n)
"""

from __future__ import annotations

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import endpoint_max


def snapshot_points(prompt_tokens: int, block_tokens: int, interval_tokens: int) -> tuple[int, ...]:
    """Return the snapshot points of a prompt, in tokens, rising; the last is E_max(n).

    Args:
        prompt_tokens: n, at least 1.
        block_tokens: B.
        interval_tokens: I_snap, a multiple of B.
    """
    check(
        interval_tokens > 0 and interval_tokens % block_tokens == 0,
        "the snapshot interval is whole blocks",
        interval_tokens=interval_tokens,
        block_tokens=block_tokens,
    )
    last = endpoint_max(prompt_tokens, block_tokens)
    if last == 0:
        return ()
    return (*range(interval_tokens, last, interval_tokens), last)


def granted_snapshots(wanted: int, spare: int, floor: int) -> int:
    """Return how many of `wanted` snapshots a pool stores.  [A47]

    Args:
        wanted: snapshot points that the run passes.
        spare: slots available beside the working state.
        floor: slots that stay available.
    """
    return min(wanted, max(0, spare - floor))
