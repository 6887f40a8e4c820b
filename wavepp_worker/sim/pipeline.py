"""A pipeline of P stages in virtual time: what a planner's waves do to its utilisation.

    finish(s, w) = max( finish(s, w-1), finish(s-1, w) + hop ) + time(w)
    time(w)      = fixed + linear * tokens + square * sum over spans of tokens * context

Waves are emitted while the ring has room, as in production; the planner is the production one.
Admission is a cost per request and one of three ways to pay it:

    batched    the WAVE role works through requests one after another, beside the pipeline; what
               it waits for (rounds) overlaps between requests: leases and escrows
    one        beside the pipeline, but the next request starts when the last one is admitted
    serial     LOOP asks for the next request when its lanes cannot fill a wave, and waits for it

Not modelled: the two buffers per hop (any number of waves may wait at a stage), stages of unequal
speed, capacity.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from wavepp_worker.base.errors import check
from wavepp_worker.base.types import Instant
from wavepp_worker.planner.ports import PlannedSpan, WavePlanner, WaveSlot


class StageTime(Struct, frozen=True, kw_only=True):
    """Seconds that one stage takes for one wave.

    Attributes:
        fixed_s: per wave: launches, the hop's latency on the device.
        linear_s: per token.
        square_s: per token and token of its context (attention).
    """

    fixed_s: float
    linear_s: float
    square_s: float

    def wave_s(self, spans: Sequence[PlannedSpan]) -> float:
        """Return the time of one wave; a token's context is everything before it."""
        tokens = sum(span.length for span in spans)
        pairs = sum(span.length * (span.start + span.length / 2) for span in spans)
        return self.fixed_s + self.linear_s * tokens + self.square_s * pairs


class Prompt(Struct, frozen=True):
    """One request of a workload: tokens [endpoint, tokens) are computed."""

    tokens: int
    endpoint: int = 0


class Admission(Struct, frozen=True, kw_only=True):
    """How requests become lanes.

    Attributes:
        kind: batched, one or serial.
        latency_s: waiting for other ranks, per request.
        fixed_s, token_s: work of a rank, per request and per prompt token.
        computed_token_s: work of a rank per token that is not reused, on top of that.
        wave_tokens: serial: lanes with fewer tokens cannot fill a wave.
    """

    kind: str = "batched"
    latency_s: float = 0.0
    fixed_s: float = 0.0
    token_s: float = 0.0
    computed_token_s: float = 0.0
    wave_tokens: int = 0

    def work_s(self, prompt: Prompt) -> float:
        """Return a rank's work for one request."""
        computed = prompt.tokens - prompt.endpoint
        return self.fixed_s + self.token_s * prompt.tokens + self.computed_token_s * computed


class PipelineRun(Struct, frozen=True, kw_only=True):
    """What a run showed.  Times in seconds of virtual time."""

    seconds: float  # from the start of the first wave to the end of the last
    waves: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    busy_share: float  # of all stages, from the first wave to the last
    latency_s: tuple[float, ...]  # per request, in order of completion


class _Live(Struct):
    prompt: Prompt
    arrived_at: float
    left: int  # tokens not retired


def run_closed_loop(
    planner: WavePlanner,
    prompts: Iterator[Prompt],
    *,
    stages: int,
    time: StageTime,
    concurrency: int,
    hop_s: float = 0.0,
    admission: Admission = Admission(),  # noqa: B008 (frozen)
    on_wave: Callable[[int, Sequence[PlannedSpan], float], None] | None = None,
) -> PipelineRun:
    """Keep `concurrency` requests in the worker until `prompts` ends; return what was seen.

    Args:
        hop_s: from one stage's end to the next one's earliest start.
        admission: from a request's arrival to its lane.
        on_wave: told (wave, spans, start on stage 0).
    """
    return _ClosedLoop(planner, prompts, stages, time, concurrency, hop_s, admission, on_wave).run()


