"""Requests in every phase at once, and a rank that is stopped in the middle of a round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.integration.toy import Request, ToyWorker
from tests.integration.toy_processes import DEADLINE_S, poll_until, state_of
from tests.integration.toy_setup import STAGES
from tests.integration.toy_wire import Touch

# Where a rank-1 WAVE process stops itself, by the phase that the request is in then.
MOMENTS = {
    "announced": ("receive", "announce"),  # rank 0 has probed, rank 1 knows nothing
    "leased": ("receive", "LEASE"),  # rank 0 has leased and committed, rank 1 has not
    "committed": ("send", "COMMITTED"),  # both have, and nobody knows
    "admitted": ("receive", "gathered"),  # rank 0 has installed it, rank 1 has not
}


@dataclass
class Crowd:
    """A worker with requests in every phase, and rank 1's WAVE process stopped in mid-round."""

    held: Request
    running: Request
    installed: Request
    admitting: Request
    arriving: Request

    def all(self) -> list[Request]:
        return [self.held, self.running, self.installed, self.admitting, self.arriving]


def crowd_touch(moment: str, rid: int) -> Touch:
    """Return what the worker's spec needs for `gather_crowd` with `rid` in admission."""
    way, frame = MOMENTS[moment]
    return Touch(rank=1, way=way, frame=frame, action="stop", rid=rid)


async def gather_crowd(worker: ToyWorker, prompts: Iterator[tuple[int, ...]]) -> Crowd:
    """Bring requests into every phase at once; the gates "wave" of both stages are closed then.

    The fourth of the five requests must be the one that the spec's `crowd_touch` names.
    """
    held = worker.announce(next(prompts))
    await worker.until(lambda: held.is_complete, "the held request")
    await worker.gate(1, "wave", is_open=False)
    running = worker.announce(next(prompts))
    await worker.until_at_gate(1, "wave")
    await worker.gate(0, "wave", is_open=False)
    installs = [worker.stat("loop", rank, "wavepp_installs_total") for rank in range(STAGES)]
    installed = worker.announce(next(prompts))
    await worker.until(
        lambda: all(
            worker.stat("loop", rank, "wavepp_installs_total") > before
            for rank, before in enumerate(installs)
        ),
        "installed on both ranks",
    )
    admitting = worker.announce(next(prompts))
    wave1 = worker.pids()["wave1"]
    await poll_until(lambda: state_of(wave1) == "T", DEADLINE_S, "rank 1 stopped in a round")
    return Crowd(held, running, installed, admitting, worker.announce(next(prompts)))


async def open_gates(worker: ToyWorker) -> None:
    for rank in range(STAGES):
        await worker.gate(rank, "wave", is_open=True)
