"""Every kind of bad request is refused with a text that names the fault; good ones are exact."""

from __future__ import annotations

import math
from array import array
from typing import Any

import pytest

from wavepp_worker.base.errors import RequestError
from wavepp_worker.serving.chunks import cancelled_chunk, terminal_chunk
from wavepp_worker.serving.request import Prompt, RequestLimits, read_request
from wavepp_worker.wire.mailbox import Sampling

VOCAB = 100
LIMITS = RequestLimits(vocab=VOCAB, context_tokens=32, cache_tokens=48, block_tokens=4)


def read(token_ids: Any = (5, 6, 7), limits: RequestLimits = LIMITS, **sections: Any) -> Prompt:
    if isinstance(token_ids, tuple):
        token_ids = list(token_ids)
    return read_request({"token_ids": token_ids, **sections}, limits)


def refusal(*args: Any, **sections: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(*args, **sections)
    assert len(str(caught.value)) > 15, "a text that helps"
    return caught.value


def sampled(**options: Any) -> Sampling:
    return read(sampling_options=options).sampling


# ── tokens ───────────────────────────────────────────────────────────────────────────────────


def test_tokens_become_little_endian_u32() -> None:
    prompt = read([1, 2, 99])
    assert prompt.tokens == b"\x01\0\0\0\x02\0\0\0\x63\0\0\0"
    assert prompt.prompt_tokens == 3


def test_packed_tokens_are_read_as_dynamo_packs_them() -> None:
    packed = array("i", [1, 2, 99]).tobytes()
    assert read(packed) == read([1, 2, 99])
    assert read(memoryview(packed)) == read([1, 2, 99])


@pytest.mark.parametrize("nothing", [[], b"", ()])
def test_an_empty_prompt_is_refused(nothing: Any) -> None:
    """FS-52"""
    assert refusal(nothing).code == "empty_prompt"


@pytest.mark.parametrize("value", [None, 5, "text", {"a": 1}, 1.5])
def test_tokens_of_the_wrong_type_are_refused(value: Any) -> None:
    """FS-52"""
    assert refusal(value).code == "bad_tokens"


def test_a_request_without_tokens_is_refused() -> None:
    """FS-52"""
    with pytest.raises(RequestError) as caught:
        read_request({}, LIMITS)
    assert caught.value.code == "bad_tokens"


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 1 << 31, 1 << 32, 1 << 63, -(1 << 63)])
def test_a_token_outside_the_vocabulary_is_named_with_its_position(bad: int, at: int) -> None:
    """FS-53"""
    tokens = [1, 2, 3, 4, 5, 6, 7]
    tokens[at] = bad
    error = refusal(tokens)
    assert error.code == "token_out_of_vocabulary"
    assert f"token_ids[{at}] = {bad}" in str(error)
    assert str(VOCAB) in str(error)


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("bad", [1.0, "1", None, True, [1], 1.5, math.nan])
def test_a_token_that_is_no_integer_is_named_with_its_position(bad: Any, at: int) -> None:
    """FS-53"""
    tokens: list[Any] = [1, 2, 3, 4, 5, 6, 7]
    tokens[at] = bad
    error = refusal(tokens)
    assert error.code == "bad_tokens"
    assert f"token_ids[{at}]" in str(error)


def test_packed_tokens_out_of_vocabulary_and_negative_ones_are_refused() -> None:
    assert refusal(array("i", [1, VOCAB]).tobytes()).code == "token_out_of_vocabulary"
    assert refusal(array("i", [1, -1]).tobytes()).code == "token_out_of_vocabulary"
    assert refusal(b"\0\0\0\0\0").code == "bad_tokens"


def test_the_highest_token_of_the_vocabulary_is_fine() -> None:
    assert read([VOCAB - 1, 0]).prompt_tokens == 2


