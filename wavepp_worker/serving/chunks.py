"""Our answers as Dynamo's chunks: one terminal chunk per request.  Pure."""

from __future__ import annotations

from typing import Any


def terminal_chunk(
    prompt_tokens: int, cached_tokens: int, token: int, handoff: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the only chunk of a served request.

    "length" and not "stop": with "stop" Dynamo would take the token for the whole answer and
    never ask a decode worker.  Without `handoff` (health probes) nobody may read the state.
    """
    chunk: dict[str, Any] = {
        "token_ids": [token],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 1,
            "total_tokens": prompt_tokens + 1,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }
    if handoff is not None:
        chunk["disaggregated_params"] = {"kv_transfer_params": handoff}
    return chunk


def cancelled_chunk(prompt_tokens: int) -> dict[str, Any]:
    """Return the only chunk of a request whose client gave up."""
    return {
        "token_ids": [],
        "index": 0,
        "finish_reason": "cancelled",
        "completion_usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 0,
            "total_tokens": prompt_tokens,
        },
    }
