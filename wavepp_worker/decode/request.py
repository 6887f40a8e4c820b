"""What a decode worker is asked for, read from Dynamo's request object.  Pure.

Prompt and sampling are read by the prefill worker's own functions, so that both legs of a request
mean the same by them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from wavepp_worker.base.errors import RequestError
from wavepp_worker.serving.request import read_tokens
from wavepp_worker.serving.sampling import integer, number, read_sampling
from wavepp_worker.transfer.handoff import Handoff
from wavepp_worker.wire.mailbox import Sampling

PENALTY_MAX = 2.0  # of the OpenAI API, in either direction


class StopRules(Struct, frozen=True, kw_only=True):
    """When an answer ends."""

    tokens_max: int
    tokens_min: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def finish_reason(self, token: int, answer_tokens: int) -> str:
        """Return why the answer ends with `token`, its `answer_tokens`-th; "" if it goes on."""
        if token in self.stop_tokens and answer_tokens >= self.tokens_min:
            return "stop"
        return "length" if answer_tokens >= self.tokens_max else ""


class DecodeRequest(Struct, frozen=True, kw_only=True):
    """A checked request.  Without a hand-off (a health probe) the prompt is computed here."""

    prompt: tuple[int, ...]
    handoff: Handoff | None
    sampling: Sampling
    stops: StopRules
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    wants_logprobs: bool = False
    cached_tokens: int | None = None  # reused by the prefill worker, for the usage report

    def biases(self, answer: Iterable[int]) -> dict[int, float]:
        """Return what to add to the next token's logits, after the tokens of `answer`."""
        biases = {}
        counts = Counter(answer)
        if self.presence_penalty or self.frequency_penalty:
            for token, count in counts.items():
                biases[token] = -self.presence_penalty - self.frequency_penalty * count
        if counts.total() + 1 < self.stops.tokens_min:
            biases |= dict.fromkeys(self.stops.stop_tokens, float("-inf"))
        return biases

    @property
    def has_biases(self) -> bool:
        """Whether `biases` can be anything but empty."""
        return bool(self.presence_penalty or self.frequency_penalty or self.stops.tokens_min)


def read_request(
    request: Mapping[str, Any],
    *,
    vocab: int,
    context_tokens: int,
    cache_tokens: int,
    is_probe: bool = False,
) -> DecodeRequest:
    """Check a request.

    Args:
        vocab: size of the model's vocabulary.
        context_tokens: longest text of the model, prompt and answer.
        cache_tokens: size of this worker's cache.
        is_probe: a health probe: there is no hand-off.

    Raises:
        RequestError: the client asks for something impossible.
        IncompatibleError: the hand-off is not a WavePP worker's.
    """
    packed = read_tokens(request.get("token_ids"), vocab)
    prompt = struct.unpack(f"<{len(packed) // 4}I", packed)
    # The last token of an answer needs no place in the cache; the first one of it may.
    if len(prompt) > context_tokens or len(prompt) >= cache_tokens:
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {len(prompt)} tokens; this decode worker takes at most "
            f"{min(context_tokens, cache_tokens - 1)}",
        )
    room = max(1, min(context_tokens, cache_tokens) - len(prompt))
    handoff, cached = None, None
    if not is_probe:
        prefill = _section(request, "prefill_result")
        handoff = read_handoff(request)
        cached = _section(prefill, "prompt_tokens_details").get("cached_tokens")
        if handoff.prompt_tokens != len(prompt) or handoff.first_token >= vocab:
            raise RequestError(
                "handoff_mismatch",
                f"the hand-off is of a prompt with {handoff.prompt_tokens} tokens, "
                f"the request has {len(prompt)}",
            )
    options = _section(request, "sampling_options")
    return DecodeRequest(
        prompt=prompt,
        handoff=handoff,
        sampling=read_sampling(options, vocab),
        stops=_read_stops(request, room),
        presence_penalty=_penalty(options, "presence_penalty"),
        frequency_penalty=_penalty(options, "frequency_penalty"),
        wants_logprobs=_section(request, "output_options").get("logprobs") is not None,
        cached_tokens=cached if isinstance(cached, int) else None,
    )


def read_handoff(request: Mapping[str, Any]) -> Handoff:
    """Return what the prefill worker handed over.

    Raises:
        IncompatibleError: nothing, or not a WavePP worker's hand-off.
    """
    params = _section(_section(request, "prefill_result"), "disaggregated_params")
    return Handoff.from_params(params.get("kv_transfer_params"))


def _read_stops(request: Mapping[str, Any], room: int) -> StopRules:
    stops = _section(request, "stop_conditions")
    stop_tokens = set(stops.get("stop_token_ids") or ())
    if not stops.get("ignore_eos"):
        stop_tokens.update(request.get("eos_token_ids") or ())
        stop_tokens.update(stops.get("stop_token_ids_hidden") or ())
    asked = _count(stops, "max_tokens", least=1)
    return StopRules(
        tokens_max=room if asked is None else min(asked, room),
        tokens_min=_count(stops, "min_tokens", least=0) or 0,
        stop_tokens=frozenset(stop_tokens),
    )


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def _count(tree: Mapping[str, Any], name: str, *, least: int) -> int | None:
    value = integer(tree, name)
    if value is not None and value < least:
        raise RequestError("out_of_range", f"{name} = {value} is below {least}")
    return value


def _penalty(options: Mapping[str, Any], name: str) -> float:
    value = number(options, name) or 0.0
    if not -PENALTY_MAX <= value <= PENALTY_MAX:
        raise RequestError(
            "out_of_range", f"{name} = {value:g} is not between {-PENALTY_MAX} and {PENALTY_MAX}"
        )
    return value