def test_prompts_up_to_both_limits_are_taken_and_longer_ones_refused_with_both_numbers() -> None:
    """FS-54; FS-40: a prompt longer than the cache."""
    assert read([1] * 31).prompt_tokens == 31
    assert read([1] * 32).prompt_tokens == 32
    error = refusal([1] * 33)
    assert error.code == "prompt_too_long"
    assert "33" in str(error) and "32" in str(error)

    small = RequestLimits(vocab=VOCAB, context_tokens=100, cache_tokens=48, block_tokens=4)
    assert read([1] * 48, small).prompt_tokens == 48
    error = refusal([1] * 49, small)
    assert error.code == "prompt_exceeds_cache"
    assert "49" in str(error) and "48" in str(error)


# ── sampling ─────────────────────────────────────────────────────────────────────────────────

NULL_SAMPLING = dict.fromkeys(
    (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "temperature", "top_p", "top_k", "min_p", "use_beam_search", "length_penalty", "seed",
        "include_stop_str_in_output", "guided_decoding",
    )
)  # fmt: skip


def test_absent_and_null_sampling_mean_the_api_defaults() -> None:
    default = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=None)
    assert read().sampling == default
    assert read(sampling_options=None).sampling == default
    assert sampled(**NULL_SAMPLING) == default


def test_values_are_passed_on() -> None:
    assert sampled(temperature=0.5, top_p=0.9, top_k=7, seed=-3) == Sampling(0.5, 0.9, 7, -3)
    assert sampled(temperature=2, top_p=1) == Sampling(2.0, 1.0, 0, None)
    assert sampled(n=1, best_of=1, min_p=0, repetition_penalty=1.0) == sampled()
    assert sampled(use_beam_search=False, presence_penalty=0.5, frequency_penalty=-1) == sampled()


def test_greedy_and_almost_greedy_are_greedy() -> None:
    assert sampled(temperature=0).temperature == 0.0
    assert sampled(temperature=1e-300).temperature == 0.0


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_limit_of_top_k(top_k: int) -> None:
    assert sampled(top_k=top_k).top_k == 0


def test_top_k_beyond_the_vocabulary_is_the_vocabulary() -> None:
    assert sampled(top_k=1 << 62).top_k == VOCAB


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1), ("temperature", -1), ("temperature", 1e9), ("temperature", 101),
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", -math.inf),
        ("temperature", 10**400), ("temperature", "hot"), ("temperature", True),
        ("temperature", [1.0]),
        ("top_p", 0), ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.0001), ("top_p", math.nan),
        ("top_p", math.inf), ("top_p", "all"), ("top_p", False),
        ("top_k", -2), ("top_k", -(1 << 40)), ("top_k", 1.5), ("top_k", "5"), ("top_k", True),
        ("seed", 1.5), ("seed", "x"), ("seed", 1 << 63), ("seed", -(1 << 63) - 1), ("seed", True),
        ("presence_penalty", math.nan), ("frequency_penalty", math.inf),
        ("presence_penalty", "much"), ("repetition_penalty", math.nan), ("min_p", math.nan),
        ("n", 1.5), ("n", "2"), ("best_of", True),
    ],
)  # fmt: skip
def test_absurd_sampling_is_refused_by_name(option: str, value: Any) -> None:
    error = refusal(sampling_options={option: value})
    assert error.code == "bad_sampling"
    assert option in str(error)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n", 2), ("n", 0), ("n", -1), ("best_of", 2), ("use_beam_search", True),
        ("guided_decoding", {"json": {}, "regex": None}), ("guided_decoding", {"choice": ["a"]}),
        ("min_p", 0.1), ("repetition_penalty", 1.1),
    ],
)  # fmt: skip
def test_what_would_change_the_first_token_and_is_missing_is_refused(
    option: str, value: Any
) -> None:
    error = refusal(sampling_options={option: value})
    assert error.code.startswith("unsupported_")
    assert option in str(error)


