"""How the ranks of one worker find each other: Dynamo's discovery, nothing else.

Every WAVE process serves the endpoint `{namespace}.{group}.rank`; its answer is the rank's
`RankRecord`.  A rank watches the instances of that endpoint and asks each for its record until
all P ranks of its own epoch are known.  Discovery is not used to notice a death (8 s to 29 s):
sockets, silence and the supervisor do that.

Dynamo needs an asyncio loop.  It lives in a daemon thread of the WAVE process that sleeps unless
`transport.rounds` is `dynamo`.  The native runtime installs no signal handlers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError, PeerError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENDPOINT = "rank"
POLL_S = 0.02  # between looks at the list of instances while ranks are missing
ASK_TIMEOUT_S = 2.0
ASK_AGAIN_S = 0.5  # an instance that did not answer, e.g. a dead one not yet forgotten


class RankRecord(Struct, frozen=True, kw_only=True):
    """What a rank tells the others."""

    rank: int
    epoch: int
    instance: int  # Dynamo's id of this process
    rounds_address: str  # leader with transport.rounds = zmq, else ""
    wave_address: str  # LOOP's wave plane
    store_address: str  # rank 0 only: torch.distributed store


class Membership:
    """This rank's membership of the group; owns the process's `DistributedRuntime`.

    Attributes:
        component: `namespace.group`, under which this worker's ranks serve.
        loop: the asyncio loop of Dynamo's thread.
        runtime: the `DistributedRuntime`.
        instance: this process's instance id.
    """

    def __init__(self, namespace: str, group: str, host: str) -> None:
        backend = os.environ.get("DYN_DISCOVERY_BACKEND", "etcd")
        if backend == "mem":
            raise ConfigError("DYN_DISCOVERY_BACKEND=mem ends at the process: ranks cannot meet")
        # Dynamo's servers would bind the first outer address; ours belong to the cluster's host.
        os.environ.setdefault("DYN_LOG", "warn")
        os.environ.setdefault("DYN_SDK_DISABLE_ANSI_LOGGING", "1")
        os.environ.setdefault("DYN_TCP_RPC_HOST", host)
        os.environ.setdefault("DYN_TCP_RESPONSE_STREAM_HOST", host)
        self.component = f"{_safe_name(namespace)}.{_safe_name(group)}"
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="dynamo", daemon=True)
        self._thread.start()
        self.runtime: Any = self._wait(self._open(backend))
        self._endpoint = self.runtime.endpoint(f"{self.component}.{ENDPOINT}")
        self.instance: int = self._endpoint.connection_id()

    def join(self, record: RankRecord, ranks: int, timeout_s: float) -> tuple[RankRecord, ...]:
        """Publish `record`; return the records of all ranks of its epoch, in rank order.

        Raises:
            PeerError: somebody is missing after `timeout_s`, this rank belongs to an earlier
                epoch than another, or two processes claim one rank.
        """
        return self._wait(self._join(record, ranks, timeout_s))

    def close(self) -> None:
        """Leave the group.  Idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.runtime.shutdown)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(1.0)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _open(self, backend: str) -> Any:
        from dynamo.runtime import DistributedRuntime  # after the variables above

        request_plane = os.environ.get("DYN_REQUEST_PLANE", "tcp")
        event_plane = os.environ.get("DYN_EVENT_PLANE", "zmq")
        return DistributedRuntime(self.loop, backend, request_plane, event_plane=event_plane)

    async def _join(
        self, record: RankRecord, ranks: int, timeout_s: float
    ) -> tuple[RankRecord, ...]:
        answer = msgspec.to_builtins(record)

        async def tell(request: Any, context: Any) -> AsyncIterator[Any]:
            yield answer

        self._serving = asyncio.ensure_future(self._endpoint.serve_endpoint(tell))
        found: dict[int, RankRecord] = {record.rank: record}
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._endpoint.client()
                await self._collect(client, found, ranks)
        except TimeoutError as error:
            missing = sorted(set(range(ranks)) - found.keys())
            raise PeerError(f"ranks {missing} did not appear within {timeout_s:g} s") from error
        return tuple(found[rank] for rank in range(ranks))

    async def _collect(self, client: Any, found: dict[int, RankRecord], ranks: int) -> None:
        own = next(iter(found.values()))
        settled = {own.instance}  # instances that need not be asked again
        ask_at: dict[int, float] = {}
        while len(found) < ranks:
            if self._serving.done():
                raise PeerError(f"discovery refused this rank: {self._serving.exception()}")
            now = self.loop.time()
            for instance in set(client.instance_ids()) - settled:
                if ask_at.get(instance, now) > now:
                    continue
                record = await _ask(client, instance)
                if record is None:
                    ask_at[instance] = self.loop.time() + ASK_AGAIN_S
                else:
                    settled.add(instance)
                    _accept(record, own, found)
            if len(found) < ranks:
                await asyncio.sleep(POLL_S)


async def _ask(client: Any, instance: int) -> RankRecord | None:
    """Return the record of `instance`, or None if it does not answer."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            stream = await client.direct({}, instance, annotated=False)
            async for answer in stream:
                return msgspec.convert(answer, RankRecord)
    except Exception as error:  # the binding raises bare Exceptions for a dead instance
        logger.info("no record yet: instance=%d reason=%s", instance, error)
    return None


def _accept(record: RankRecord, own: RankRecord, found: dict[int, RankRecord]) -> None:
    """Add `record` to `found`, unless it belongs to an earlier life of the worker."""
    if record.epoch > own.epoch:
        raise PeerError(f"epoch {own.epoch} is over: rank {record.rank} runs {record.epoch}")
    if record.epoch < own.epoch:
        logger.info("record of an earlier epoch ignored: rank=%d epoch=%d", *_key(record))
        return
    if record.rank in found:
        raise PeerError(f"two processes claim rank {record.rank} of epoch {own.epoch}")
    found[record.rank] = record


def _key(record: RankRecord) -> tuple[int, int]:
    return record.rank, record.epoch


def _safe_name(name: str) -> str:
    """Return `name` with every character that Dynamo's endpoint paths refuse replaced."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)
