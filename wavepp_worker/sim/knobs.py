"""What a simulated world is like: drawn from its seed, within what the options allow.

Every fault has a strength of its own in each world, and may be absent there, so that a campaign
sees each of them alone and together with others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from wavepp_worker.admission.settings import AdmissionMode
from wavepp_worker.cache.window import WindowSpec

BLOCK_TOKENS: Final = 4
PROMPT_LINKS_S: Final = (0.000_1, 0.000_3)
CROWD_CHANCE: Final = 0.15

FAULTS: Final = {
    "delay": "links and devices take from nothing to far longer than a round",
    "cross_plane": "one plane is much slower than the others, so that messages cross",
    "duplicate": "rounds frames are repeated, also of an old epoch; votes on records get lost",
    "slow_rank": "one rank's processes and device are slow",
    "storm": "cached blocks are evicted at any moment, on device and host",
    "host_full": "the host tier has room for next to nothing",
    "cancel": "clients leave, at any phase; some cancels are sent twice or name nobody",
    "lost_peer": "a rank dies: the worker fails as a unit and starts a new epoch",
    "restart": "the worker starts a new epoch while requests run",
    "transfer_stall": "reads of finished caches outlive their holds",
    "decode_death": "decode workers never read what they were promised",
    "clock_skew": "the ranks' clocks differ, and run at different speeds",
    "flaky": "a rank is short of room without need",
}


class SimOptions(Struct, frozen=True, kw_only=True):
    """What a campaign asks for; the rest is drawn from each seed."""

    ranks: int = 4
    requests: int = 24
    is_hybrid: bool = False
    has_host: bool = True
    faults: tuple[str, ...] = tuple(FAULTS)
    mode: AdmissionMode = "leases"


class Knobs(Struct, frozen=True, kw_only=True):
    """One world.  Times in virtual seconds, lengths in tokens."""

    windows: tuple[tuple[WindowSpec, ...], ...]  # per rank
    batch: int
    mode: AdmissionMode
    headroom_tokens: int
    floor_fraction: float
    auto_commit: bool
    hint_refine: bool
    queue_requests_max: int
    snapshot_interval_tokens: int
    wave_tokens_max: int
    wave_tokens_min: int
    families: int
    room: int  # so many longest prompts fit the smallest dense pool
    spread_s: float  # arrivals are spread over so long
    hold_s: float
    delays_s: tuple[float, ...]
    slow_plane: str = ""
    slow_rank: int = -1
    repeat_chance: float = 0.0
    strip_chance: float = 0.0
    storm_chance: float = 0.0
    cancel_chance: float = 0.0
    stall_chance: float = 0.0
    death_chance: float = 0.0
    flaky_chance: float = 0.0
    skew_s: float = 0.0
    skew_rate: float = 0.0
    lost_rank_at: tuple[int, float] | None = None
    restart_at: float | None = None


PLANES: Final = ("rounds", "front", "install", "done", "header", "result", "device", "report")


def draw_knobs(seed: int, options: SimOptions) -> Knobs:
    """Return the world of a seed."""
    rng = random.Random(f"{seed}/knobs")

    def has(fault: str, chance: float = 0.5) -> bool:
        # Always drawn, so that taking one fault away leaves the others as they were.
        return rng.random() < chance and fault in options.faults

    wave_blocks = rng.choice([2, 4, 8])
    slow_plane = rng.choice(PLANES)
    slow_rank = rng.randrange(options.ranks)
    lost_rank = rng.randrange(options.ranks)
    delays = rng.choice([(0.000_1, 0.000_5, 0.001, 0.004), (0.000_1, 0.02), (0.001, 0.002, 0.05)])
    host_full = has("host_full", 0.3)
    room = rng.choice([1, 1, 2, 4])
    knobs = Knobs(
        windows=tuple(
            _rank_windows(
                rank,
                rng,
                options,
                host_max=1 if host_full else 16 * room,
                wave_blocks=wave_blocks,
                room=room,
            )
            for rank in range(options.ranks)
        ),
        batch=rng.choice([1, 2, 4, 6]),
        mode=options.mode,
        headroom_tokens=rng.choice([0, 2, 6, 12]) * BLOCK_TOKENS,
        floor_fraction=rng.choice([0.0, 0.1, 0.25]),
        auto_commit=rng.random() < 0.7,
        hint_refine=rng.random() < 0.2,
        queue_requests_max=rng.choice([1024, 1024, 1024, 10]),
        snapshot_interval_tokens=rng.choice([1, 2, 3, 5]) * BLOCK_TOKENS,
        wave_tokens_max=wave_blocks * BLOCK_TOKENS,
        wave_tokens_min=rng.choice([1, 2]) * BLOCK_TOKENS,
        families=rng.choice([1, 2, 4]),
        room=room,
        spread_s=rng.choice([0.0, 0.2, 2.0]),
        hold_s=rng.choice([0.05, 0.3]),
        delays_s=delays if has("delay", 0.7) else PROMPT_LINKS_S,
        slow_plane=slow_plane if has("cross_plane") else "",
        slow_rank=slow_rank if has("slow_rank", 0.3) else -1,
        repeat_chance=rng.choice([0.05, 0.2]) if has("duplicate") else 0.0,
        strip_chance=0.1 if has("duplicate", 0.3) else 0.0,
        storm_chance=rng.choice([0.02, 0.2]) if has("storm") else 0.0,
        cancel_chance=rng.choice([0.1, 0.4, 0.8]) if has("cancel") else 0.0,
        stall_chance=0.3 if has("transfer_stall", 0.3) else 0.0,
        death_chance=rng.choice([0.1, 0.5]) if has("decode_death", 0.3) else 0.0,
        flaky_chance=rng.choice([0.1, 0.4]) if has("flaky", 0.25) else 0.0,
        skew_s=1000.0 if has("clock_skew", 0.3) else 0.0,
        skew_rate=0.2 if has("clock_skew", 0.3) else 0.0,
        lost_rank_at=(lost_rank, rng.random() * 0.4) if has("lost_peer", 0.12) else None,
        restart_at=rng.random() * 0.4 if has("restart", 0.12) else None,
    )
    return _crowded(knobs, random.Random(f"{seed}/crowd"), options)


def _crowded(knobs: Knobs, rng: random.Random, options: SimOptions) -> Knobs:
    """Make some worlds meet what free draws hardly ever meet; most stay as they are.

    few texts     short prompts of a few texts, most of them on the host, many admitted at once in
                  two steps: one request onboards what another has counted as its own
    wide states   pools of states with a floor, all of it wanted, beside oversized requests
    """
    if rng.random() < CROWD_CHANCE:
        knobs = replace(
            knobs,
            families=3,
            room=3,
            auto_commit=False,
            hint_refine=False,
            batch=6,
            headroom_tokens=0,
            floor_fraction=0.0,
            spread_s=rng.choice([0.05, 0.3]),
            windows=_resized(
                knobs, "dense", lambda: (rng.randint(20, 32), 64 if options.has_host else 0)
            ),
        )
    if rng.random() < CROWD_CHANCE:
        knobs = replace(
            knobs,
            room=1,
            auto_commit=False,
            hint_refine=rng.random() < 0.6,
            batch=6,
            headroom_tokens=12 * BLOCK_TOKENS,
            snapshot_interval_tokens=BLOCK_TOKENS,
            windows=_resized(
                knobs, "recurrent", lambda: (rng.randint(10, 14), 4 if options.has_host else 0)
            ),
        )
    return knobs


def _resized(
    knobs: Knobs, kind: str, draw: Callable[[], tuple[int, int]]
) -> tuple[tuple[WindowSpec, ...], ...]:
    """Return the windows with other sizes (slots, host slots) for those of one kind."""

    def resize(spec: WindowSpec) -> WindowSpec:
        if not (spec.is_dense if kind == "dense" else spec.is_recurrent):
            return spec
        slots, host_slots = draw()
        return replace(spec, slots=slots, host_slots=host_slots)

    return tuple(tuple(map(resize, specs)) for specs in knobs.windows)


def _rank_windows(
    rank: int,
    rng: random.Random,
    options: SimOptions,
    *,
    host_max: int,
    wave_blocks: int,
    room: int,
) -> tuple[WindowSpec, ...]:
    """Return one rank's windows: dense only, or a mixture with states and sliding attention."""
    host = rng.choice([0, 1, 4, 12]) * room
    host_slots = min(host, host_max) if options.has_host else 0
    dense = WindowSpec(slots=rng.randint(14, 40) * room, host_slots=host_slots)
    states = WindowSpec(
        kind="recurrent", slots=rng.choice([2, 3, 6, 16]) * room, host_slots=host_slots // 2
    )
    span = rng.choice([1, 5, 9])
    sliding = WindowSpec(
        span_tokens=span,
        slots=rng.randint(16, 40) * room,
        host_slots=host_slots // 2,
        chunk_tokens=wave_blocks * BLOCK_TOKENS,
    )
    shape = rng.choice(["dense", "both", "states", "sliding", "all"])
    if not options.is_hybrid:
        return (dense,)
    if rank == 0 and shape == "states":
        shape = "both"  # so that every hybrid world has a dense and a recurrent window somewhere
    return {
        "dense": (dense,),
        "both": (dense, states),
        "states": (states,),
        "sliding": (dense, sliding),
        "all": (dense, states, sliding),
    }[shape]
