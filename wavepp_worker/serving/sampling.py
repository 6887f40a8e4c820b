"""Dynamo's `sampling_options` → `Sampling`.  Pure.

A value out of range or an option that would change the first token and that this worker does not
have is refused; nothing is ignored in silence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wavepp_worker.base.errors import RequestError
from wavepp_worker.wire.mailbox import Sampling

TEMPERATURE_MAX = 100.0  # above, every token is as likely as any other: surely a mistake
TEMPERATURE_MIN = 1e-5  # below, dividing by it overflows; greedy is what is meant
TEMPERATURE_DEFAULT = 1.0  # of the OpenAI API
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 63) - 1


def read_sampling(options: Mapping[str, Any], vocab: int) -> Sampling:
    """Return how to pick the first token.

    Presence and frequency penalties do not touch it, as no token was generated before it: they
    are left to the decode worker.

    Raises:
        RequestError: a value out of range, or an option that this worker does not have.
    """
    _refuse_unsupported(options)
    temperature = number(options, "temperature")
    if temperature is None:
        temperature = TEMPERATURE_DEFAULT
    if not 0 <= temperature <= TEMPERATURE_MAX:
        raise _out_of_range("temperature", temperature, f"between 0 and {TEMPERATURE_MAX:g}")
    top_p = number(options, "top_p")
    if top_p is None:
        top_p = 1.0
    if not 0 < top_p <= 1:
        raise _out_of_range("top_p", top_p, "above 0 and at most 1")
    top_k = integer(options, "top_k") or 0
    if top_k < -1:
        raise _out_of_range("top_k", top_k, "-1 or 0 (no limit) or positive")
    seed = integer(options, "seed")
    if seed is not None and not SEED_MIN <= seed <= SEED_MAX:
        raise _out_of_range("seed", seed, "a signed 64-bit number")
    return Sampling(
        temperature=temperature if temperature >= TEMPERATURE_MIN else 0.0,
        top_p=top_p,
        top_k=min(max(top_k, 0), vocab),
        seed=seed,
    )


def refuse_choices(options: Mapping[str, Any]) -> None:
    """Refuse several answers to one prompt: its cache is handed over once.

    Raises:
        RequestError: more than one choice, or a beam search.
    """
    for key in ("n", "best_of"):
        count = integer(options, key)
        if count is not None and count != 1:
            raise RequestError(
                "unsupported_choices", f"{key} = {count}: only one choice is supported"
            )
    if options.get("use_beam_search"):
        raise RequestError("unsupported_option", "use_beam_search is not supported")


def _refuse_unsupported(options: Mapping[str, Any]) -> None:
    refuse_choices(options)
    if options.get("guided_decoding"):
        raise RequestError("unsupported_option", "guided_decoding is not supported")
    for key, neutral in (("min_p", 0.0), ("repetition_penalty", 1.0)):
        value = number(options, key)
        if value is not None and value != neutral:
            raise RequestError("unsupported_option", f"{key} = {value:g} is not supported")
    for key in ("presence_penalty", "frequency_penalty"):
        number(options, key)


def number(options: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number, or None if it is absent or null; RequestError otherwise."""
    value = options.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError("bad_sampling", f"{key} must be a number, got {type(value).__name__}")
    try:
        result = float(value)
    except OverflowError:  # an int of more than 308 digits
        result = math.inf
    if not math.isfinite(result):
        raise RequestError("bad_sampling", f"{key} is not a finite number")
    return result


def integer(options: Mapping[str, Any], key: str) -> int | None:
    """Return a whole number, or None if it is absent or null; RequestError otherwise."""
    value = options.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(
            "bad_sampling", f"{key} must be a whole number, got {type(value).__name__}"
        )
    return value


def _out_of_range(key: str, value: float, allowed: str) -> RequestError:
    return RequestError("bad_sampling", f"{key} = {value:g} is out of range: must be {allowed}")
