"""Stages with linear-attention layers against transformers: logits and states, cut and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.pipeline import (
    BLOCK_TOKENS,
    TOLERANCE,
    Oracle,
    Pipeline,
    assert_rounding_only,
    cuts_of,
    make_chunk,
)
from tests.numerics.tiny import VOCAB, make_tiny_model
from wavepp_worker.base.errors import InvariantError
from wavepp_worker.executor.ports import ChunkState
from wavepp_worker.wire.mailbox import Copy

PROMPT_TOKENS = 193  # 12 blocks of 16 and one token
TABLE = tuple(random.Random(7).sample(range(64), 14))
SPARE = tuple(slot for slot in range(64) if slot not in TABLE)
WORKING, OTHER, OLD, FOREIGN = 3, 17, 18, 19  # state slots; snapshots lie at 20 + point / 16
STATES = 1  # the recurrent window, as in `make_chunk`'s chunks
DENSE = {"num_experts": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_next", {}),
    "next": ("qwen3_next", DENSE),
    "qwen3_5": ("qwen3_5", {}),
    "kimi": ("kimi_linear", {}),
    # The last layer keeps a state, states are not square, every value head has its own key head.
    "state-last": ("qwen3_next", {
        "layer_types": [
            f"{kind}_attention" for kind in ("full", "linear", "linear", "full", "linear")
        ],
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "tie_word_embeddings": True,
        "attention_bias": True,
        **DENSE,
    }),
}  # fmt: skip
SHAPES = ["next", "state-last", "kimi"]  # the others differ from "next" in their MLPs or in loading
ALL_CUTS = [cut for stages in (1, 2, 3) for cut in cuts_of(5, stages)]


@dataclass
class Case:
    """A model folder with a prompt, the oracle's logits for it and its states after it."""

    folder: Path
    oracle: Oracle
    prompt: list[int]
    want: torch.Tensor
    states: dict[int, tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(variant: str) -> Case:
        family, config = VARIANTS[variant]
        folder = make_tiny_model(root / variant, family, seed=3, shards=2, config=config)
        oracle = Oracle(folder)
        prompt = make_prompt(11, PROMPT_TOKENS)
        return Case(folder, oracle, prompt, oracle.logits(prompt), oracle.states(prompt))

    return make


def make_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(tokens)]


def snapshot_slot(point: int) -> int:
    return 20 + point // BLOCK_TOKENS


def prefill(
    pipeline: Pipeline,
    prompt: Sequence[int],
    chunks: Sequence[int],
    start: int = 0,
    *,
    points: Sequence[int] = (),
    table: Sequence[int] = TABLE,
    working: int = WORKING,
) -> torch.Tensor:
    """Run `prompt[start:]` in chunks from its working state; return logits at every chunk's end."""
    if start == 0:
        pipeline.copy_states(Copy("zero_state", STATES, -1, working))
    rows = []
    for length in chunks:
        end = start + length
        state = ChunkState(STATES, working, snapshot_slot(end) if end in points else -1)
        rows.append(pipeline.run([make_chunk(prompt, start, length, table, states=(state,))]))
        start = end
    assert start == len(prompt)
    return torch.cat(rows)


