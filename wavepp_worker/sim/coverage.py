"""Marks that a kind of campaign cannot reach, each with its reason."""

from __future__ import annotations

from wavepp_worker.base.marks import MARKS
from wavepp_worker.sim.knobs import SimOptions

NEVER_SENT = "a leader never sends such a record; tests/unit/admission does"
ONE_FRONT_DOOR = "the front door is one FIFO without repeats; tests/unit/admission repeats"
ONLY_SPARSE = "needs a window that cannot resume at every block"
ONLY_HOST = "needs a host tier"
ONLY_FAULT = "needs the fault {}"
ONE_RANK = "needs ranks that can differ"
ONE_AT_A_TIME = "needs two open attempts"
TWO_WAYS = "needs a follower, which hears from its own WAVE and from LOOP0"

SPARSE = {
    "admission.passed_unsettled",
    "admission.refine",
    "admission.refine_again",
    "admission.refused_unsettled",
    "admission.trim_below",
    "escrow.snapshots_given_up",
    "escrow.snapshots_short",
    "lease.snapshot_refused",
    "lease.snapshot_swapped",
    "lease.trim_falls_further",
    "publish.block_written_over",
    "publish.snapshot_duplicate",
    "sequence.onboards_state",
}
HOST = {
    "escrow.destination_missing",
    "escrow.surplus_returned",
    "lease.destination_claimed",
    "lease.destination_lost",
    "pool.host_block_dropped",
    "pool.host_drop_frees_device",
    "pool.host_full",
    "publish.below_host_block",
    "sequence.onboards",
    "sequence.onboards_state",
}
CROSSING = ("executor.install_awaited", "executor.release_before_install")
CONTESTED = {
    "admission.announces_full",
    "admission.news_companion",
    "admission.refused_by_solo",
    "admission.refused_count",
    "admission.refused_not_alone",
    "admission.refused_second_oversized",
    "escrow.snapshots_given_up",
    "escrow.surplus_returned",
    "lease.claim_cut",
    "lease.destination_claimed",
    "lease.destination_lost",
    "lease.snapshot_refused",
    "lease.snapshot_swapped",
}
OF_FAULT = {
    "cross_plane": {"executor.release_before_install"},
    "delay": {"executor.release_before_install"},
    "duplicate": {
        "admission.cancel_repeated",
        "admission.record_repeated",
        "admission.repeat",
        "admission.stale_broadcast",
        "admission.stale_gathered",
        "admission.stale_vote",
        "verdict repeat",
    },
    "cancel": {name for name in MARKS if name.startswith(("admission.cancel", "executor.release"))}
    | {"executor.answer_dropped", "verdict cancel", "verdict drop"},
}


def exempt(options: SimOptions) -> dict[str, str]:
    """Return mark or verdict -> why worlds of these options never reach it."""
    excused = dict.fromkeys(("admission.record_old", "admission.record_unknown"), NEVER_SENT)
    excused["admission.announced_again"] = ONE_FRONT_DOOR
    if options.mode != "leases":
        excused |= dict.fromkeys(CONTESTED, ONE_AT_A_TIME)
    if not options.is_hybrid:
        excused |= dict.fromkeys(SPARSE, ONLY_SPARSE)
    if not options.has_host:
        excused |= dict.fromkeys(HOST, ONLY_HOST)
    for fault, names in OF_FAULT.items():
        if fault not in options.faults:
            excused |= dict.fromkeys(names, ONLY_FAULT.format(fault))
    if options.ranks == 1:
        alike = ("admission.retry", "admission.trim", "verdict retry", "verdict trim")
        excused |= dict.fromkeys(alike, ONE_RANK)
        excused |= dict.fromkeys(CROSSING, TWO_WAYS)
    return excused
