"""Records every request in the serving process's part of a timeline: one span, phase by phase.

Lives on the asyncio loop, which also writes the file: a second after the first event that is not
written yet.
"""

from __future__ import annotations

import asyncio

from wavepp_worker.obs.story import Phase, Story
from wavepp_worker.obs.timeline import FLUSH_INTERVAL_S, Recorder

GROUP = "request"


class RequestTimeline:
    """All requests of a worker."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._flush: asyncio.TimerHandle | None = None

    def announced(self, story: Story) -> None:
        """The ranks were told of a request."""
        self._recorder.begin(
            GROUP,
            f"request {story.rid}",
            story.rid,
            story.began_at,
            rid=story.rid,
            request_id=story.request_id,
            tokens=story.prompt_tokens,
            expected=story.expected_tokens,
        )
        self._flush_soon()

    def ended(self, story: Story) -> None:
        """It was answered, failed or was given up."""
        recorder, rid = self._recorder, story.rid
        if not rid:  # the ranks never heard of it
            recorder.instant("requests", f"refused: {story.outcome}", story.ended_at)
        else:
            for phase in story.phases:
                recorder.begin(GROUP, phase.name, rid, phase.began_at)
                recorder.end(GROUP, phase.name, rid, phase.ended_at)
            recorder.end(
                GROUP,
                f"request {rid}",
                rid,
                story.ended_at,
                outcome=story.outcome,
                endpoint=story.endpoint,
                attempts=story.attempts,
            )
        self._flush_soon()

    def held(self, story: Story, hold: Phase) -> None:
        """No stage holds anything of it any more."""
        self._recorder.begin("hold", "hold", story.rid, hold.began_at, rid=story.rid)
        self._recorder.end("hold", "hold", story.rid, hold.ended_at)
        self._flush_soon()

    def close(self) -> None:
        """Write what is left.  Idempotent."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._recorder.close()

    def _flush_soon(self) -> None:
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.call_later(FLUSH_INTERVAL_S, self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        self._recorder.flush()
