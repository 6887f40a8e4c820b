"""The stages against transformers: every cut, every way to chunk, resumed, batched, decoded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.numerics.cases import PROMPT_TOKENS, TABLE, assert_rows, case_maker
from tests.numerics.pipeline import (
    BLOCK_TOKENS,
    TOLERANCE,
    Oracle,
    Pipeline,
    assert_rounding_only,
    cuts_of,
    make_chunk,
)
from tests.numerics.tiny import VOCAB
from wavepp_worker.model import attention

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama-new-rope": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-yarn": (
        "qwen3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
ALL_CUTS = [cut for stages in (1, 2, 3) for cut in cuts_of(5, stages)]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    return case_maker(tmp_path_factory.mktemp("models"), VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_shot_and_chunks_equal_transformers(case_of, variant: str) -> None:
    """FS-48: tied and untied embeddings are among the variants."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    for chunks in ([193], [64, 64, 64, 1]):
        assert_rows(pipeline.prefill(case.prompt, TABLE, chunks), case, chunks)


@pytest.mark.parametrize("bounds", ALL_CUTS, ids=str)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_every_cut_equals_transformers(case_of, variant: str, bounds: tuple[int, ...]) -> None:
    """FS-15"""
    case = case_of(variant)
    chunks = [80, 112, 1]
    assert_rows(Pipeline(case.folder, bounds).prefill(case.prompt, TABLE, chunks), case, chunks)


@pytest.mark.parametrize(
    "chunks",
    [[16] * 12 + [1], [50, 3, 77, 62, 1], [192, 1], [1, 192], [1] * 5 + [188]],
    ids=["16", "ragged", "one-token-tail", "one-token-head", "single-tokens"],
)
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_chunks_equal_transformers(case_of, variant: str, chunks: list[int]) -> None:
    """FS-16"""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 3, 5))
    assert_rows(pipeline.prefill(case.prompt, TABLE, chunks), case, chunks)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_queries_in_pieces_equal_transformers(
    case_of, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Without a flash kernel long chunks attend piece by piece."""
    monkeypatch.setattr(attention, "QUERY_ROWS_MAX", rows)
    case = case_of("qwen3")
    chunks = [50, 80, 62, 1]
    assert_rows(Pipeline(case.folder, (0, 2, 5)).prefill(case.prompt, TABLE, chunks), case, chunks)


@pytest.mark.parametrize("endpoint", [16, 96, 192])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_resuming_from_cached_blocks_equals_transformers(
    case_of, variant: str, endpoint: int
) -> None:
    """FS-17, FS-24: another request shares the first blocks and computes only what follows them."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 4, 5))
    rng = random.Random(5)
    first = case.prompt[:endpoint] + [rng.randrange(VOCAB) for _ in range(20)]
    pipeline.prefill(first, TABLE, [len(first)])
    shared = endpoint // BLOCK_TOKENS
    spare = [slot for slot in range(64) if slot not in TABLE]
    table = TABLE[:shared] + tuple(spare[: 13 - shared])
    chunks = [PROMPT_TOKENS - endpoint]
    got = pipeline.prefill(case.prompt, table, chunks, start=endpoint)
    assert_rows(got, case, chunks, start=endpoint)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_many_requests_in_one_wave_equal_transformers(case_of, variant: str) -> None:
    """A wave mixes a resumed chunk, a fresh one, a single token and one that wants nothing."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 1, 5))
    rng = random.Random(9)
    others = [[rng.randrange(VOCAB) for _ in range(length)] for length in (40, 33, 17)]
    spare = [slot for slot in range(64) if slot not in TABLE]
    tables = [tuple(spare[4 * index : 4 * index + 4]) for index in range(3)]
    pipeline.run(
        [
            make_chunk(case.prompt, 0, 96, TABLE, wants_token=False),
            make_chunk(others[1], 0, 32, tables[1], rid=3, wants_token=False),
        ]
    )
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
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_a_wave_without_answers_has_no_logits(case_of) -> None:
    case = case_of("llama")
    pipeline = Pipeline(case.folder, (0, 5))
    got = pipeline.run([make_chunk(case.prompt, 0, 64, TABLE, wants_token=False)])
    assert got.shape == (0, VOCAB)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_decoding_sixteen_tokens_equals_transformers(case_of, variant: str) -> None:
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    text = case.prompt[:40]
    logits = pipeline.prefill(text, TABLE, [40])[-1]
    for _ in range(15):
        text = [*text, int(logits.argmax())]
        logits = pipeline.run([make_chunk(text, len(text) - 1, 1, TABLE)])[-1]
    text.append(int(logits.argmax()))
    assert text[40:] == case.oracle.greedy(case.prompt[:40], 16)


def test_dummy_weights_are_equal_for_every_cut(case_of) -> None:
    case = case_of("qwen3")
    whole = Pipeline(case.folder, (0, 5), load_format="dummy")
    want = whole.prefill(case.prompt, TABLE, [193])
    for bounds in ALL_CUTS:
        cut = Pipeline(case.folder, bounds, load_format="dummy")
        assert torch.equal(cut.prefill(case.prompt, TABLE, [193]), want), bounds


@pytest.mark.parametrize("fault", ["swapped blocks", "foreign block", "lost key", "shifted start"])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_the_comparison_notices_planted_faults(case_of, variant: str, fault: str) -> None:
    """Each fault is a mistake a block table, a pool or a schedule could make.

    Blocks are swapped across the resume point: keys are stored rotated, so an exchange of two
    blocks that are both visible changes nothing, by construction.
    """
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    pipeline.prefill(case.prompt[:96], TABLE, [96])
    table, start, prompt = list(TABLE), 96, case.prompt
    if fault == "swapped blocks":
        start = 32
        table[1], table[3] = table[3], table[1]
    elif fault == "foreign block":
        table[2] = next(slot for slot in range(64) if slot not in TABLE)
    elif fault == "lost key":
        pipeline.stores[1].pool[TABLE[2], 1, :, :, 5] = 0
    else:
        start, prompt = 95, case.prompt[1:]
    got = pipeline.prefill(prompt, table, [len(prompt) - start], start=start)[-1]
    assert (got - case.want[-1]).abs().max().item() > 20 * TOLERANCE["atol"]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, case.want[-1], **TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_sixteen_bit_types_only_round(case_of, variant: str, dtype: str) -> None:
    case = case_of(variant)
    got = Pipeline(case.folder, (0, 2, 5), dtype=dtype).prefill(case.prompt, TABLE, [50, 142, 1])
    rows = [49, 191, 192]
    reference = Oracle(case.folder, getattr(torch, dtype)).logits(case.prompt)
    assert_rounding_only(got, case.want[rows], reference[rows])
