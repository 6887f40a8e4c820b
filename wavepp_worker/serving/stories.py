"""What an operator sees of requests: phases in metrics, slow and failed ones in the log, spans.

begin ──▶ announced ──▶ end("served") ──▶ the ranks report that all holds have ended
                 └────▶ end("cancelled" | "probe"), fail(code)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.obs.quiet import QuietLog
from wavepp_worker.obs.spans import RecordedSpan, RequestSpans
from wavepp_worker.obs.story import Story
from wavepp_worker.serving.request_timeline import RequestTimeline
from wavepp_worker.serving.requests import LiveRequest

FLUSH_TIMEOUT_S = 1.0


class ServingStory(Story):
    """A story with what it takes to tell it."""

    def __init__(self, request_id: str, began_at: float, headers: Mapping[str, str]) -> None:
        super().__init__(request_id, began_at)
        self.headers = headers
        self.live: LiveRequest | None = None


class Stories:
    """Tells every request once, when it is over.

    Args:
        slow_s: a request that takes longer is told in the log.
        spans: None: nobody collects traces.
        timeline: None: nobody wants one.
    """

    def __init__(
        self,
        metrics: ServingMetrics,
        logger: logging.Logger,
        slow_s: float,
        spans: RequestSpans | None,
        timeline: RequestTimeline | None = None,
    ) -> None:
        self._metrics = metrics
        self._logger = logger
        self._quiet = QuietLog(logger)
        self._slow_s = slow_s
        self._spans = spans
        self._timeline = timeline

    def begin(self, request_id: str, headers: Mapping[str, str] | None) -> ServingStory:
        """A request has come.

        Args:
            headers: W3C trace headers of the span that waits for it, if there is one.
        """
        return ServingStory(request_id, time.monotonic(), headers or {})

    def announced(self, story: ServingStory, live: LiveRequest, prompt_tokens: int) -> None:
        """The ranks were told of it."""
        story.live = live
        story.announced(live.rid, prompt_tokens, live.expected_tokens, time.monotonic())
        if self._timeline is not None:
            self._timeline.announced(story)

    def end(self, story: ServingStory, outcome: str) -> None:
        """It was served, or nobody waits for it any more."""
        self._close(story, outcome)
        span = self._record(story, error="")
        if outcome == "served" and story.live is not None:
            self._metrics.note_served(story)
            story.live.when_gone = lambda: self._gone(story, span)
        if story.seconds > self._slow_s:
            self._quiet.warn("request slow:", f"outcome={outcome} {story}")
        elif self._logger.isEnabledFor(logging.DEBUG):
            self._logger.debug("request ended: outcome=%s rid=%d %s", outcome, story.rid, story)

    def fail(self, story: ServingStory, code: str, text: str) -> None:
        """It failed.

        Args:
            code: from a small closed set.
            text: the reason; empty if it may quote the prompt.
        """
        self._close(story, code)
        self._record(story, error=code)
        self._quiet.warn(f"request failed: code={code}", f"{story}: {text}" if text else story)

    async def close(self) -> None:
        """Send what is still to be sent, for a moment at most."""
        self._quiet.close()
        if self._timeline is not None:
            self._timeline.close()
        if self._spans is not None:
            sending = [asyncio.ensure_future(asyncio.to_thread(self._spans.close))]
            _, unsent = await asyncio.wait(sending, timeout=FLUSH_TIMEOUT_S)
            if unsent:
                self._spans.give_up()
                await asyncio.wait(sending, timeout=FLUSH_TIMEOUT_S)

    def _close(self, story: ServingStory, outcome: str) -> None:
        if story.live is not None and story.live.finished is not None:
            story.take(story.live.finished)
        story.end(outcome, time.monotonic())
        if self._timeline is not None:
            self._timeline.ended(story)
        self._metrics.requests.labels(outcome).inc()

    def _record(self, story: ServingStory, error: str) -> RecordedSpan | None:
        if self._spans is None or story.outcome == "probe":
            return None
        return self._spans.record(story, story.headers, error)

    def _gone(self, story: ServingStory, span: RecordedSpan | None) -> None:
        hold = story.reach("hold", time.monotonic())
        self._metrics.note_phase(hold)
        if self._timeline is not None:
            self._timeline.held(story, hold)
        if span is not None:
            span.add(hold)
