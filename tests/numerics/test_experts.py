"""Families with experts against transformers: every cut, every way to chunk, resumed, batched."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.numerics.cases import PROMPT_TOKENS, TABLE, Case, assert_rows, case_maker
from tests.numerics.pipeline import BLOCK_TOKENS, TOLERANCE, Pipeline, cuts_of, make_chunk
from tests.numerics.tiny import VOCAB
from wavepp_worker.model import mla

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-raw": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2-new-rope": (
        "minimax_m2",
        {
            "rotary_dim": None,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e4,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_scaling": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
}
FAMILIES = ["qwen3_moe", "minimax_m2", "deepseek_v3"]
CUTS = [cut for stages in (1, 2, 3) for cut in cuts_of(5, stages)]
CHUNKS = {
    "64": [64, 64, 64, 1],
    "16": [16] * 12 + [1],
    "ragged": [50, 3, 77, 62, 1],
    "one-token-tail": [192, 1],
}
SPARE = [slot for slot in range(64) if slot not in TABLE]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    return case_maker(tmp_path_factory.mktemp("models"), VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cut_equals_transformers(case_of, variant: str) -> None:
    """FS-15: one shot through one, two and three stages, cut wherever layers meet."""
    case = case_of(variant)
    for bounds in CUTS if variant in FAMILIES else [(0, 2, 5)]:
        got = Pipeline(case.folder, bounds).prefill(case.prompt, TABLE, [PROMPT_TOKENS])
        assert_rows(got, case, [PROMPT_TOKENS])


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_chunks_equal_transformers(case_of, variant: str, chunks: list[int]) -> None:
    """FS-16"""
    case = case_of(variant)
    got = Pipeline(case.folder, (0, 1, 3, 5)).prefill(case.prompt, TABLE, chunks)
    assert_rows(got, case, chunks)


@pytest.mark.parametrize("endpoint", [16, 192])
@pytest.mark.parametrize("variant", FAMILIES)
def test_resuming_from_cached_blocks_equals_transformers(
    case_of, variant: str, endpoint: int
) -> None:
    """FS-17: another request shares the first blocks and computes only what follows them."""
    case = case_of(variant)
    pipeline, table = resumed(case, endpoint)
    chunks = [PROMPT_TOKENS - endpoint]
    got = pipeline.prefill(case.prompt, table, chunks, start=endpoint)
    assert_rows(got, case, chunks, start=endpoint)


@pytest.mark.parametrize("variant", FAMILIES)
def test_many_requests_in_one_wave_equal_transformers(case_of, variant: str) -> None:
    """A wave mixes a resumed chunk, a fresh one, a single token and one that wants nothing."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    rng = random.Random(9)
    others = [[rng.randrange(VOCAB) for _ in range(length)] for length in (40, 33, 17)]
    tables = [tuple(SPARE[4 * index : 4 * index + 4]) for index in range(3)]
    first = pipeline.run(
        [
            make_chunk(case.prompt, 0, 96, TABLE, wants_token=False),
            make_chunk(others[1], 0, 32, tables[1], rid=3, wants_token=False),
        ]
    )
    assert first.shape == (0, VOCAB)
    got = pipeline.run(
        [
            make_chunk(others[0], 0, 40, tables[0], rid=2),
            make_chunk(case.prompt, 96, 97, TABLE),
            make_chunk(others[2], 0, 17, tables[2], rid=4, wants_token=False),
            make_chunk(others[1], 32, 1, tables[1], rid=3),
        ]
    )
    want = torch.stack(
        [case.oracle.logits(others[0])[-1], case.want[-1], case.oracle.logits(others[1])[-1]]
    )
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_the_cache_holds_the_latents_of_transformers(case_of) -> None:
    """The normed latent, then the turned shared key, of every layer and token."""
    case = case_of("deepseek_v3")
    pipeline = Pipeline(case.folder, (0, 2, 5))
    pipeline.prefill(case.prompt, TABLE, [100, 93])
    table = torch.tensor(TABLE[:13])
    rows = [
        store.gather(layer, table, PROMPT_TOKENS)
        for store in pipeline.stores
        for layer in range(store.layers)
    ]
    for (row,), (latent, key) in zip(rows, case.oracle.cached(case.prompt), strict=True):
        torch.testing.assert_close(row, torch.cat((latent, key), dim=-1), **TOLERANCE)


def test_few_heads_expanded_at_a_time_equal_transformers(
    case_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prefix is expanded some heads at a time: here three and one, then one by one."""
    case = case_of("deepseek_v3")
    for values_max in (3 * PROMPT_TOKENS * (16 + 8 + 12), 1):
        monkeypatch.setattr(mla, "EXPANDED_VALUES_MAX", values_max)
        pipeline, table = resumed(case, 96)
        got = pipeline.prefill(case.prompt, table, [97], start=96)
        assert_rows(got, case, [97], start=96)


@pytest.mark.parametrize("variant", FAMILIES)
def test_decoding_equals_transformers(case_of, variant: str) -> None:
    """One token at a time, as decoding does and as the tail of a prompt may be."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 5))
    got = pipeline.prefill(case.prompt, TABLE, [185] + [1] * 8)
    assert_rows(got, case, [185] + [1] * 8)


@pytest.mark.parametrize("variant", FAMILIES)
def test_dummy_weights_are_equal_for_every_cut(case_of, variant: str) -> None:
    case = case_of(variant)
    got = [
        Pipeline(case.folder, bounds, load_format="dummy").prefill(case.prompt, TABLE, [193])
        for bounds in ((0, 5), (0, 1, 5), (0, 2, 4, 5))
    ]
    assert torch.isfinite(got[0]).all()
    assert torch.equal(got[1], got[0])
    assert torch.equal(got[2], got[0])


@pytest.mark.parametrize("fault", ["lost row", "another request's block", "one layer of another's"])
@pytest.mark.parametrize("variant", FAMILIES)
def test_the_comparison_notices_planted_faults(case_of, variant: str, fault: str) -> None:
    case = case_of(variant)
    pipeline, table = resumed(case, 96)
    foreign = [5] * 96
    pipeline.prefill(foreign, SPARE[-6:], [96])
    pool = pipeline.stores[1].pool
    if fault == "lost row":
        pool[table[2], 1, :, :, 5] = 0
    elif fault == "another request's block":
        table = (*table[:2], SPARE[-4], *table[3:])
    else:
        pool[table[2], 1] = pool[SPARE[-4], 1]
    got = pipeline.prefill(case.prompt, table, [97], start=96)[-1]
    assert (got - case.want[-1]).abs().max().item() > 20 * TOLERANCE["atol"]


def resumed(case: Case, endpoint: int) -> tuple[Pipeline, tuple[int, ...]]:
    """Return stages that computed `endpoint` tokens for another request, and a table to resume."""
    pipeline = Pipeline(case.folder, (0, 2, 5))
    other = case.prompt[:endpoint] + [7] * 20
    pipeline.prefill(other, TABLE, [len(other)])
    shared = endpoint // BLOCK_TOKENS
    return pipeline, TABLE[:shared] + tuple(SPARE[: 13 - shared])