class _ClosedLoop:
    def __init__(  # noqa: PLR0917 (one caller, right above)
        self,
        planner: WavePlanner,
        prompts: Iterator[Prompt],
        stages: int,
        time: StageTime,
        concurrency: int,
        hop_s: float,
        admission: Admission,
        on_wave: Callable[[int, Sequence[PlannedSpan], float], None] | None,
    ) -> None:
        self._planner, self._prompts, self._time = planner, prompts, time
        self._stages, self._concurrency = stages, concurrency
        self._hop_s, self._admission, self._on_wave = hop_s, admission, on_wave
        self._events: list[tuple[float, int, str, int]] = []
        self._event_count = 0
        self._now = 0.0
        self._free_at = [0.0] * stages
        self._started_at: float | None = None
        self._busy_s = 0.0
        self._next_wave = self._oldest_wave = 1
        self._spans: dict[int, tuple[PlannedSpan, ...]] = {}
        self._live: dict[int, _Live] = {}
        self._rid = 0
        self._waiting: deque[int] = deque()  # arrived, admission not begun
        self._admitting = 0
        self._lane_tokens = 0  # not scheduled yet
        self._is_held = False  # serial: LOOP waits for an admission
        self._worked_until = 0.0  # the WAVE role is busy until then
        self._latency_s: list[float] = []
        self._prompt_tokens = self._computed_tokens = 0

    def run(self) -> PipelineRun:
        for _ in range(self._concurrency):
            self._arrive()
        self._emit_all()
        while self._events:
            self._now, _, kind, number = heapq.heappop(self._events)
            if kind == "lane":
                self._add_lane(number)
            elif kind == "retire":
                self._retire(number)
            # Everything of one instant is known before waves are planned, as in the LOOP process.
            if not self._events or self._events[0][0] > self._now:
                self._emit_all()
        check(not self._live and not self._planner.lane_count(), "every request was computed")
        elapsed_s = self._now - (self._started_at or 0.0)
        return PipelineRun(
            seconds=elapsed_s,
            waves=self._next_wave - 1,
            requests=len(self._latency_s),
            prompt_tokens=self._prompt_tokens,
            computed_tokens=self._computed_tokens,
            busy_share=self._busy_s / (self._stages * elapsed_s),
            latency_s=tuple(self._latency_s),
        )

    def _at(self, when: float, kind: str, number: int) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (when, self._event_count, kind, number))

    def _arrive(self) -> None:
        prompt = next(self._prompts, None)
        if prompt is None:
            return
        self._rid += 1
        self._live[self._rid] = _Live(prompt, self._now, prompt.tokens - prompt.endpoint)
        self._waiting.append(self._rid)
        self._admit()

    def _admit(self) -> None:
        """Begin the admissions that may begin now."""
        admission = self._admission
        while self._waiting and admission.kind != "serial":
            if admission.kind == "one" and self._admitting:
                return
            self._begin_admission()

    def _begin_admission(self) -> None:
        rid = self._waiting.popleft()
        work_s = self._admission.work_s(self._live[rid].prompt)
        self._worked_until = max(self._worked_until, self._now) + work_s
        self._admitting += 1
        self._at(self._worked_until + self._admission.latency_s, "lane", rid)

    def _add_lane(self, rid: int) -> None:
        self._admitting -= 1
        self._is_held = False
        prompt = self._live[rid].prompt
        self._lane_tokens += prompt.tokens - prompt.endpoint
        self._planner.add_lane(rid, prompt.endpoint, prompt.tokens)
        self._admit()

    def _must_ask(self) -> bool:
        """Serial: ask for another request, because the lanes do not fill a wave."""
        if self._admission.kind != "serial" or not self._waiting:
            return False
        return self._lane_tokens < self._admission.wave_tokens

    def _emit_all(self) -> None:
        while not self._is_held and self._next_wave - self._oldest_wave < 2 * self._stages:
            if self._must_ask():
                self._is_held = True
                self._begin_admission()
                return
            slot = WaveSlot(self._next_wave, self._oldest_wave, self._admitting, Instant(self._now))
            planned = self._planner.plan(slot)
            if planned is None:
                deadline = self._planner.next_deadline()
                if deadline is not None:
                    self._at(max(deadline, self._now), "look", 0)
                return
            self._planner.accept(planned.spans)
            self._lane_tokens -= sum(span.length for span in planned.spans)
            self._run_wave(planned.spans)

    def _run_wave(self, spans: tuple[PlannedSpan, ...]) -> None:
        wave, self._next_wave = self._next_wave, self._next_wave + 1
        took_s = self._time.wave_s(spans)
        ready_at = self._now
        for stage in range(self._stages):
            start = max(self._free_at[stage], ready_at)
            if stage == 0:
                self._started_at = start if self._started_at is None else self._started_at
                if self._on_wave is not None:
                    self._on_wave(wave, spans, start)
            self._free_at[stage] = start + took_s
            self._busy_s += took_s
            ready_at = self._free_at[stage] + self._hop_s
        self._spans[wave] = spans
        self._at(self._free_at[-1], "retire", wave)

    def _retire(self, wave: int) -> None:
        check(wave == self._oldest_wave, "waves retire in order", wave=wave)
        self._oldest_wave += 1
        for span in self._spans.pop(wave):
            live = self._live[span.rid]
            live.left -= span.length
            if live.left == 0:
                del self._live[span.rid]
                self._latency_s.append(self._now - live.arrived_at)
                self._prompt_tokens += live.prompt.tokens
                self._computed_tokens += live.prompt.tokens - live.prompt.endpoint
                self._arrive()
