"""Coverage marks: rare branches by name, so that a test campaign can show that it reached them.

`mark("escrow.victim_moved")` in a branch counts it.  A simulation that ran thousands of worlds and
left a name at zero has a gap, or the branch is dead.  Counting is one dictionary update; the
branches are rare, so it stays on in production.
"""

from __future__ import annotations

from typing import Final

CACHE_MARKS: Final[tuple[str, ...]] = (
    "escrow.commit_failed",
    "escrow.destination_missing",
    "escrow.prepare_failed",
    "escrow.snapshots_given_up",
    "escrow.snapshots_short",
    "escrow.surplus_returned",
    "lease.claim_cut",
    "lease.destination_claimed",
    "lease.destination_lost",
    "lease.snapshot_refused",
    "lease.snapshot_swapped",
    "lease.trim_falls_further",
    "lease.victim_claimed",
    "pool.drop_detaches_held",
    "pool.host_block_dropped",
    "pool.host_drop_frees_device",
    "pool.host_full",
    "publish.below_host_block",
    "publish.block_written_over",
    "publish.duplicate",
    "publish.snapshot_duplicate",
    "sequence.onboards",
    "sequence.onboards_state",
    "sequence.victim_survived",
)
ADMISSION_MARKS: Final[tuple[str, ...]] = (
    "admission.admit",
    "admission.announced_again",
    "admission.announces_full",
    "admission.cancel_admitted",
    "admission.cancel_arrival",
    "admission.cancel_attempt",
    "admission.cancel_crossed",
    "admission.cancel_repeated",
    "admission.cancel_waiting",
    "admission.candidate_rises",
    "admission.close",
    "admission.commit",
    "admission.commit_short",
    "admission.gone_with_installed",
    "admission.implicit_release",
    "admission.last_resort",
    "admission.lease_below",
    "admission.news_capacity",
    "admission.news_companion",
    "admission.news_quiet",
    "admission.oversized",
    "admission.passed_unsettled",
    "admission.prepare_short",
    "admission.record_old",
    "admission.record_repeated",
    "admission.record_unknown",
    "admission.refine",
    "admission.refine_again",
    "admission.refused_by_solo",
    "admission.refused_count",
    "admission.refused_not_alone",
    "admission.refused_queue_full",
    "admission.refused_second_oversized",
    "admission.refused_tokens",
    "admission.refused_unsettled",
    "admission.rejected_size",
    "admission.release",
    "admission.repeat",
    "admission.retry",
    "admission.solo",
    "admission.stale_broadcast",
    "admission.stale_gathered",
    "admission.stale_vote",
    "admission.trim",
    "admission.trim_below",
)
EXECUTOR_MARKS: Final[tuple[str, ...]] = (
    "executor.answer_dropped",
    "executor.install_awaited",
    "executor.release_before_install",
    "executor.release_ends_hold",
    "executor.release_under_way",
)
MARKS: Final = CACHE_MARKS + ADMISSION_MARKS + EXECUTOR_MARKS

hits: Final[dict[str, int]] = dict.fromkeys(MARKS, 0)
"""Times each mark was reached in this process."""


def mark(name: str) -> None:
    """Count one visit of a rare branch; `name` must be declared.

    Raises:
        KeyError: the name is not declared.
    """
    hits[name] += 1
