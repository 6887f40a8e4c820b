"""Seeded worlds of P ranks: nothing is found, and planted faults are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kv_router_hooks.quorum import Quorum
from wavepp_worker.admission import decide, hints, replica, selection
from wavepp_worker.admission.queue import AdmissionQueue
from wavepp_worker.cache import dense, recurrent
from wavepp_worker.cache.dense import DenseSequence
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.executor import stage
from wavepp_worker.sim.campaign import Finding, command_of, explain, run_seeds, shrink
from wavepp_worker.sim.device import SimDevice
from wavepp_worker.sim.knobs import BLOCK_TOKENS, FAULTS, SimOptions
from wavepp_worker.sim.world import Violation, World, WorldReport

CONFIGURATIONS = {
    "4 ranks": (SimOptions(ranks=4), 24),
    "3 ranks, hybrid": (SimOptions(ranks=3, is_hybrid=True), 24),
    "8 ranks, hybrid": (SimOptions(ranks=8, is_hybrid=True), 8),
    "1 rank, hybrid": (SimOptions(ranks=1, is_hybrid=True), 16),
    "2 ranks, no host tier": (SimOptions(ranks=2, has_host=False), 16),
    "3 ranks, hybrid, one at a time": (SimOptions(ranks=3, is_hybrid=True, mode="waves"), 12),
    "3 ranks, hybrid, naive": (SimOptions(ranks=3, is_hybrid=True, mode="naive"), 16),
    "1 rank, naive": (SimOptions(ranks=1, mode="naive"), 8),
    "4 ranks, hybrid, no faults": (SimOptions(ranks=4, is_hybrid=True, faults=()), 12),
}

# Seeds that once found something, in the simulation itself or in what it runs.
CORPUS = [
    (17, SimOptions(ranks=4)),  # a hold ran out before the slowest stage had its part
    (40, SimOptions(ranks=4)),  # a cancelled request counted as bypassed
    (51, SimOptions(ranks=4, is_hybrid=True)),  # the same, with a snapshot slot that moved on
    (3, SimOptions(ranks=8, is_hybrid=True)),
]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_nothing_is_found(name: str) -> None:
    """FS-59: random mixes of short, long, cancelled and repeated prompts on small caches."""
    options, seeds = CONFIGURATIONS[name]
    totals = run_seeds(1000, seeds, options, 1, lambda _done: None)
    assert totals.findings == []
    assert totals.seeds == seeds
    assert totals.verdicts["admit"] > 4 * seeds
    assert totals.reused_tokens > 0
    assert totals.read_handoffs > 4 * seeds


@pytest.mark.parametrize(("seed", "options"), CORPUS)
def test_seeds_that_once_found_something(seed: int, options: SimOptions) -> None:
    World(seed, options).run()


def test_a_seed_is_a_world() -> None:
    """Same seed, same report and same stories; another seed, another world."""

    def run(seed: int) -> tuple[WorldReport, str]:
        world = World(seed, SimOptions(ranks=3, is_hybrid=True))
        report = world.run()
        return report, world.story(world.story_rids())

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_results_do_not_depend_on_the_number_of_processes() -> None:
    options = SimOptions(ranks=2)
    one = run_seeds(0, 20, options, 1, lambda _done: None)
    two = run_seeds(0, 20, options, 2, lambda _done: None)
    assert one == two


# ── planted faults ───────────────────────────────────────────────────────────────────────────


def duplicate_freed_at_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: a duplicate block is given up while its request still reads it."""
    publish = DenseSequence.publish

    def wrong(self: DenseSequence, end: int, snapshots: Any) -> int:
        attached = publish(self, end, snapshots)
        for block in self.blocks[self._adopted_count : end // self._request.block_tokens]:
            if block.parent is None and block.refs == 1 and block not in self._pool.device.free:
                self._pool.device.free.append(block)
        return attached

    monkeypatch.setattr(DenseSequence, "publish", wrong)


def one_copy_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onboarded block, or a state, is not what it should be."""
    copy = SimDevice._copy

    def wrong(self: SimDevice) -> None:
        if self.copies_done % 3 == 2:
            self._copies[0] = self._copies[0][1:]
        copy(self)

    monkeypatch.setattr(SimDevice, "_copy", wrong)


def published_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request reuses blocks that no wave has computed yet."""
    publish = RankCache.publish

    def wrong(self: RankCache, rid: int, end: int, snapshots: Any = ()) -> None:
        tokens = self._sequences[rid].request.prompt_tokens  # type: ignore[index]
        publish(self, rid, tokens, snapshots)

    monkeypatch.setattr(RankCache, "publish", wrong)


def freed_on_a_cancel_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: a rank frees an admitted request on its own, and a wave in flight names it."""
    monkeypatch.setattr(stage.StageQueue, "_release", freed_at_once)


def freed_at_once(self: Any, release: Any) -> list[Any]:
    if release.ino > self._last_ino:
        self._early_releases[release.ino] = release.rid
        return []
    request = self._requests.pop(release.rid, None)
    return [] if request is None else [stage.ToWave(stage.Freed(release.rid))]


def snapshot_one_block_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is loaded from another point than the endpoint."""

    def wrong(self: Any, blocks: Any, working: Any) -> Any:
        window = self.pool.window
        return recurrent.Copy("zero_state", window, -1, working.slot)

    monkeypatch.setattr(recurrent.RecurrentWindow, "_first_copy", wrong)


def onboarding_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leased host blocks get no device slots: what was committed cannot be kept."""
    monkeypatch.setattr(dense, "onboard_leased", lambda *_args: None)


def victims_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that an escrow owns is given to somebody else."""
    reserve = BlockPool.reserve_one

    def wrong(self: BlockPool, owner: Any) -> Any:
        block, destination = reserve(self, owner)
        block.owner = None
        return block, destination

    monkeypatch.setattr(BlockPool, "reserve_one", wrong)


def copies_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave reads a slot whose copy has not run, or only half.  [I47]"""
    enqueue = SimDevice.enqueue_wave

    def wrong(self: SimDevice, run: Any) -> None:
        enqueue(self, msgspec.structs.replace(run, copies_before=0))

    monkeypatch.setattr(SimDevice, "enqueue_wave", wrong)


def candidate_of_the_richest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks alike take the highest hint instead of the lowest."""
    merge = hints.Hints.merge

    def wrong(self: hints.Hints, requests: Any, votes: Any) -> Any:
        first = merge(self, requests, votes)
        for request in requests.values():
            if len(request.hints) == self._settings.stages:
                request.candidate = max(request.hints.values())
        return first

    monkeypatch.setattr(hints.Hints, "merge", wrong)


def retried_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks alike give up a block more than the votes ask for."""

    def wrong(record: Any, answers: Any) -> Any:
        verdict = decide.reconcile(record, answers)
        if verdict.action is decide.Action.RETRY and verdict.endpoint:
            return replace(verdict, endpoint=verdict.endpoint - BLOCK_TOKENS)
        return verdict

    monkeypatch.setattr(replica, "reconcile", wrong)


def leased_block_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells that a block is gone which a lease holds; its own books are right."""
    acquire, drain = RankCache.acquire, RankCache.drain_changes
    lost: dict[int, list[tuple[bool, int, Any]]] = defaultdict(list)

    def wrong(self: RankCache, rid: int, attempt: int, cap: int) -> int:
        endpoint = acquire(self, rid, attempt, cap)
        parts = self._leases[rid].parts  # type: ignore[index]
        held = [(False, w, part.blocks[-1].key) for w, part in enumerate(parts) if part.blocks]
        lost[id(self)] += held[:1]
        return endpoint

    def drain_changes(self: RankCache) -> tuple[Any, ...]:
        return (*drain(self), *lost.pop(id(self), []))

    monkeypatch.setattr(RankCache, "acquire", wrong)
    monkeypatch.setattr(RankCache, "drain_changes", drain_changes)


def nobody_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was refused never hears of room."""
    monkeypatch.setattr(AdmissionQueue, "has_news", lambda *_args: False)


def not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has failed is tried beside others."""

    def wrong(self: Any, _request: Any) -> bool:
        return bool(len(self._queue.pending) < self._settings.batch_requests_max)

    monkeypatch.setattr(selection.Selection, "_is_turn", wrong)


def youngest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is a stack."""
    waiting = AdmissionQueue.waiting
    monkeypatch.setattr(AdmissionQueue, "waiting", lambda self: [*waiting(self)][::-1])


def router_keeps_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is not told of removals."""
    monkeypatch.setattr(Quorum, "remove", lambda *_args: [])


def router_misses_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is not told of every 37th block."""
    store, count = Quorum.store, 0

    def wrong(self: Quorum, rank: int, window: int, key: Any) -> Any:
        nonlocal count
        count += 1
        return [] if count % 37 == 0 else store(self, rank, window, key)

    monkeypatch.setattr(Quorum, "store", wrong)


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (copies_not_waited_for, ""),
        (candidate_of_the_richest, "I7"),
        (retried_too_low, "I13"),
        (leased_block_lost, "I-GAPLESS"),
        (nobody_is_woken, "I28"),
        (not_alone, "A51"),
        (youngest_first, "I27"),
        (router_keeps_what_is_gone, "I-PUBLISH"),
        (router_misses_some, "I-PUBLISH"),
        (duplicate_freed_at_publish, ""),
        (one_copy_skipped, "I42"),
        (published_before_it_is_written, ""),
        (freed_on_a_cancel_record, ""),
        (snapshot_one_block_late, "I42"),
        (onboarding_for_free, ""),
        (victims_taken_twice, ""),
    ],
    ids=lambda value: getattr(value, "__name__", value) or "any",
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    expected: str,
) -> None:
    plant(monkeypatch)
    options = SimOptions(ranks=3, is_hybrid=True)
    found = run_until_found(options)
    assert expected in found.text


def run_until_found(options: SimOptions) -> Finding:
    for seed in range(60):
        try:
            World(seed, options, storyteller=False).run()
        except Violation as violation:
            return Finding(seed, str(violation))
    pytest.fail("60 worlds found nothing")


def test_a_finding_is_explained_by_seed_command_and_story(monkeypatch: pytest.MonkeyPatch) -> None:
    one_copy_skipped(monkeypatch)
    options = SimOptions(ranks=4, is_hybrid=True)
    finding = explain(run_until_found(options), options)
    assert f"--seed {finding.seed}" in finding.command
    smaller = shrink(finding.seed, options)
    assert len(smaller.faults) < len(FAULTS)
    assert smaller.requests < options.requests or smaller.ranks < options.ranks
    assert command_of(finding.seed, smaller) == finding.command
    assert finding.command.startswith("wavepp sim --seed ")
    assert "announced" in finding.story
    assert "ms  rank" in finding.story
