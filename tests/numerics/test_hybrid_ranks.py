"""A hybrid model on ranks with production caches: reuse, eviction, host tier, disagreement."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.numerics.pipeline import BLOCK_TOKENS, TOLERANCE, Oracle
from tests.numerics.ranks import INTERVAL_TOKENS, Ranks
from tests.numerics.tiny import VOCAB, make_tiny_model
from wavepp_worker.model.state_store import StateStore
from wavepp_worker.runtime.stage_work import StageWork

# States alone; attention alone; both.
BOUNDS = (0, 2, 3, 5)
LONGEST = 10 * BLOCK_TOKENS


@pytest.fixture(scope="module", params=["qwen3_next", "kimi_linear"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param, seed=3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def make_ranks(folder: Path, states: tuple[int, int, int] = (5, 1, 8)) -> Ranks:
    return Ranks(folder, BOUNDS, blocks=13, states=states, host_blocks=12, host_states=3)


def family_prompts(seed: int, count: int) -> Iterator[list[int]]:
    """Yield prompts that go on from a cut of an earlier one, or are new."""
    draw = random.Random(seed)
    known: list[list[int]] = []
    for _ in range(count):
        base: list[int] = []
        if known and draw.random() < 0.8:
            base = draw.choice(known[-5:])
            base = base[: draw.choice([len(base), draw.randrange(len(base) + 1)])]
        tail = [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 60))]
        known.append(base[: LONGEST - len(tail)] + tail)
        yield known[-1]


def assert_answers(ranks: Ranks, oracle: Oracle, prompts: Iterator[list[int]]) -> list[int]:
    """Compare every answer; return the endpoints."""
    endpoints = []
    for prompt in prompts:
        endpoint, _, logits = ranks.serve(prompt)
        torch.testing.assert_close(logits, oracle.logits(prompt)[-1], **TOLERANCE)
        endpoints.append(endpoint)
    return endpoints


def test_answers_are_right_whatever_is_reused_evicted_or_moved(
    folder: Path, oracle: Oracle
) -> None:
    """FS-26, FS-30, FS-32, FS-33: slots are scarce, so every state slot is used again and again."""
    ranks = make_ranks(folder)
    endpoints = assert_answers(ranks, oracle, family_prompts(5, 30))
    assert len(set(endpoints)) > 4
    assert {"zero_state", "load_state", "onboard_state", "offload", "onboard"} <= set(ranks.copies)
    assert ranks.times.offload_bytes > 0
    assert ranks.times.onboard_bytes > 0


def test_ranks_that_kept_different_snapshots_resume_where_all_can(
    folder: Path, oracle: Oracle
) -> None:
    """FS-35: rank 0 keeps two snapshots at a time, rank 2 all; nobody reuses a later state."""
    ranks = make_ranks(folder, states=(3, 1, 16))
    prompts = list(family_prompts(6, 20))
    disagreements = 0
    for prompt in prompts:
        endpoint, offers, logits = ranks.serve(prompt)
        disagreements += len(set(offers)) > 1
        assert endpoint <= min(offers)
        torch.testing.assert_close(logits, oracle.logits(prompt)[-1], **TOLERANCE)
    assert disagreements > 1


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_second_time_resumes_at_the_deepest_point(
    folder: Path, oracle: Oracle, extra: int
) -> None:
    """FS-28, FS-29: one token at least is computed, and the state is that of its own length."""
    ranks = make_ranks(folder)
    base = next(family_prompts(9, 1)) + [7] * LONGEST
    for times in (1, 2):
        count = times * INTERVAL_TOKENS + extra
        prompt = [times, *base[: count - 1]]
        assert ranks.serve(prompt)[0] == 0
        endpoint, _, logits = ranks.serve(prompt)
        assert endpoint == (count - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        torch.testing.assert_close(logits, oracle.logits(prompt)[-1], **TOLERANCE)


@pytest.mark.parametrize(
    "fault", ["first copies lost", "snapshots not written", "snapshots half written"]
)
def test_wrong_states_show_as_wrong_answers(
    folder: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    copy, write = StageWork.copy, StateStore.write
    if fault == "first copies lost":

        def copy_blocks(work, copies, times) -> None:
            copy(work, [each for each in copies if each.kind in ("offload", "onboard")], times)

        monkeypatch.setattr(StageWork, "copy", copy_blocks)
    else:
        # A snapshot is the second write of the same tensors in a row.
        last: list[object] = [None]

        def write_working(store, layer, slot, state, tail) -> None:
            if last[0] is state:
                if fault == "snapshots half written":
                    write(store, layer, slot, torch.zeros_like(state), tail)
                return
            last[0] = state
            write(store, layer, slot, state, tail)

        monkeypatch.setattr(StateStore, "write", write_working)
    with pytest.raises(AssertionError, match="not close"):
        assert_answers(make_ranks(folder), oracle, family_prompts(5, 30))
