"""Directed worlds: scenarios that broke earlier drafts, and some that broke engines in the field.

Every world is checked from outside as all are (agreement, order, slots, answers, hand-offs, rest);
here is what brings it into the state that the scenario names, and proof that it got there.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from tests.simulation.test_worlds import duplicate_freed_at_publish, freed_on_a_cancel_record
from wavepp_worker.base.marks import hits
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.executor.commands import RunWave
from wavepp_worker.sim.device import SimDevice
from wavepp_worker.sim.knobs import BLOCK_TOKENS as B
from wavepp_worker.sim.knobs import Knobs, SimOptions, draw_knobs
from wavepp_worker.sim.workload import SimPrompt, make_prompt
from wavepp_worker.sim.world import Violation, World

DENSE = WindowSpec(slots=40, host_slots=8)
STATES = WindowSpec(kind="recurrent", slots=8, host_slots=4)


def text(seed: int, blocks: float) -> list[int]:
    """Return the tokens of a text."""
    rng = random.Random(seed)
    return [rng.randrange(1 << 16) for _ in range(int(blocks * B))]


def calm(windows: Sequence[Sequence[WindowSpec]], **changes: Any) -> Knobs:
    """Return a world without faults and without surprises."""
    knobs = draw_knobs(0, SimOptions(ranks=len(windows), faults=()))
    settings = {
        "windows": tuple(map(tuple, windows)),
        "batch": 4,
        "headroom_tokens": 0,
        "floor_fraction": 0.0,
        "auto_commit": True,
        "hint_refine": False,
        "queue_requests_max": 1024,
        "snapshot_interval_tokens": 2 * B,
        "wave_tokens_max": 4 * B,
        "wave_tokens_min": B,
        "hold_s": 0.3,
    }
    return replace(knobs, **settings | changes)


def make_world(seed: int, knobs: Knobs, prompts: Sequence[SimPrompt]) -> World:
    options = SimOptions(ranks=len(knobs.windows), requests=len(prompts), faults=())
    return World(seed, options, knobs=knobs, prompts=list(prompts))


class Waves:
    """What every rank's device was given: (wave, rid, start, length) in order, and when it ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        self.ran_at: dict[tuple[int, int], float] = {}  # (id of the device, rid) -> last time
        enqueue, compute = SimDevice.enqueue_wave, SimDevice._compute

        def enqueue_wave(device: SimDevice, run: RunWave) -> None:
            self.given[id(device)] += [(run.wave, c.rid, c.start, c.length) for c in run.chunks]
            enqueue(device, run)

        def compute_wave(device: SimDevice) -> None:
            run = device._waves[0]
            compute(device)
            for chunk in run.chunks:
                self.ran_at[id(device), chunk.rid] = self.world.steps.now

        monkeypatch.setattr(SimDevice, "enqueue_wave", enqueue_wave)
        monkeypatch.setattr(SimDevice, "_compute", compute_wave)
        self.world: World

    def of(self, world: World) -> None:
        self.world = world


def test_s1_a_duplicate_block_stays_its_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: X and Y compute the same first block; Y goes on; Z is admitted and needs slots."""
    shared = text(1, 1)
    prompts = [
        make_prompt(shared + text(2, 0.5), 0.0, B),
        make_prompt(shared + text(3, 7.5), 0.0, B),
        *(make_prompt(text(10 + n, 9.5), 0.03 + 0.01 * n, B) for n in range(6)),
    ]
    knobs = calm([[WindowSpec(slots=20)]] * 2, death_chance=1.0)  # so that holds last
    before = hits["publish.duplicate"]
    report = make_world(1, knobs, prompts).run()
    assert hits["publish.duplicate"] > before
    assert report.ends == {"gone": len(prompts)}
    duplicate_freed_at_publish(monkeypatch)
    with pytest.raises(Violation):
        make_world(1, knobs, prompts).run()


def test_s2_a_wave_in_flight_finds_its_cancelled_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: X is admitted and runs on rank 0; it is cancelled before its wave runs on rank 1."""
    knobs = calm([[DENSE]] * 2, slow_rank=1)
    prompt = make_prompt(text(1, 12.5), 0.0, B)
    late = 0
    for delay_ms in range(4, 60, 2):
        waves = Waves(monkeypatch)
        world = make_world(2, knobs, [prompt])
        waves.of(world)
        left_at = delay_ms / 1e3
        world.steps.at(left_at, partial(world.clients.leave, 1))
        world.run()
        first, second = (id(rank.device) for rank in world.ranks)
        has_begun = waves.ran_at.get((first, 1), left_at) < left_at
        late += has_begun and waves.ran_at.get((second, 1), 0.0) > left_at
        monkeypatch.undo()
    assert late > 3
    freed_on_a_cancel_record(monkeypatch)
    world = make_world(2, knobs, [prompt])
    world.steps.at(0.02, partial(world.clients.leave, 1))
    with pytest.raises(Violation):
        world.run()


