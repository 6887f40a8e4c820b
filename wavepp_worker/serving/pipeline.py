"""The pipeline behind the engine: its ranks, its live requests, and what the router knows of it.

Knows nothing of Dynamo.  Lives on the serving process's asyncio loop; everything the ranks say
arrives in `_take`, one report at a time.  When a rank is lost, every request ends with
`PeerError` and `failed` is set: a pipeline with a missing stage has no useful partial mode.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from kv_router_hooks.publisher import RouterPublisher
from kv_router_hooks.router_view import RouterView
from kv_router_hooks.window_rule import DENSE, RECURRENT, WindowRule
from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.cache.hashing import router_hash, scope_key, sequence_keys, split_keys
from wavepp_worker.config.derive import StagePlan
from wavepp_worker.config.schema import Config
from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.serving.cache_views import CacheViews
from wavepp_worker.serving.ranks import Launched
from wavepp_worker.serving.request import Prompt, RequestLimits
from wavepp_worker.serving.requests import LiveRequest, LiveRequests
from wavepp_worker.transfer.handoff import Handoff
from wavepp_worker.wire.mailbox import (
    Announce,
    CacheView,
    Fatal,
    Finished,
    Gone,
    KvDelta,
    Ready,
    Rejected,
    ReportMessage,
    Stats,
    WorkerReady,
)

REPORTS_PER_TURN = 64  # before requests get their turn on the loop
REASON_CHARS_MAX = 200  # told with every request; the whole reason is logged once
LOAD_NAMES = ("wavepp_referenced_blocks", "wavepp_reserved_blocks")


class Pipeline:
    """One life of the ranks, from their start on.

    Attributes:
        failed: set to the reason when the pipeline is lost; pending in an ordered stop.
        publisher: where Dynamo's KV event sink is attached.
        on_load: called with (blocks in use on the fullest stage, blocks per stage).
    """

    def __init__(self, config: Config, launched: Launched, metrics: ServingMetrics) -> None:
        loop = asyncio.get_running_loop()
        self.plan, self.metrics = launched.plan, metrics
        self.failed: asyncio.Future[str] = loop.create_future()
        self.on_load: Callable[[int, int], None] = lambda used, total: None
        self._facts, self._ranks, self._front = launched.facts, launched.ranks, launched.front
        self._limits: RequestLimits | None = None
        self._picks_first_token = config.decode_pool.kind == "wavepp"
        self._ready: asyncio.Future[WorkerReady] = loop.create_future()
        stages = len(self.plan.stages)
        self._requests = LiveRequests(stages, config.admission.queue_requests_max)
        self._view = RouterView(
            [_windows(stage) for stage in self.plan.stages], self.plan.block_tokens
        )
        self.publisher = RouterPublisher(self._view, router_hash)
        self._cache_views = CacheViews(self._view, stages, router_hash)
        self._is_stopping = False
        self._ranks.exited.add_done_callback(self._on_ranks_exited)
        self._reader = loop.create_task(self._read_reports())
        self._reader.add_done_callback(self._on_reader_done)

    async def until_ready(self, timeout_s: float) -> RequestLimits:
        """Wait until requests can be announced; return what they may ask for.

        Raises:
            PeerError: a rank failed, or the time is over.
        """
        ends: list[asyncio.Future[Any]] = [self._ready, self.failed]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            raise PeerError(f"the ranks did not start: {self.failed.result()}")
        if not self._ready.done():
            raise PeerError(f"the ranks were not ready within {timeout_s:g} s")
        self._limits = RequestLimits(
            vocab=self._facts.vocab,
            context_tokens=self.plan.context_tokens,
            cache_tokens=self._ready.result().total_tokens,
            block_tokens=self.plan.block_tokens,
            picks_first_token=self._picks_first_token,
        )
        return self._limits

    def submit(self, prompt: Prompt) -> LiveRequest:
        """Hash and announce a prompt.  The caller ends it by `hand_off` or `cancel`.

        Raises:
            OverloadedError: too many requests are unanswered.
            PeerError: the pipeline has failed.
        """
        live = self._requests.open()
        scope = scope_key(self.plan.fingerprint, salt=prompt.salt)
        block_tokens = self.plan.block_tokens
        keys = sequence_keys(prompt.tokens, block_tokens, scope)
        chain = split_keys(keys)
        # The last token is always computed.
        reusable = chain[: (prompt.prompt_tokens - 1) // block_tokens]
        # The view must know the blocks before any rank can report them.
        self.publisher.publish(self._view.open(live.rid, chain, prompt.tokens, prompt.salt))
        live.expected_tokens = self._view.resumable_blocks(reusable) * block_tokens
        self._send(
            lambda: self._front.announce(
                Announce(
                    rid=live.rid,
                    prompt_tokens=prompt.prompt_tokens,
                    keys=keys,
                    tokens=prompt.tokens,
                    sampling=prompt.sampling,
                )
            )
        )
        self._show_counts()
        return live

    def hand_off(self, live: LiveRequest, prompt: Prompt, finished: Finished) -> Handoff:
        """Return what the decode worker needs; from here on the holds are its to end."""
        check(self._requests.finish(live), "answered twice", rid=live.rid)
        self._show_counts()
        return Handoff(
            fingerprint=self.plan.fingerprint,
            prompt_tokens=prompt.prompt_tokens,
            block_tokens=self.plan.block_tokens,
            first_token=finished.token,
            first_logprob=finished.logprob,
            stages=live.handoffs(),
        )

    def cancel(self, live: LiveRequest) -> None:
        """Nobody waits any more: free everything.  A no-op after `hand_off`.  [I49]"""
        if self._requests.cancel(live):
            self._send(lambda: self._front.cancel(live.rid))

    async def cache_view(self, timeout_s: float) -> dict[str, Any]:
        """Return the router's view beside every rank's; TimeoutError if a rank is silent."""
        return await self._cache_views.ask(self._front.request_view, timeout_s)

    @property
    def is_quiet(self) -> bool:
        """No rank holds anything for any request."""
        return self._requests.live_count == 0

    def fail(self, reason: str) -> None:
        """The pipeline is lost: end every request.  Only the first reason counts."""
        if not self._is_stopping and not self.failed.done():
            self._requests.fail_all(reason[:REASON_CHARS_MAX])
            self.failed.set_result(reason)

    async def stop(self) -> None:
        """End the ranks, in order if they are sound.  Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._requests.fail_all("the worker is shutting down")
            if not self.failed.done():
                with contextlib.suppress(PeerError):  # a full mailbox: `stop` ends them by signal
                    self._front.shutdown("the serving process ends")
                await self._ranks.stop()
        await self._ranks.kill()
        self._reader.cancel()
        await asyncio.wait([self._reader])
        self._front.close()

    # ── what the ranks say ───────────────────────────────────────────────────────────────────

    async def _read_reports(self) -> None:
        while True:
            for _ in range(REPORTS_PER_TURN):
                self._take(await self._front.next_report())
            await asyncio.sleep(0)  # `next_report` does not suspend while reports are queued

    def _take(self, report: ReportMessage) -> None:
        match report:
            case Ready() | Finished():
                self._requests.take(report)
            case Rejected() | Gone():
                if self._requests.take(report):
                    self._view.close(report.rid)
                    self._show_counts()
            case KvDelta():
                self.publisher.publish(
                    self._view.apply(report.rank, report.sequence, report.changes)
                )
                self._show_counts()
            case Stats():
                self.metrics.ranks.take(report)
                if report.role == "wave":
                    self._show_load()
            case CacheView():
                self._cache_views.take(report)
            case WorkerReady():
                if not self._ready.done():
                    self._ready.set_result(report)
            case Fatal():
                self._ranks.note_fatal(report)

    def _on_ranks_exited(self, exited: asyncio.Future[str]) -> None:
        if not exited.cancelled():
            self.fail(exited.result())

    def _on_reader_done(self, reader: asyncio.Task[None]) -> None:
        if not reader.cancelled():
            self.fail(f"reports of the ranks: {reader.exception()!r}")

    def _send(self, send: Callable[[], None]) -> None:
        """Send to the leader; if it stopped reading, the pipeline is lost."""
        try:
            send()
        except PeerError as error:
            self.fail(str(error))
            raise

    def _show_counts(self) -> None:
        self.metrics.live.set(self._requests.live_count)
        self.metrics.unanswered.set(self._requests.unanswered_count)
        self.metrics.router_blocks.set(self._view.published_count)
        self.metrics.catalog_blocks.set(self._view.catalog_count)

    def _show_load(self) -> None:
        if self._limits is None:
            return
        counts = [
            sum(self.metrics.ranks.get(rank, "wave", name) or 0 for name in LOAD_NAMES)
            for rank in range(len(self.plan.stages))
        ]
        total = self._limits.cache_tokens // self._limits.block_tokens
        self.on_load(min(int(max(counts)), total), total)


def _windows(stage: StagePlan) -> list[WindowRule]:
    """Return the rules of a rank's windows, in the order in which its LOOP reports them."""
    return [DENSE] * (stage.block_bytes > 0) + [RECURRENT] * (stage.state_bytes > 0)
