"""What must be true of a worker when nothing runs in it."""

from __future__ import annotations

from tests.integration.toy import ToyWorker
from tests.integration.toy_setup import STAGES

COPY_KINDS = ("offload", "onboard", "load_state", "onboard_state", "zero_state")


async def check_books(worker: ToyWorker) -> None:
    """Check a worker at its end: same schedule everywhere, every copy once, nothing held."""
    await worker.until_quiet()
    pictures = [await worker.look(rank) for rank in range(STAGES)]
    assert pictures[0].executed == pictures[1].executed
    for rank in range(STAGES):
        await worker.until(
            lambda: promised(worker, rank) == performed(worker, rank),  # noqa: B023 (awaited here)
            f"every copy of every Install, once, on rank {rank}",
        )


def promised(worker: ToyWorker, rank: int) -> tuple[float, float, float]:
    """Return what WAVE asked of LOOP in its books: moves to the host, to the device, states."""
    offloads, onboards = (
        worker.stat("wave", rank, f"wavepp_{name}_blocks_total")
        for name in ("offloaded", "onboarded")
    )
    states = worker.stat("wave", rank, "wavepp_admitted_total")
    return offloads, onboards, states if worker.has_states(rank) else 0.0


def performed(worker: ToyWorker, rank: int) -> tuple[float, float, float]:
    """Return the copies that LOOP performed, in the same order."""
    copies = {kind: worker.stat("loop", rank, f"toy_{kind}_copies") for kind in COPY_KINDS}
    onboards = copies["onboard"] + copies["onboard_state"]
    states = copies["zero_state"] + copies["load_state"] + copies["onboard_state"]
    return copies["offload"], onboards, states
