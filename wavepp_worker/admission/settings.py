"""The numbers that an AdmissionMachine is built with.  [algorithms 1, 8, 9.5]"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, assert_never

from msgspec import Struct

from wavepp_worker.base.types import LEADER
from wavepp_worker.config.derive import Plan
from wavepp_worker.config.schema import Config

AdmissionMode = Literal["leases", "waves", "naive"]


class Spacing(StrEnum):
    """How soon one round follows another.  [algorithms 9.5]"""

    MIN = "min"  # something new came, which a round can take along
    ACTIVE = "active"  # an attempt, a cancellation or a candidate is under way
    IDLE = "idle"  # requests wait for room
    QUIET = "quiet"  # nothing waits: heartbeat


class AdmissionSettings(Struct, frozen=True, kw_only=True):
    """One rank's place in the worker, and the limits that all ranks share."""

    rank: int
    stages: int  # P
    epoch: int
    block_tokens: int  # B
    snapshot_interval_tokens: int  # I_snap, a multiple of B; idle where no rank keeps states
    headroom_tokens: int  # kappa * 2 * P * M
    floor_fraction: float
    floor_headroom_blocks: int
    batch_requests_max: int = 16  # K
    queue_requests_max: int = 1024
    round_min_s: float = 0.000_2
    round_active_s: float = 0.000_5
    round_idle_s: float = 0.005
    round_quiet_s: float = 0.05
    mode: AdmissionMode = "leases"
    auto_commit: bool = True
    hint_refine: bool = False
    is_strict: bool = True
    """A failed last resort is an InvariantError; otherwise it fails that request only.  [A52]"""

    def spacing_s(self, spacing: Spacing) -> float:
        """Return the time from the start of a round to the start of the next one."""
        match spacing:
            case Spacing.MIN:
                return self.round_min_s
            case Spacing.ACTIVE:
                return self.round_active_s
            case Spacing.IDLE:
                return self.round_idle_s
            case Spacing.QUIET:
                return self.round_quiet_s
            case _:
                assert_never(spacing)

    @property
    def is_asked(self) -> bool:
        """Nothing is announced to the ranks before the executor asks for it: the naive rung."""
        return self.mode == "naive"

    @property
    def attempts_max(self) -> int:
        """Requests that may have an open attempt at once."""
        return self.batch_requests_max if self.mode == "leases" else 1

    @property
    def is_leader(self) -> bool:
        """Rank 0 leads the rounds."""
        return self.rank == LEADER

    @property
    def is_last(self) -> bool:
        """The last rank samples the first answer token."""
        return self.rank == self.stages - 1


def admission_settings(config: Config, plan: Plan, rank: int, epoch: int) -> AdmissionSettings:
    """Return the settings of one rank."""
    admission = config.admission
    return AdmissionSettings(
        rank=rank,
        stages=len(plan.stages),
        epoch=epoch,
        block_tokens=plan.block_tokens,
        snapshot_interval_tokens=plan.snapshot_interval_tokens,
        headroom_tokens=plan.headroom_tokens,
        floor_fraction=plan.floor_fraction,
        floor_headroom_blocks=plan.floor_headroom_blocks,
        batch_requests_max=admission.batch_requests_max,
        queue_requests_max=admission.queue_requests_max,
        round_min_s=admission.round_min_ms / 1e3,
        round_active_s=admission.round_active_ms / 1e3,
        round_idle_s=admission.round_idle_ms / 1e3,
        round_quiet_s=admission.round_quiet_ms / 1e3,
        mode=admission.mode,
        auto_commit=admission.auto_commit,
        hint_refine=admission.hint_refine,
        is_strict=config.debug.invariants != "off",
    )
