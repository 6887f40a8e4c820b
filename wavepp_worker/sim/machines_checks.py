"""What a cache's answers and counts must be, given the model: one function per kind of answer.

Each raises InvariantError that names the invariant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.base.limits import UNLIMITED_TOKENS
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.sim.machines_model import CacheModel, ModelRequest, ModelWindow
from wavepp_worker.sim.machines_slots import DEVICE, HOST, Prefix

Destinations = tuple[int, int, int]
"""Host slots available, host destinations reserved, victims reserved."""


def check_table(
    window: ModelWindow,
    request: ModelRequest,
    leased: Sequence[Prefix],
    onboarded: int,
    block_tokens: int,
) -> None:
    """The reused blocks are where they are cached; the rest is the request's own.  [I23]"""
    made = request.made
    if made is None:
        return
    table, adopted = made.tables[window.number], made.endpoint // block_tokens
    count = ceil_div(len(request.prompt), block_tokens)
    check(len(table) == count, "the table covers the prompt", table=table)
    unused = adopted - len(leased)
    expected = [-1] * unused + [window.at[prefix][1] for prefix in leased]
    check(list(table[:adopted]) == expected, "reused blocks [I8]", table=table)
    tiers = {window.at[prefix][0] for prefix in leased}
    check(tiers <= {DEVICE}, "reused blocks are on the device", tiers=tiers)
    own = table[adopted:]
    ring = min(len(own), window.spec.ring_blocks(block_tokens) if window.spec.is_sliding else count)
    expected_own = [own[index % ring] for index in range(len(own))]
    check(list(own) == expected_own and len(set(own)) == ring, "own blocks", own=own)
    copies = [c for c in made.copies if c.window == window.number and c.kind == "onboard"]
    check(len(copies) == onboarded, "each host block is onboarded once [A13]", copies=copies)


def check_states(
    window: ModelWindow,
    request: ModelRequest,
    wishes: Sequence[int],
    source: tuple[str, int] | None,
) -> int:
    """The working state is loaded from the snapshot at e*; return the snapshots' count."""
    made = request.made
    if made is None:
        return 0
    check(made.tables[window.number] == (), "a recurrent window has no table")
    found = [state for state in made.states if state.window == window.number]
    check(len(found) == 1, "one working state per recurrent window", states=made.states)
    state = found[0]
    points = tuple(point for point, _ in state.snapshots)
    check(points == tuple(wishes)[len(wishes) - len(points) :], "last points first [A47]")
    request.kept[window.number] = set(points)
    loads = [c for c in made.copies if c.window == window.number and c.target == state.working]
    loads = [copy for copy in loads if copy.kind not in ("offload", "onboard")]
    kinds = {DEVICE: "load_state", HOST: "onboard_state"}
    kind, slot = (kinds[source[0]], source[1]) if source and made.endpoint else ("zero_state", -1)
    check(
        [(copy.kind, copy.source) for copy in loads] == [(kind, slot)],
        "the working state begins at e*",
        loads=loads,
        expected=(kind, slot),
    )
    return len(points)


def check_published(
    window: ModelWindow, request: ModelRequest, points: Sequence[int], block_tokens: int
) -> None:
    """Everything that WAVE was told of is matchable now, except overwritten ring slots."""
    prompt, made = request.prompt, request.made
    if made is None:
        return
    if window.spec.is_recurrent:
        stored = [
            point
            for state in made.states
            if state.window == window.number
            for point, _ in state.snapshots
            if point in points
        ]
        check(all(prompt[:p] in window.at for p in stored), "snapshots [13]", points=points)
        return
    first = made.endpoint // block_tokens
    if window.spec.is_sliding:
        ring = window.spec.ring_blocks(block_tokens)
        first = max(first, ceil_div(len(prompt), block_tokens) - ring)
    else:
        first = 0
    ends = range((first + 1) * block_tokens, request.published + 1, block_tokens)
    is_there = all(prompt[:end] in window.at for end in ends)
    check(is_there, "published blocks are matchable [13]", window=window.number)


def compare_books(cache: RankCache, model: CacheModel, prefix_of: Mapping[bytes, Prefix]) -> None:
    """Compare all counts, and let the cache audit itself.  [I1, I9, I14-I17]"""
    cache.check_invariants()
    view, available = cache.view(), model.available()
    for number, window in enumerate(model.windows):
        held, promised = len(model.held(window)), model.promised(window)
        host_held = len(model.held(window, HOST))
        keys = {prefix_of[key] for key in view.keys[number]}
        check(keys == set(window.at), "what is matchable [I1]", window=number)
        places = list(window.at.values())
        check(len(set(places)) == len(places), "one slot, one prefix [I9]", window=number)
        check(view.referenced[number] == held, "referenced [I9]", view=view, held=held)
        check(view.reserved[number] == promised, "reserved [I15]", view=view, count=promised)
        free = view.free[number] + view.cached[number]
        check(free == available[number] >= 0, "available [I16, I17]", window=number, view=view)
        check(view.host_referenced[number] == host_held, "host referenced [I9]", view=view)
        host = view.host_free[number] + view.host_cached[number]
        host += view.host_referenced[number] + view.host_reserved[number]
        check(host == view.host_total[number], "host slots [I16]", window=number, view=view)
    dense = [
        have for have, window in zip(available, model.windows, strict=True) if window.spec.is_dense
    ]
    tokens = model.block * min(dense) if dense else UNLIMITED_TOKENS
    check(cache.available_tokens() == tokens, "available tokens [A50]", tokens=tokens)
    phases = [request.phase for request in model.requests.values()]
    escrows = phases.count("prepared") + phases.count("committed")
    sequences = phases.count("sequence") + phases.count("published")
    check(view.sequence_count == sequences, "sequences", view=view)
    check(view.escrow_count == escrows, "escrows [I14]", view=view)
    check(view.lease_count == escrows + phases.count("leased"), "leases [I14]", view=view)


def destinations(cache: RankCache, model: CacheModel) -> list[Destinations]:
    """Return, per window: host slots available, destinations reserved, victims reserved."""
    view = cache.view()
    found = []
    for number, window in enumerate(model.windows):
        attached = {slot for tier, slot in window.at.values() if tier == DEVICE}
        victims = len(attached - model.held(window)) - view.cached[number]
        free = view.host_free[number] + view.host_cached[number]
        found.append((free, view.host_reserved[number], victims))
    return found


def check_destinations(
    model: CacheModel, before: Sequence[Destinations], after: Sequence[Destinations]
) -> None:
    """Every new victim has a host destination, while there were any.  [I20, A41]"""
    for window, (free, reserved, victims), now in zip(model.windows, before, after, strict=True):
        if not window.spec.is_recurrent:
            expected = min(free, now[2] - victims)
            check(now[1] - reserved == expected, "destinations [I20]", got=now, free=free)
