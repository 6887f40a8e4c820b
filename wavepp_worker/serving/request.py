"""Dynamo's request dict → a validated prompt.  Pure.

Everything a client can send is refused here with a sentence that says what to change, or it is
served exactly.  Nothing is silently ignored that would change the first answer token; where a vLLM
decode worker picks that token itself, how to pick it is its business.  Keys may be absent or null;
both mean "not asked for".
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from wavepp_worker.base.errors import RequestError
from wavepp_worker.serving.sampling import integer, read_sampling, refuse_choices
from wavepp_worker.wire.mailbox import Sampling

__all__ = ["Prompt", "RequestLimits", "read_request", "read_sampling", "read_tokens"]

TOKEN_BYTES = 4
SALT_CHARS_MAX = 1024

UNSUPPORTED_INPUTS = {
    "multi_modal_data": "multimodal input",
    "mm_processor_kwargs": "multimodal input",
    "mm_routing_info": "multimodal input",
    "encoder_result": "multimodal input",
    "prompt_embeds": "prompt embeddings",
}


class RequestLimits(Struct, frozen=True, kw_only=True):
    """What one worker can serve."""

    vocab: int
    context_tokens: int  # longest prompt of the model, as configured
    cache_tokens: int  # cache of the smallest stage
    block_tokens: int
    picks_first_token: bool = True  # False: decode computes it again, by its own rules


class Prompt(Struct, frozen=True, kw_only=True):
    """A request that can be served."""

    tokens: bytes  # u32 little-endian
    prompt_tokens: int
    sampling: Sampling
    salt: str = ""


def read_request(request: Mapping[str, Any], limits: RequestLimits) -> Prompt:
    """Return the prompt in a request of Dynamo's token pipeline.

    Raises:
        RequestError: the request asks for something that this worker cannot do.
    """
    for key, what in UNSUPPORTED_INPUTS.items():
        if request.get(key):
            raise RequestError("unsupported_input", f"{what} ({key}) is not supported")
    routing = _section(request, "routing")
    if lora := routing.get("lora_name"):
        raise RequestError("unsupported_lora", f"LoRA adapters are not supported (asked: {lora!r})")
    tokens = read_tokens(request.get("token_ids"), limits.vocab)
    count = len(tokens) // TOKEN_BYTES
    if count > limits.context_tokens:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {count} tokens, the longest supported prompt {limits.context_tokens}",
        )
    if count > limits.cache_tokens:
        raise RequestError(
            "prompt_exceeds_cache",
            f"the prompt has {count} tokens, the worker's cache holds {limits.cache_tokens}",
        )
    outputs, options = _section(request, "output_options"), _section(request, "sampling_options")
    if outputs.get("prompt_logprobs") is not None:
        raise RequestError("unsupported_logprobs", "prompt_logprobs is not supported")
    if limits.picks_first_token:
        _check_outputs(outputs)
        sampling = read_sampling(options, limits.vocab)
    else:
        refuse_choices(options)
        sampling = Sampling()
    _check_stop_tokens(_section(request, "stop_conditions"), limits.vocab)
    return Prompt(
        tokens=tokens,
        prompt_tokens=count,
        sampling=sampling,
        salt=_read_salt(routing),
    )


def read_tokens(token_ids: Any, vocab: int) -> bytes:
    """Return token ids as u32 little-endian bytes.

    Args:
        token_ids: a list of ids, or what `DYN_TOKEN_IDS_AS_BYTES` makes of it.

    Raises:
        RequestError: missing, empty, not ids, or an id outside `[0, vocab)`; names the position.
    """
    if isinstance(token_ids, (bytes, bytearray, memoryview)):
        if len(token_ids) % TOKEN_BYTES:
            raise RequestError("bad_tokens", f"token_ids: {len(token_ids)} bytes are no u32 ids")
        ids = array("I", bytes(token_ids))
        if sys.byteorder != "little":
            ids.byteswap()
    elif isinstance(token_ids, (list, tuple)):
        if not {int}.issuperset(map(type, token_ids)):
            at = next(i for i, token in enumerate(token_ids) if type(token) is not int)
            raise RequestError(
                "bad_tokens",
                f"token_ids[{at}] is {type(token_ids[at]).__name__}, not a token id",
            )
        try:
            ids = array("I", token_ids)
        except OverflowError:
            _refuse_token(token_ids, vocab)
            raise
    else:
        raise RequestError(
            "bad_tokens", f"token_ids: expected a list of ids, got {type(token_ids).__name__}"
        )
    if not ids:
        raise RequestError("empty_prompt", "the prompt is empty: at least one token is needed")
    if max(ids) >= vocab:
        _refuse_token(ids, vocab)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tobytes()


def _section(request: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = request.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError("bad_request", f"{key}: expected an object, got {type(value).__name__}")
    return value


def _read_salt(routing: Mapping[str, Any]) -> str:
    salt = routing.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or len(salt) > SALT_CHARS_MAX:
        raise RequestError(
            "bad_salt", f"cache_salt must be text of at most {SALT_CHARS_MAX} characters"
        )
    return salt


def _check_outputs(options: Mapping[str, Any]) -> None:
    """Refuse what the hand-off cannot carry: it has the first token's own logprob only.

    The chat API's plain `logprobs: true`, which asks for just that, arrives as 1.
    """
    logprobs = integer(options, "logprobs")
    if logprobs is not None and logprobs not in (0, 1):
        raise RequestError(
            "unsupported_logprobs",
            f"logprobs = {logprobs}: only the chosen token's logprob is supported (0 or 1)",
        )


def _check_stop_tokens(conditions: Mapping[str, Any], vocab: int) -> None:
    ids = conditions.get("stop_token_ids") or ()
    if not isinstance(ids, (list, tuple)):
        raise RequestError("bad_request", "stop_token_ids: expected a list of ids")
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError(
                "bad_tokens", f"stop_token_ids[{at}] = {token!r} is not in [0, {vocab})"
            )


def _refuse_token(ids: Any, vocab: int) -> None:
    at = next(i for i, token in enumerate(ids) if not 0 <= token < vocab)
    raise RequestError(
        "token_out_of_vocabulary",
        f"token_ids[{at}] = {ids[at]} is not in the model's vocabulary [0, {vocab})",
    )