def test_a_wave_overtakes_the_copies_of_later_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    """FS-03: copies that were enqueued before a wave, and that it does not need, still wait."""
    enqueue, compute = SimDevice.enqueue_wave, SimDevice._compute
    enqueued: dict[tuple[int, int], int] = {}
    overtakes = 0

    def enqueue_wave(device: SimDevice, run: RunWave) -> None:
        enqueued[id(device), run.wave] = device.copies_enqueued
        enqueue(device, run)

    def compute_wave(device: SimDevice) -> None:
        nonlocal overtakes
        run = device._waves[0]
        assert device.copies_done >= run.copies_before
        overtakes += device.copies_done < enqueued[id(device), run.wave]
        compute(device)

    monkeypatch.setattr(SimDevice, "enqueue_wave", enqueue_wave)
    monkeypatch.setattr(SimDevice, "_compute", compute_wave)
    for seed in range(40):
        World(seed, SimOptions(ranks=2, is_hybrid=bool(seed % 2))).run()
        enqueued.clear()
    assert overtakes > 20, overtakes


@pytest.mark.parametrize("seed", range(4))
def test_cancels_around_a_shared_prefix(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FS-01: 64 prompts share nine tenths; half are cancelled while they are admitted, each stage
    learns of it at another time; then 8 plain prompts."""
    rng = random.Random(seed)
    prefix = text(1, 18)
    prompts = [make_prompt(prefix + text(100 + n, 2), rng.random() * 0.1, B) for n in range(64)]
    prompts += [make_prompt(text(200 + n, 6), 5.0 + n / 10, B) for n in range(8)]
    prompts.sort(key=lambda prompt: prompt.at_s)
    knobs = calm(
        [[WindowSpec(slots=60, host_slots=8)]] * 4,
        delays_s=(0.000_1, 0.02),
        slow_plane=("header", "rounds", "install", "front")[seed],
    )
    waves = Waves(monkeypatch)
    world = make_world(seed, knobs, prompts)
    waves.of(world)
    leaving = rng.sample(range(1, 65), 32)
    for rid in leaving:
        at_s = prompts[rid - 1].at_s + rng.random() * 0.5
        world.steps.at(at_s, partial(world.clients.leave, rid))
    report = world.run()
    lists = list(waves.given.values())
    assert len(lists) == 4
    assert all(given == lists[0] for given in lists)
    assert report.ends == {"gone": 72}
    assert all(client.terminal for rid, client in world.clients.all.items() if rid > 64)
    assert sum(client.cancelled for client in world.clients.all.values()) > 8


def test_publishing_while_the_same_prefix_is_claimed() -> None:
    """FS-11: B claims a prefix at 500 moments of the life of A, which computes and publishes it."""
    tokens = text(1, 8.5)
    reused = set()
    for number in range(500):
        knobs = calm([[DENSE], [DENSE]], wave_tokens_max=2 * B, delays_s=(0.000_5, 0.002))
        prompts = [make_prompt(tokens, 0.0, B), make_prompt(tokens, number * 0.000_1, B)]
        world = make_world(number, knobs, prompts)
        assert world.run().ends == {"gone": 2}
        finished = world.clients.all[2].finished
        assert finished is not None
        reused.add(finished.endpoint)
    assert {0, 8 * B} < reused  # before all of it, after all of it, and in between


@pytest.mark.parametrize("windows", [[DENSE], [DENSE, STATES]], ids=["dense", "states"])
@pytest.mark.parametrize("tail_blocks", [0, 2])
def test_copies_of_a_cold_prompt_in_one_round(windows: list[WindowSpec], tail_blocks: int) -> None:
    """FS-18: 32 copies of a cold prompt, or of a cold prefix with own tails, at the same moment."""
    prefix = text(1, 6.25)
    prompts = [make_prompt(prefix + text(10 + n, tail_blocks), 0.0, B) for n in range(32)]
    world = make_world(18, calm([windows] * 3, batch=16), prompts)
    report = world.run()
    assert report.ends == {"gone": 32}
    assert report.read_handoffs == 3 * 32
    assert report.reused_tokens > 0


@pytest.mark.parametrize(
    ("windows", "clients"),
    [
        pytest.param([DENSE], 1, id="dense"),
        pytest.param([DENSE, STATES], 2, id="states"),
        pytest.param([STATES], 2, id="states only"),
    ],
)
def test_a_cancelled_prompt_sent_again(windows: list[WindowSpec], clients: int) -> None:
    """FS-19, FS-27: cancelled at any moment from before its first wave to its last; sent again."""
    rng = random.Random(19)
    began, reused = 0, 0
    for number in range(120):
        left_at = rng.random() * 0.12
        prompts = [
            make_prompt(text(client, 20.5), at_s, B)
            for at_s in (0.0, left_at)
            for client in range(clients)
        ]
        world = make_world(number, calm([windows] * 2, wave_tokens_max=2 * B), prompts)
        for rid in range(1, clients + 1):
            world.steps.at(left_at, partial(world.clients.leave, rid))
        report = world.run()
        assert report.ends == {"gone": len(prompts)}
        again = [world.clients.all[clients + 1 + client].finished for client in range(clients)]
        assert all(again)
        began += report.computed_tokens > clients * 20.5 * B
        reused += sum(finished.endpoint > 0 for finished in again if finished is not None)
    assert began > 20  # some of the first had run a part
    assert reused > 20  # and that part was found again
