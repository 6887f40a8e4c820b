"""Why a stage's device stood still between two waves.  Pure.

       wave n                                                       wave n+1
    ───forward───┤ send │ no header │ not installed │ launch │ receive ├───forward───
                        header here ┘      run here ┘  asked ┘

Copies that the wave has to wait for cut into this.  The parts of a gap are next to each other and
cover it.
"""

from __future__ import annotations

from msgspec import Struct

SEND = "send"  # the wave before is passed on
NO_HEADER = "no header"  # rank 0 has not scheduled the next wave
NOT_INSTALLED = "not installed"  # the wave is scheduled, this rank's WAVE has not admitted it
COPY = "copy"  # cache copies that come before the wave
LAUNCH = "launch"  # this process prepares the wave
RECEIVE = "receive"  # the stage before has not passed the wave on
CAUSES = (SEND, NO_HEADER, NOT_INSTALLED, COPY, LAUNCH, RECEIVE)


class WaveMarks(Struct, frozen=True, kw_only=True):
    """When a stage's device did what for one wave; seconds on the host's monotonic clock.

    Attributes:
        copying: from when to when copies kept the device from the wave, in order.
    """

    wave: int
    asked_at: float  # the device was free and asked for the activations
    received_at: float  # and had them
    began_at: float  # of the forward
    ended_at: float
    sent_at: float  # passed on, as far as it kept the device
    copying: tuple[tuple[float, float], ...] = ()


class CopyMarks(Struct, frozen=True, kw_only=True):
    """When the copies of one Install were performed, or enqueued."""

    began_at: float
    ended_at: float
    offloads: int
    onboards: int
    is_enqueued: bool = False  # only that; they run beside the waves


class GapPart(Struct, frozen=True):
    """A part of a gap and its cause."""

    cause: str
    began_at: float
    ended_at: float


def gap_parts(
    before: WaveMarks, after: WaveMarks, header_at: float, run_at: float
) -> list[GapPart]:
    """Return the parts of the gap between two waves in order; empty ones are left out.

    Args:
        header_at: when this rank had the header of the wave after the gap.
        run_at: when that wave was given to the device.
    """
    reasons = (
        (before.sent_at, SEND),
        (header_at, NO_HEADER),
        (run_at, NOT_INSTALLED),
        (after.asked_at, LAUNCH),
        (after.received_at, RECEIVE),
        (after.began_at, LAUNCH),
    )
    parts: list[GapPart] = []
    at = before.ended_at
    for until, cause in reasons:
        end = min(until, after.began_at)
        for copy_began_at, copy_ended_at in after.copying:
            if copy_ended_at <= at or copy_began_at >= end:
                continue
            _extend(parts, cause, at, max(at, copy_began_at))
            at = max(at, copy_began_at)
            _extend(parts, COPY, at, min(copy_ended_at, end))
            at = min(copy_ended_at, end)
        _extend(parts, cause, at, end)
        at = max(at, end)
    return parts


def _extend(parts: list[GapPart], cause: str, began_at: float, ended_at: float) -> None:
    """Add a part unless it is empty; join it to one of the same cause."""
    if ended_at <= began_at:
        return
    if parts and parts[-1].cause == cause:
        began_at = parts.pop().began_at
    parts.append(GapPart(cause, began_at, ended_at))