def states_in(pipeline: Pipeline, slot: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Return layer -> (state, tail) as all stages hold them in a slot."""
    held = {}
    for stage, store in zip(pipeline.stages, pipeline.states, strict=True):
        if store is None:
            continue
        layers = [each for each in stage.spec.delta_layers if stage.first <= each < stage.stop]
        for place, layer in enumerate(layers):
            held[layer] = (store.states_NHKV[place][slot], store.tails_NRC[place][slot])
    return held


def assert_states(pipeline: Pipeline, slot: int, want: dict[int, tuple[torch.Tensor, ...]]) -> None:
    held = states_in(pipeline, slot)
    assert held.keys() == want.keys() != set()
    for layer, (state, tail) in held.items():
        assert state.dtype == torch.float32
        torch.testing.assert_close(state, want[layer][0], **TOLERANCE)
        torch.testing.assert_close(tail, want[layer][1], **TOLERANCE)


def assert_rows(got: torch.Tensor, case: Case, chunks: Sequence[int], start: int = 0) -> None:
    ends = [start + sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    torch.testing.assert_close(got, case.want[ends], **TOLERANCE)
    assert torch.equal(got.argmax(-1), case.want[ends].argmax(-1))


@pytest.mark.parametrize("bounds", ALL_CUTS, ids=str)
@pytest.mark.parametrize("variant", ["experts", "state-last", "kimi"])
def test_every_cut_equals_transformers(case_of, variant: str, bounds: tuple[int, ...]) -> None:
    """Stages with both kinds of layers, and with one kind only."""
    case, chunks = case_of(variant), [80, 112, 1]
    pipeline = Pipeline(case.folder, bounds)
    assert_rows(prefill(pipeline, case.prompt, chunks), case, chunks)
    assert_states(pipeline, WORKING, case.states)


@pytest.mark.parametrize(
    "chunks",
    [
        [193],
        [64, 64, 64, 1],
        [16] * 12 + [1],
        [50, 3, 77, 62, 1],
        [192, 1],
        [2] * 8 + [177],
        [1] * 5 + [188],
    ],
    ids=["whole", "64", "16", "ragged", "one-token-tail", "two-token", "single-tokens"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_equal_transformers(case_of, variant: str, chunks: list[int]) -> None:
    """Chunks of one and two tokens are shorter than the convolution."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    assert_rows(prefill(pipeline, case.prompt, chunks), case, chunks)
    assert_states(pipeline, WORKING, case.states)


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("point", [16, 64, 112, 192])
@pytest.mark.parametrize("variant", SHAPES)
def test_resuming_from_every_snapshot_equals_transformers(
    case_of, variant: str, point: int, way: str
) -> None:
    """Another request starts at one snapshot of several; its slot is read, never advanced."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 1, 4, 5))
    points = [16, 64, 112, 192]
    lengths = [16, 48, 48, 80, 1]
    prefill(pipeline, case.prompt, lengths, points=points)
    snapshot = snapshot_slot(point)
    assert_states(pipeline, snapshot, case.oracle.states(case.prompt[:point]))
    if way == "host":
        pipeline.copy_states(
            Copy("offload", STATES, snapshot, 5),
            Copy("zero_state", STATES, -1, snapshot),  # its slot has another owner now
            Copy("onboard_state", STATES, 5, OTHER),
        )
    else:
        pipeline.copy_states(Copy("load_state", STATES, snapshot, OTHER))
    text = case.prompt[:point] + make_prompt(point, 40)
    shared = point // BLOCK_TOKENS
    got = prefill(
        pipeline, text, [39, 1], start=point, table=TABLE[:shared] + SPARE[:5], working=OTHER
    )
    want = case.oracle.logits(text)
    torch.testing.assert_close(got, want[[-2, -1]], **TOLERANCE)
    assert_states(pipeline, OTHER, case.oracle.states(text))
    if way == "device":
        assert_states(pipeline, snapshot, case.oracle.states(case.prompt[:point]))


@pytest.mark.parametrize("variant", SHAPES)
def test_many_requests_in_one_wave_equal_transformers(case_of, variant: str) -> None:
    """A wave mixes a resumed chunk, fresh ones, a single token and one that wants nothing."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 1, 5))
    others = [make_prompt(seed, tokens) for seed, tokens in enumerate((40, 33, 17))]
    tables = [SPARE[4 * index : 4 * index + 4] for index in range(3)]
    pipeline.copy_states(*(Copy("zero_state", STATES, -1, slot) for slot in (WORKING, 8, 9, 10)))

    def chunk(text: list[int], start: int, length: int, table, slot: int, **changes: Any):
        states = (ChunkState(STATES, slot),)
        return make_chunk(text, start, length, table, rid=slot, states=states, **changes)

    pipeline.run(
        [
            chunk(case.prompt, 0, 96, TABLE, WORKING, wants_token=False),
            chunk(others[1], 0, 32, tables[1], 9, wants_token=False),
        ]
    )
    got = pipeline.run(
        [
            chunk(others[0], 0, 40, tables[0], 8),
            chunk(case.prompt, 96, 97, TABLE, WORKING),
            chunk(others[2], 0, 17, tables[2], 10, wants_token=False),
            chunk(others[1], 32, 1, tables[1], 9),
        ]
    )
    want = [case.oracle.logits(others[0]), case.want, case.oracle.logits(others[1])]
    torch.testing.assert_close(got, torch.stack([each[-1] for each in want]), **TOLERANCE)
    for slot, text in ((WORKING, case.prompt), (8, others[0]), (9, others[1]), (10, others[2])):
        assert_states(pipeline, slot, case.oracle.states(text))


def test_decoding_from_the_final_state_equals_transformers(case_of) -> None:
    case = case_of("next")
    pipeline = Pipeline(case.folder, (0, 2, 5))
    text = case.prompt[:40]
    logits = prefill(pipeline, text, [40])[-1]
    for _ in range(8):
        text = [*text, int(logits.argmax())]
        logits = prefill(pipeline, text, [1], start=len(text) - 1)[-1]
    text.append(int(logits.argmax()))
    assert text[40:] == case.oracle.greedy(case.prompt[:40], 9)


def test_states_that_are_missing_stop_the_rank(case_of) -> None:
    pipeline = Pipeline(case_of("next").folder, (0, 2, 5))
    with pytest.raises(InvariantError, match="come with states"):
        pipeline.run([make_chunk(case_of("next").prompt, 0, 16, TABLE)])


def test_dummy_weights_are_equal_for_every_cut(case_of) -> None:
    case = case_of("next")
    want = prefill(Pipeline(case.folder, (0, 5), load_format="dummy"), case.prompt, [193])
    assert torch.isfinite(want).all()
    for bounds in cuts_of(5, 2):
        cut = Pipeline(case.folder, bounds, load_format="dummy")
        assert torch.equal(prefill(cut, case.prompt, [193]), want), bounds


FAULTS = {
    "zeroed tail": lambda state, tail: tail[WORKING].zero_(),
    "shifted tail": lambda state, tail: tail[WORKING].copy_(tail[WORKING].roll(1, dims=0)),
    "tail one token old": lambda state, tail: tail[WORKING].copy_(tail[OLD]),
    "zeroed state": lambda state, tail: state[WORKING].zero_(),
    "state one token old": lambda state, tail: state[WORKING].copy_(state[OLD]),
    "transposed state": lambda state, tail: state[WORKING].copy_(state[WORKING].mT.clone()),
    "state of 16 bits": lambda state, tail: state[WORKING].copy_(state[WORKING].bfloat16()),
    "snapshot of another request": lambda state, tail: (
        state[WORKING].copy_(state[FOREIGN]),
        tail[WORKING].copy_(tail[FOREIGN]),
    ),
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("variant", ["next", "kimi"])
def test_the_comparison_notices_planted_faults(
    case_of, variant: str, fault: str, stage: int
) -> None:
    """Each is a mistake of a store, a copy or a schedule, in one layer, where a request resumes."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
    prefill(pipeline, make_prompt(2, 96), [96], table=SPARE[:6], working=FOREIGN)
    prefill(pipeline, case.prompt[:95], [95], working=OLD)
    prefill(pipeline, case.prompt[:96], [96])
    store = pipeline.states[stage]
    assert store is not None
    FAULTS[fault](store.states_NHKV[0], store.tails_NRC[0])
    got, want = prefill(pipeline, case.prompt, [1, 96], start=96), case.want[[96, 192]]
    assert (got - want).abs().max().item() > 20 * TOLERANCE["atol"]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["next", "qwen3_5", "state-last"])
def test_sixteen_bit_types_only_round(case_of, variant: str, dtype: str) -> None:
    """Without experts: rounding may choose others."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5), dtype=dtype)
    got = prefill(pipeline, case.prompt, [50, 142, 1])
    rows = [49, 191, 192]
    reference = Oracle(case.folder, getattr(torch, dtype)).logits(case.prompt)
    assert_rounding_only(got, case.want[rows], reference[rows])
    for state, _ in states_in(pipeline, WORKING).values():
        assert state.dtype == torch.float32
