"""Where a request stands on one rank, as far as admission is concerned.  [algorithms 3]

    ANNOUNCED ─▶ HINTED ─▶ LEASING ─▶ LEASED ─▶ COMMITTED ─▶ ADMITTED ─▶ DONE
                   ▲          │ ▲     │ ▲└trim┘   │ │                      ▲
                   │          │ └─────┼─┴─retry───┘ │      any before      │
                   └──────────┴─ RELEASING ◀────────┘ ───── ADMITTED ──────┘ (cancel)

LEASING lasts only while the sections of a LEASE run.  RELEASING means that an attempt failed on
this rank and waits for the leader's RELEASE.  After ADMITTED the LOOP process owns the request.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """One request on one rank."""

    ANNOUNCED = "announced"  # keys known, not all ranks have voted a hint
    HINTED = "hinted"  # candidate known; holds nothing
    LEASING = "leasing"
    LEASED = "leased"  # lease taken and escrow prepared
    COMMITTED = "committed"  # escrow fixed at the lease's endpoint
    RELEASING = "releasing"
    ADMITTED = "admitted"  # sequence made, Install sent
    DONE = "done"  # slots of this rank are free, or it never held any


ALLOWED: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.ANNOUNCED: frozenset({Phase.HINTED, Phase.DONE}),
    Phase.HINTED: frozenset({Phase.LEASING, Phase.DONE}),
    Phase.LEASING: frozenset({Phase.LEASED, Phase.RELEASING}),
    Phase.LEASED: frozenset(
        {
            Phase.LEASED,
            Phase.LEASING,
            Phase.COMMITTED,
            Phase.RELEASING,
            Phase.HINTED,
            Phase.DONE,
        }
    ),
    Phase.COMMITTED: frozenset({Phase.LEASING, Phase.ADMITTED, Phase.HINTED, Phase.DONE}),
    Phase.RELEASING: frozenset({Phase.HINTED, Phase.DONE}),
    Phase.ADMITTED: frozenset({Phase.DONE}),
    Phase.DONE: frozenset(),
}

OPEN_ATTEMPT: Final = frozenset({Phase.LEASED, Phase.COMMITTED, Phase.RELEASING})
