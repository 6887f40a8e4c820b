"""How much the leader promises at once: pure arithmetic on prompt lengths and last votes.

    count     len(pending) < K                                              [P-ADMISSION]
    tokens    need + unreported(s) + headroom <= available(s)   on every rank s
    need      prompt tokens - candidate endpoint

The local floors and escrows are the authority; this only limits how many attempts are opened.
[algorithms 8.2, 8.3]
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.floors import floor_blocks
from wavepp_worker.wire.rounds import RoundVote


def smallest_total(votes: Sequence[RoundVote]) -> int:
    """Return the tokens of the smallest dense pool; UNLIMITED_TOKENS if no rank has one.  [A50]

    Other pools never refuse a prompt for its length: they need a fixed number of slots.
    """
    return min(vote.total_tokens for vote in votes)


def can_ever_fit(settings: AdmissionSettings, prompt_tokens: int, total_tokens: int) -> bool:
    """Return whether the whole prompt fits the smallest rank's empty pool."""
    return ceil_div(prompt_tokens, settings.block_tokens) * settings.block_tokens <= total_tokens


def is_oversized(settings: AdmissionSettings, prompt_tokens: int, total_tokens: int) -> bool:
    """Return whether the whole footprint does not fit beside the margin.  [A17]

    The reused prefix counts: once leased it occupies slots like the rest.  The smallest pool
    decides, because a larger one leaves more beside its own floor.
    """
    total_blocks = total_tokens // settings.block_tokens
    floor = floor_blocks(total_blocks, settings.floor_fraction, settings.floor_headroom_blocks)
    headroom_blocks = ceil_div(settings.headroom_tokens, settings.block_tokens)
    prompt_blocks = ceil_div(prompt_tokens, settings.block_tokens)
    return prompt_blocks + max(headroom_blocks, floor) > total_blocks


def has_room(
    need_tokens: int,
    headroom_tokens: int,
    votes: Sequence[RoundVote],
    unreported_tokens: Sequence[int],
) -> bool:
    """Return whether every rank's last vote leaves room for `need_tokens` more.

    Args:
        unreported_tokens: per rank, what pending attempts need that this vote does not show yet.
    """
    return all(
        need_tokens + unreported + headroom_tokens <= vote.available_tokens
        for vote, unreported in zip(votes, unreported_tokens, strict=True)
    )
