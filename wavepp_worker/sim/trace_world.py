"""A world whose requests come from a recorded trace: large caches, equal ranks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.sim.knobs import BLOCK_TOKENS, Knobs, SimOptions, draw_knobs
from wavepp_worker.sim.workload import SimPrompt

SLOTS_MIN = 1024
PROMPTS_MIN = 8  # so many of the longest fit a cache
STATE_SLOTS, HOST_STATE_SLOTS = 64, 256
BATCH = 16
WAVE_BLOCKS = 64


def trace_knobs(seed: int, options: SimOptions, prompts: Sequence[SimPrompt]) -> Knobs:
    """Return a world that can serve these prompts; faults and links are drawn from the seed."""
    longest = max(prompt.prompt_tokens for prompt in prompts) // BLOCK_TOKENS + 1
    slots = max(SLOTS_MIN, PROMPTS_MIN * longest)
    dense = WindowSpec(slots=slots, host_slots=slots if options.has_host else 0)
    states = WindowSpec(
        kind="recurrent",
        slots=STATE_SLOTS,
        host_slots=HOST_STATE_SLOTS if options.has_host else 0,
    )
    return replace(
        draw_knobs(seed, options),
        windows=((dense, states) if options.is_hybrid else (dense,),) * options.ranks,
        batch=BATCH,
        headroom_tokens=WAVE_BLOCKS * BLOCK_TOKENS,
        floor_fraction=0.1,
        snapshot_interval_tokens=16 * BLOCK_TOKENS,
        wave_tokens_max=WAVE_BLOCKS * BLOCK_TOKENS,
        wave_tokens_min=WAVE_BLOCKS // 4 * BLOCK_TOKENS,
        queue_requests_max=len(prompts) + 1,
        hold_s=0.3,
    )
