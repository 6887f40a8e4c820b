"""Reading Dynamo's request object."""

from __future__ import annotations

from typing import Any

import pytest

from wavepp_worker.base.errors import RequestError
from wavepp_worker.decode.request import DecodeRequest, StopRules, read_request
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.wire.mailbox import StageHandoff

HANDOFF = Handoff(
    fingerprint="f",
    prompt_tokens=3,
    block_tokens=16,
    first_token=9,
    stages=(StageHandoff(0, (0, 2), "tcp://127.0.0.1:1", "a"),),
)


def make_request(**changes: Any) -> dict[str, Any]:
    request: dict[str, Any] = {
        "token_ids": [3, 4, 5],
        "stop_conditions": {"max_tokens": 8, "stop_token_ids_hidden": [2]},
        "sampling_options": {"temperature": 0.0},
        "output_options": {},
        "eos_token_ids": [2],
        "prefill_result": {
            "disaggregated_params": {"kv_transfer_params": HANDOFF.to_params()},
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    return request | changes


def read(request: dict[str, Any], *, is_probe: bool = False, cache: int = 64) -> DecodeRequest:
    return read_request(
        request, vocab=300, context_tokens=100, cache_tokens=cache, is_probe=is_probe
    )


def test_a_plain_request() -> None:
    checked = read(make_request())
    assert checked.prompt == (3, 4, 5)
    assert checked.handoff == HANDOFF
    assert checked.stops == StopRules(tokens_max=8, stop_tokens=frozenset({2}))
    assert checked.cached_tokens == 2
    assert not checked.has_biases and not checked.wants_logprobs


def test_nulls_mean_not_asked_for() -> None:
    request = make_request(
        stop_conditions=None, sampling_options=None, output_options=None, eos_token_ids=None
    )
    checked = read(request)
    assert checked.stops == StopRules(tokens_max=61)  # all that the cache of 64 has room for
    assert checked.sampling.temperature == 1.0  # OpenAI's default


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": [7], "stop_token_ids_hidden": [8]}, {7}),
        ({"stop_token_ids": [7], "stop_token_ids_hidden": [8]}, {2, 7, 8}),
    ],
)
def test_what_ends_an_answer(stops: dict[str, Any], expected: set[int]) -> None:
    assert read(make_request(stop_conditions=stops)).stops.stop_tokens == expected


def test_finish_reasons() -> None:
    rules = StopRules(tokens_max=3, tokens_min=2, stop_tokens=frozenset({2}))
    assert [rules.finish_reason(2, count) for count in (1, 2, 3)] == ["", "stop", "stop"]
    assert [rules.finish_reason(5, count) for count in (1, 2, 3)] == ["", "", "length"]


def test_biases() -> None:
    checked = read(
        make_request(
            stop_conditions={"min_tokens": 4},
            sampling_options={"presence_penalty": 0.5, "frequency_penalty": 0.25},
        )
    )
    assert checked.has_biases
    assert checked.biases([9, 9]) == {9: -1.0, 2: float("-inf")}
    assert checked.biases([9, 9, 8]) == {9: -1.0, 8: -0.75}


def test_logprobs_and_probe() -> None:
    assert read(make_request(output_options={"logprobs": 0})).wants_logprobs
    assert read({"token_ids": [1]}, is_probe=True).handoff is None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_ids": []}, "empty_prompt"),
        ({"token_ids": None}, "bad_tokens"),
        ({"token_ids": [1, 300]}, "token_out_of_vocabulary"),
        ({"token_ids": [1] * 64}, "prompt_too_long"),
        ({"token_ids": [1, 2]}, "handoff_mismatch"),
        ({"stop_conditions": {"max_tokens": 0}}, "out_of_range"),
        ({"stop_conditions": {"min_tokens": -1}}, "out_of_range"),
        ({"sampling_options": {"temperature": -1}}, "bad_sampling"),
        ({"sampling_options": {"n": 2}}, "unsupported_choices"),
        ({"sampling_options": {"frequency_penalty": 3}}, "out_of_range"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(make_request(**changes))
    assert refused.value.code == code


@pytest.mark.parametrize("result", [None, {}, {"disaggregated_params": {"kv_transfer_params": {}}}])
def test_a_foreign_hand_off_is_refused(result: Any) -> None:
    with pytest.raises(IncompatibleError, match="no WavePP hand-off"):
        read(make_request(prefill_result=result))


def test_a_prompt_as_long_as_the_context_gets_its_first_token_only() -> None:
    handoff = HANDOFF.to_params() | {"prompt_tokens": 100}
    request = make_request(
        token_ids=[1] * 100,
        prefill_result={"disaggregated_params": {"kv_transfer_params": handoff}},
    )
    assert read(request, cache=200).stops.tokens_max == 1