# ── the rest of a request ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("multi_modal_data", {"image_url": [{"Url": "x"}]}),
        ("mm_processor_kwargs", {"size": 1}),
        ("mm_routing_info", {"block_mm_infos": [None]}),
        ("encoder_result", {"handle": "x"}),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_inputs_other_than_tokens_are_refused(key: str, value: Any) -> None:
    error = refusal(**{key: value})
    assert error.code == "unsupported_input"
    assert key in str(error)


def test_lora_is_refused_by_name() -> None:
    """FS-88: without adapters nothing of an older version can be reused."""
    error = refusal(routing={"lora_name": "poet"})
    assert error.code == "unsupported_lora"
    assert "poet" in str(error)


def test_the_salt_is_read() -> None:
    assert read(routing={"cache_salt": "tenant"}).salt == "tenant"
    assert read(routing={"cache_salt": None}).salt == ""
    assert read(routing={}).salt == ""
    assert read(routing=None).salt == ""


@pytest.mark.parametrize("salt", [5, ["a"], "x" * 1025])
def test_an_unusable_salt_is_refused(salt: Any) -> None:
    assert refusal(routing={"cache_salt": salt}).code == "bad_salt"


@pytest.mark.parametrize(
    "options", [{"logprobs": 5}, {"logprobs": -1}, {"prompt_logprobs": 0}, {"prompt_logprobs": 3}]
)
def test_logprobs_that_cannot_be_handed_off_are_refused(options: dict[str, Any]) -> None:
    assert refusal(output_options=options).code == "unsupported_logprobs"


@pytest.mark.parametrize("count", [None, 0, 1])
def test_the_chosen_tokens_logprob_is_handed_off(count: int | None) -> None:
    assert read(output_options={"logprobs": count, "prompt_logprobs": None}).prompt_tokens == 3


@pytest.mark.parametrize("bad", [-1, VOCAB, 1.5, "x", None, True])
def test_bad_stop_tokens_are_refused_with_their_position(bad: Any) -> None:
    """FS-53: optional lists of ids, too."""
    error = refusal(stop_conditions={"stop_token_ids": [1, bad]})
    assert error.code == "bad_tokens"
    assert "stop_token_ids[1]" in str(error)


@pytest.mark.parametrize(
    "section", ["sampling_options", "output_options", "stop_conditions", "routing"]
)
@pytest.mark.parametrize("value", [5, "x", [1]])
def test_sections_of_the_wrong_type_are_refused_by_name(section: str, value: Any) -> None:
    error = refusal(**{section: value})
    assert error.code == "bad_request"
    assert section in str(error)


def test_a_real_request_full_of_nulls_is_served() -> None:
    prompt = read(
        [74, 71, 78],
        model="m",
        stop_conditions={"max_tokens": 1, "stop": None, "stop_token_ids": None,
                         "stop_token_ids_hidden": [2], "min_tokens": None, "ignore_eos": None},
        sampling_options=NULL_SAMPLING,
        output_options={"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None},
        eos_token_ids=[2], annotations=[], routing={"prefill_worker_id": 1, "lora_name": None},
        multi_modal_data=None, mm_processor_kwargs=None, encoder_result=None, prompt_embeds=None,
        extra_args={"nvext": {}},
    )  # fmt: skip
    assert prompt.prompt_tokens == 3


# ── chunks ───────────────────────────────────────────────────────────────────────────────────


def test_the_terminal_chunk_asks_for_a_decode_worker() -> None:
    chunk = terminal_chunk(10, 4, 42, {"kind": "wavepp"})
    assert chunk == {
        "token_ids": [42],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 10,
            "completion_tokens": 1,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
        "disaggregated_params": {"kv_transfer_params": {"kind": "wavepp"}},
    }


def test_a_probe_gets_no_hand_off() -> None:
    assert "disaggregated_params" not in terminal_chunk(1, 0, 42, None)


def test_the_cancelled_chunk() -> None:
    chunk = cancelled_chunk(10)
    assert chunk["finish_reason"] == "cancelled"
    assert chunk["token_ids"] == []
