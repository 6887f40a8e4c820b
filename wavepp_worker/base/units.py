"""Integer arithmetic on tokens and blocks."""

from __future__ import annotations

from wavepp_worker.base.errors import check


def ceil_div(value: int, unit: int) -> int:
    """Return ceil(value / unit) for value >= 0, unit > 0."""
    check(value >= 0 and unit > 0, "ceil_div needs value >= 0 and unit > 0", value=value, unit=unit)
    return -(-value // unit)


def align_down(value: int, unit: int) -> int:
    """Return the largest multiple of `unit` that is <= value."""
    check(
        value >= 0 and unit > 0, "align_down needs value >= 0 and unit > 0", value=value, unit=unit
    )
    return value - value % unit


def endpoint_max(prompt_tokens: int, block_tokens: int) -> int:
    """Return E_max(n) = B * floor((n - 1) / B): the deepest endpoint a prompt may reuse.

    The last prompt token is always computed, because its output is the first answer token.
    [A2, algorithms E4]
    """
    check(prompt_tokens >= 1, "a prompt has at least one token", prompt_tokens=prompt_tokens)
    return align_down(prompt_tokens - 1, block_tokens)
