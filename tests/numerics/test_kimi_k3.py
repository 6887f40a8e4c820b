"""Kimi K3's stages against the reference: every cut, every way to chunk, resumed, decoded.

Cuts are compared exactly: stages that compute the same layers of the same chunks leave no
difference at all, whatever crosses their boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.k3_reference import K3Reference, k3_config, k3_shapes
from tests.numerics.pipeline import TOLERANCE, Pipeline, cuts_of, make_chunk
from tests.numerics.ranks import INTERVAL_TOKENS, Ranks
from tests.numerics.test_hybrid import (
    OLD,
    OTHER,
    SPARE,
    STATES,
    TABLE,
    WORKING,
    assert_states,
    make_prompt,
    prefill,
    snapshot_slot,
    states_in,
)
from tests.numerics.test_hybrid_ranks import family_prompts
from tests.numerics.tiny import make_tiny_model
from wavepp_worker.executor.ports import ChunkState
from wavepp_worker.model import delta_layer
from wavepp_worker.model.delta_rule import softplus_decay
from wavepp_worker.model.spec import read_spec, tensor_shapes
from wavepp_worker.model.stage import StageModel
from wavepp_worker.wire.mailbox import Copy

PROMPT_TOKENS = 193  # 12 blocks of 16 and one token
SEED = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "published": {},
    # Deeper within a block, and a last layer that keeps a state.
    "state-last": {
        "attn_res_block_size": 3,
        "linear_attn_config": k3_config()["text_config"]["linear_attn_config"]
        | {"kda_layers": [1, 3, 5], "full_attn_layers": [2, 4], "num_heads": 4},
        "num_shared_experts": 1,
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.5,
    },
}
CUTS = [cut for stages in (1, 2, 3) for cut in cuts_of(5, stages)]


@dataclass
class Case:
    """A model folder with a prompt, the reference's logits for it and its states after it."""

    folder: Path
    reference: K3Reference
    prompt: list[int]
    want: Tensor
    states: dict[int, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(variant: str) -> Case:
        config = VARIANTS[variant]
        folder = make_tiny_model(root / variant, "kimi_k3", SEED, shards=2, config=config)
        reference = K3Reference(folder)
        prompt = make_prompt(11, PROMPT_TOKENS)
        assert reference.routing_margin(prompt) > 1e-4
        return Case(folder, reference, prompt, reference.logits(prompt), reference.states(prompt))

    return make


def assert_rows(got: Tensor, case: Case, chunks: list[int]) -> None:
    ends = [sum(chunks[: index + 1]) - 1 for index in range(len(chunks))]
    torch.testing.assert_close(got, case.want[ends], **TOLERANCE)
    assert torch.equal(got.argmax(-1), case.want[ends].argmax(-1))


def test_the_reference_is_causal(case_of) -> None:
    case = case_of("published")
    part = case.reference.logits(case.prompt[:60])
    torch.testing.assert_close(part, case.want[:60])
    other = case.reference.logits([5, *case.prompt[1:60]])
    assert (other - part)[-1].abs().max() > 1e-3


def test_names_and_shapes_are_those_of_the_reference(case_of) -> None:
    """But for the decays of heads that the published checkpoint adds as padding."""
    spec = read_spec(case_of("published").folder)
    ours = {f"language_model.{name}": shape for name, shape in tensor_shapes(spec, 0, 5).items()}
    theirs = k3_shapes(k3_config())
    padded = {name for name in theirs if name.endswith("A_log")}
    assert {ours.pop(name) for name in padded} == {(3,)}
    assert {theirs.pop(name) for name in padded} == {(128,)}
    assert ours == theirs


@pytest.mark.parametrize("variant", VARIANTS)
def test_cuts_leave_no_difference(case_of, variant: str) -> None:
    """FS-15: one, two and three stages, at a block's start and within one; logits and states."""
    case, chunks = case_of(variant), [80, 112, 1]
    whole = Pipeline(case.folder, CUTS[0])
    want = prefill(whole, case.prompt, chunks)
    assert_rows(want, case, chunks)
    assert_states(whole, WORKING, case.states)
    for bounds in CUTS[1:]:
        cut = Pipeline(case.folder, bounds)
        assert torch.equal(prefill(cut, case.prompt, chunks), want), bounds
        for layer, held in states_in(cut, WORKING).items():
            for part, expected in zip(held, states_in(whole, WORKING)[layer], strict=True):
                assert torch.equal(part, expected), (bounds, layer)


def test_cuts_leave_no_difference_in_16_bits(case_of) -> None:
    case = case_of("published")
    want = prefill(Pipeline(case.folder, (0, 5), dtype="bfloat16"), case.prompt, [100, 93])
    for bounds in cuts_of(5, 3):
        cut = Pipeline(case.folder, bounds, dtype="bfloat16")
        assert torch.equal(prefill(cut, case.prompt, [100, 93]), want), bounds


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_crosses_a_boundary_is_the_prefix_and_every_block(
    case_of, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 + ceil(i / block) vectors per token before layer i."""
    case, seen = case_of(variant), {}
    block = read_spec(case.folder).residual_layers
    watch(monkeypatch, lambda stage, inputs: seen.update({stage.first: inputs}))
    prefill(Pipeline(case.folder, range(6)), case.prompt, [PROMPT_TOKENS])
    assert seen.keys() == {1, 2, 3, 4}
    for layer, inputs in seen.items():
        prefix, blocks = case.reference.boundary(case.prompt, layer)
        assert len(inputs["blocks"]) == len(blocks) == -(-layer // block)
        torch.testing.assert_close(inputs["hidden"], prefix.float(), **TOLERANCE)
        torch.testing.assert_close(inputs["blocks"], torch.stack(blocks).float(), **TOLERANCE)


@pytest.mark.parametrize(
    "chunks",
    [[193], [64, 64, 64, 1], [16] * 12 + [1], [50, 3, 77, 62, 1], [2] * 8 + [177], [1] * 5 + [188]],
    ids=["whole", "64", "16", "ragged", "two-token", "single-tokens"],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_equal_the_reference(case_of, variant: str, chunks: list[int]) -> None:
    """FS-16: chunks of one and two tokens are shorter than the convolution."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 1, 3, 5))
    assert_rows(prefill(pipeline, case.prompt, chunks), case, chunks)
    assert_states(pipeline, WORKING, case.states)


@pytest.mark.parametrize("way", ["device", "host"])
@pytest.mark.parametrize("point", [16, 64, 112, 192])
def test_resuming_from_every_snapshot_equals_the_reference(case_of, point: int, way: str) -> None:
    """FS-26: another request starts at one snapshot of several; its slot is read, not advanced."""
    case = case_of("published")
    pipeline = Pipeline(case.folder, (0, 1, 4, 5))
    prefill(pipeline, case.prompt, [16, 48, 48, 80, 1], points=[16, 64, 112, 192])
    snapshot, held = snapshot_slot(point), case.reference.states(case.prompt[:point])
    assert_states(pipeline, snapshot, held)
    if way == "host":
        pipeline.copy_states(
            Copy("offload", STATES, snapshot, 5),
            Copy("zero_state", STATES, -1, snapshot),  # its slot has another owner now
            Copy("onboard_state", STATES, 5, OTHER),
        )
    else:
        pipeline.copy_states(Copy("load_state", STATES, snapshot, OTHER))
    text = case.prompt[:point] + make_prompt(point, 40)
    table = TABLE[: point // 16] + SPARE[:5]
    got = prefill(pipeline, text, [39, 1], start=point, table=table, working=OTHER)
    torch.testing.assert_close(got, case.reference.logits(text)[[-2, -1]], **TOLERANCE)
    assert_states(pipeline, OTHER, case.reference.states(text))
    if way == "device":
        assert_states(pipeline, snapshot, held)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_requests_in_one_wave_equal_the_reference(case_of, variant: str) -> None:
    """A wave mixes a resumed chunk, fresh ones, a single token and one that wants nothing."""
    case = case_of(variant)
    pipeline = Pipeline(case.folder, (0, 2, 5))
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
    want = [case.reference.logits(others[0]), case.want, case.reference.logits(others[1])]
    torch.testing.assert_close(got, torch.stack([each[-1] for each in want]), **TOLERANCE)
    for slot, text in ((WORKING, case.prompt), (8, others[0]), (9, others[1]), (10, others[2])):
        assert_states(pipeline, slot, case.reference.states(text))


def test_decoding_equals_the_reference(case_of) -> None:
    case = case_of("published")
    pipeline = Pipeline(case.folder, (0, 3, 5))
    text = case.prompt[:40]
    logits = prefill(pipeline, text, [40])[-1]
    for _ in range(8):
        text = [*text, int(logits.argmax())]
        logits = prefill(pipeline, text, [1], start=len(text) - 1)[-1]
    text.append(int(logits.argmax()))
    assert text[40:] == case.reference.greedy(case.prompt[:40], 9)


def test_dummy_weights_are_equal_for_every_cut(case_of) -> None:
    case = case_of("published")
    want = prefill(Pipeline(case.folder, (0, 5), load_format="dummy"), case.prompt, [193])
    assert torch.isfinite(want).all()
    for bounds in cuts_of(5, 2):
        cut = Pipeline(case.folder, bounds, load_format="dummy")
        assert torch.equal(prefill(cut, case.prompt, [193]), want), bounds


def test_production_caches_reuse_evict_and_trim_rightly(case_of) -> None:
    """FS-30, FS-35: rank 0 keeps few snapshots, so the others give up what they have beyond."""
    case = case_of("published")
    ranks = Ranks(
        case.folder, (0, 1, 3, 5), blocks=13, states=(3, 5, 16), host_blocks=12, host_states=3
    )
    trimmed, endpoints = 0, set()
    for prompt in family_prompts(6, 24):
        endpoint, offers, logits = ranks.serve(prompt)
        trimmed += endpoint < max(offers)
        endpoints.add(endpoint)
        assert endpoint <= min(offers)
        torch.testing.assert_close(logits, case.reference.logits(prompt)[-1], **TOLERANCE)
    assert trimmed > 1
    assert any(endpoint >= INTERVAL_TOKENS for endpoint in endpoints)
    assert {"zero_state", "load_state", "offload", "onboard_state"} <= set(ranks.copies)


STATE_FAULTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "zeroed tail": lambda state, tail: tail[WORKING].zero_(),
    "zeroed state": lambda state, tail: state[WORKING].zero_(),
    "state one token old": lambda state, tail: state[WORKING].copy_(state[OLD]),
}


@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_the_comparison_notices_wrong_states(case_of, fault: str) -> None:
    """Each is a mistake of a store, a copy or a schedule, in one layer, where a request resumes."""
    case = case_of("published")
    pipeline = Pipeline(case.folder, (0, 2, 5))
    prefill(pipeline, case.prompt[:95], [95], working=OLD)
    prefill(pipeline, case.prompt[:96], [96])
    for store in pipeline.states:
        assert store is not None
        STATE_FAULTS[fault](store.states_NHKV[0], store.tails_NRC[0])
    assert_noticed(prefill(pipeline, case.prompt, [1, 96], start=96), case.want[[96, 192]])


BLOCK_FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "lost list": torch.zeros_like,
    "lost block": lambda blocks: blocks[[0, 0]],
    "stale block": lambda blocks: torch.stack((blocks[0], blocks[1].roll(1, dims=0))),
}


@pytest.mark.parametrize("fault", BLOCK_FAULTS)
def test_the_comparison_notices_wrong_blocks(
    case_of, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Each is a mistake of what crosses the boundary, within a block of layers."""
    case = case_of("published")

    def spoil(stage: StageModel, inputs: dict[str, Tensor]) -> None:
        with torch.inference_mode():
            inputs["blocks"] = BLOCK_FAULTS[fault](inputs["blocks"])

    watch(monkeypatch, spoil)
    got = prefill(Pipeline(case.folder, (0, 3, 5)), case.prompt, [96, 97])
    assert_noticed(got, case.want[[95, 192]])


def test_the_comparison_notices_a_clamped_decay(case_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi Linear's decay, clamped at the bound, is another function."""
    case = case_of("published")

    def clamped(raw: Tensor, a_log: Tensor, bias: Tensor, bound: float) -> Tensor:
        return softplus_decay(raw, a_log, bias).clamp(min=bound)

    monkeypatch.setattr(delta_layer, "bounded_decay", clamped)
    got = prefill(Pipeline(case.folder, (0, 5)), case.prompt, [96, 97])
    assert_noticed(got, case.want[[95, 192]])


def assert_noticed(got: Tensor, want: Tensor) -> None:
    assert (got - want).abs().max().item() > 20 * TOLERANCE["atol"]
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got, want, **TOLERANCE)


def watch(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[StageModel, dict[str, Tensor]], object]
) -> None:
    """Show the inputs of every stage but the first, or let them be changed."""
    forward = StageModel.forward

    def watched(stage, batch, inputs, *stores):
        if not stage.is_first:
            look(stage, inputs)
        return forward(stage, batch, inputs, *stores)

    monkeypatch.setattr(StageModel, "forward", watched)
