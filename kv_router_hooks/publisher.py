"""Edge: router events → Dynamo's KV event publisher.

Dynamo hands over its publisher some time after start, from a thread of its own; until then events
are not kept, because the view's snapshot replaces them.  Publishing only queues: 0.1 ms for 64
blocks, so it may run on the asyncio loop.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from kv_router_hooks.router_view import BlockStored, RouterEvent, RouterView


class RouterPublisher:
    """Sends a view's events to Dynamo.

    Args:
        router_hash: u64 by which the router knows a key; equal on all workers for equal content.
    """

    def __init__(self, view: RouterView, router_hash: Callable[[bytes], int]) -> None:
        self._view = view
        self._router_hash = router_hash
        self._sink: Any = None  # Dynamo's KvEventPublisher
        self._loop = asyncio.get_running_loop()

    def attach_from_thread(self, sink: Any) -> None:
        """Take Dynamo's publisher; callable from any thread."""
        self._loop.call_soon_threadsafe(self._attach, sink)

    def publish(self, events: Sequence[RouterEvent]) -> None:
        """Send events in order, if somebody listens."""
        if self._sink is not None and events:
            self._sink.publish_batch(encode_events(events, self._router_hash))

    def _attach(self, sink: Any) -> None:
        self._sink = sink
        self.publish(self._view.snapshot())


def encode_events(
    events: Sequence[RouterEvent], router_hash: Callable[[bytes], int]
) -> list[dict[str, Any]]:
    """Return Dynamo's event records, neighbours of one chain merged into one record.

    Hashes are written as signed 64-bit numbers: `publish_batch` refuses others.
    """
    records: list[dict[str, Any]] = []
    last_key: bytes | None = None  # of the chain that the last record ends with
    for event in events:
        block_hash = _signed(router_hash(event.key))
        last = records[-1] if records else None
        if isinstance(event, BlockStored):
            tokens = array("I", event.tokens).tolist()
            is_next = last_key is not None and event.parent == last_key
            if last is not None and last["type"] == "stored" and is_next:
                last["token_ids"] += tokens
                last["num_block_tokens"].append(len(tokens))
                last["block_hashes"].append(block_hash)
            else:
                parent = event.parent
                records.append(
                    {
                        "type": "stored",
                        "token_ids": tokens,
                        "num_block_tokens": [len(tokens)],
                        "block_hashes": [block_hash],
                        "parent_hash": None if parent is None else _signed(router_hash(parent)),
                        "cache_salt": event.salt or None,
                    }
                )
            last_key = event.key
        else:
            if last is not None and last["type"] == "removed":
                last["block_hashes"].append(block_hash)
            else:
                records.append({"type": "removed", "block_hashes": [block_hash]})
            last_key = None
    return records


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
