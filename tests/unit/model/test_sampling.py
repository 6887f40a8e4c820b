"""Sampling: greedy, filters, distribution, repeatability."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from wavepp_worker.base.errors import InvariantError
from wavepp_worker.model.sampling import sample
from wavepp_worker.wire.mailbox import Sampling

PROBABILITIES = [0.5, 0.25, 0.15, 0.1]
ORDER = [2, 0, 3, 1]  # token of each probability, so that order and id differ


def make_logits(rows: int = 1) -> torch.Tensor:
    logits = torch.empty(4)
    logits[ORDER] = torch.tensor(PROBABILITIES).log()
    return (logits + 3.0).expand(rows, -1).clone()


def draw(sampling: Sampling, count: int) -> Counter[int]:
    """Draw at `count` positions."""
    tokens, _ = sample(make_logits(count), [sampling] * count, range(count))
    return Counter(tokens.tolist())


def test_greedy_takes_the_likeliest_and_reports_the_models_logprob() -> None:
    tokens, logprobs = sample(make_logits(2), [Sampling(), Sampling(seed=5)], [3, 4])
    assert tokens.tolist() == [2, 2]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2)


def test_draws_follow_the_distribution() -> None:
    counts = draw(Sampling(temperature=1.0, seed=1), 4000)
    for token, probability in zip(ORDER, PROBABILITIES, strict=True):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    sharp = draw(Sampling(temperature=0.5, seed=1), 4000)
    squares = [probability**2 for probability in PROBABILITIES]
    assert sharp[2] / 4000 == pytest.approx(squares[0] / sum(squares), abs=0.03)
    flat = draw(Sampling(temperature=100.0, seed=1), 4000)
    assert min(flat.values()) / 4000 == pytest.approx(0.25, abs=0.03)
    assert draw(Sampling(temperature=1e-6, seed=1), 100) == {2: 100}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {2, 0}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.1}, {2}),
        ({"top_p": 0.5}, {2}),
        ({"top_p": 0.74}, {2, 0}),
        ({"top_p": 0.89}, {2, 0, 3}),
        ({"top_p": 0.0}, {2}),
        ({"top_k": 3, "top_p": 0.6}, {2, 0}),
    ],
    ids=str,
)
def test_filters_keep_the_likeliest(filters: dict[str, float], kept: set[int]) -> None:
    assert set(draw(Sampling(temperature=1.0, seed=3, **filters), 400)) == kept


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.7}], ids=str)
def test_kept_tokens_share_the_mass(filters: dict[str, float]) -> None:
    counts = draw(Sampling(temperature=1.0, seed=2, **filters), 4000)
    assert counts[2] / 4000 == pytest.approx(2 / 3, abs=0.03)


def test_seed_and_position_fix_the_draw_wherever_the_row_stands() -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    positions = list(range(40))
    together, _ = sample(make_logits(40), [sampling] * 40, positions)
    alone = [sample(make_logits(), [sampling], [place])[0].item() for place in positions]
    assert together.tolist() == alone
    other, _ = sample(make_logits(40), [Sampling(temperature=1.0, seed=8)] * 40, positions)
    assert other.tolist() != alone


def test_without_a_seed_draws_differ() -> None:
    unseeded = [Sampling(temperature=1.0)] * 64
    first, _ = sample(make_logits(64), unseeded, [0] * 64)
    second, _ = sample(make_logits(64), unseeded, [0] * 64)
    assert first.tolist() != second.tolist()


def test_a_wave_mixes_kinds_and_may_be_empty() -> None:
    tokens, logprobs = sample(
        make_logits(3), [Sampling(temperature=1.0, seed=1), Sampling(), Sampling()], [0, 1, 2]
    )
    assert tokens.tolist()[1:] == [2, 2]
    assert logprobs.shape == (3,)
    tokens, logprobs = sample(torch.empty(0, 4), [], [])
    assert (len(tokens), len(logprobs)) == (0, 0)


def test_broken_logits_show_as_nan() -> None:
    _, logprobs = sample(torch.full((1, 4), math.nan), [Sampling()], [0])
    assert math.isnan(logprobs.item())


def test_rows_and_samplings_must_match() -> None:
    with pytest.raises(InvariantError):
        sample(make_logits(2), [Sampling()], [0])
