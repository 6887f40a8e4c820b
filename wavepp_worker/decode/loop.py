"""The decode loop: takes requests, fetches their state, steps the model, streams tokens.

One asyncio task makes all decisions; the model runs in a thread of its own and fetches in the
reader's threads, so the event loop is never blocked.  Cancelling sets a flag that the task acts
on between two steps.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from wavepp_worker.base.errors import DeviceError, InvariantError, TransferError, WavePPError
from wavepp_worker.base.units import ceil_div
from wavepp_worker.decode.batcher import Batcher, DecodeSequence
from wavepp_worker.decode.request import DecodeRequest
from wavepp_worker.decode.runner import ModelRunner
from wavepp_worker.transfer.fetch import UnsettledError
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.transfer.reader import StateReader

logger = logging.getLogger(__name__)


class Picked(Struct, frozen=True):
    """One token of an answer.  `finish_reason` is set on the last one."""

    token: int
    logprob: float
    finish_reason: str = ""


class Answer:
    """One request in the worker, and its stream of tokens."""

    def __init__(self, rid: int, request: DecodeRequest) -> None:
        self.rid = rid
        self.request = request
        self.count = 0  # tokens so far
        self.is_wanted = True
        self.is_fetching = False  # the hand-off was taken up; it ends with the fetch
        self.is_ended = False
        # Bounded by the request's tokens_max, so it needs no limit of its own.
        self._stream: asyncio.Queue[Picked | WavePPError | None] = asyncio.Queue()

    async def next(self) -> Picked | None:
        """Return the next token; None if the request was cancelled.

        Raises:
            WavePPError: the answer cannot be continued.
        """
        item = await self._stream.get()
        if isinstance(item, WavePPError):
            raise item
        return item

    def pick(self, token: int, logprob: float) -> bool:
        """Stream a token; True if the answer ends with it."""
        self.count += 1
        reason = self.request.stops.finish_reason(token, self.count)
        self._stream.put_nowait(Picked(token, logprob, reason))
        self.is_ended = reason != ""
        return self.is_ended

    def end(self, error: WavePPError | None) -> None:
        """End the stream early, with an error or because it was cancelled.  Idempotent."""
        if not self.is_ended:
            self.is_ended = True
            self._stream.put_nowait(error)


class DecodeLoop:
    """Everything between a checked request and its tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        reader: StateReader,
        batcher: Batcher,
        *,
        computes_lost_state: bool = True,
    ) -> None:
        self._runner = runner
        self._reader = reader
        self._batcher = batcher
        self._computes_lost_state = computes_lost_state
        self._answers: dict[int, Answer] = {}
        self._rids = itertools.count(1)
        self._wake = asyncio.Event()
        self._fetches: set[asyncio.Task[None]] = set()
        self._model_thread = ThreadPoolExecutor(1, "model")
        self._task: asyncio.Task[None] | None = None
        self.error: WavePPError | None = None  # the loop has failed for good
        self.failed = asyncio.Event()
        self.token_count = 0
        self.lost_count = 0  # hand-offs computed here instead

    def start(self) -> None:
        """Start the task; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="decode-loop")

    def submit(self, request: DecodeRequest) -> Answer:
        """Take a request; its first token, if handed over, is streamed at once.

        Raises:
            OverloadedError: too many requests wait.
            DeviceError: the model has failed.
        """
        if self.error is not None:
            raise self.error
        answer = Answer(next(self._rids), request)
        handoff, tokens = request.handoff, list(request.prompt)
        sequence = DecodeSequence(answer.rid, tokens, 0, request.sampling)
        if handoff is not None:
            tokens.append(handoff.first_token)
            sequence.handed_tokens = handoff.prompt_tokens
            if request.stops.finish_reason(handoff.first_token, 1):
                answer.pick(handoff.first_token, handoff.first_logprob)
                self.decline(handoff)
                return answer
        self._batcher.add(sequence)
        if handoff is not None:
            answer.pick(handoff.first_token, handoff.first_logprob)
        self._answers[answer.rid] = answer
        self._wake.set()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Nobody waits for the answer any more; its blocks are freed soon.  Idempotent."""
        answer.is_wanted = False
        answer.end(None)
        self._wake.set()

    def decline(self, handoff: Handoff) -> None:
        """Nobody will fetch this state: let the prefill worker free it now."""
        self._spawn(self._reader.decline(handoff))

    def used_blocks(self) -> int:
        """Return blocks in use."""
        return self._batcher.used_blocks()

    def is_idle(self) -> bool:
        """Return whether no request is left."""
        return not self._answers and not self._fetches

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by their metric names."""
        return {
            "wavepp_decode_requests": self._batcher.active_count(),
            "wavepp_decode_waiting_requests": self._batcher.waiting_count(),
            "wavepp_decode_used_blocks": self._batcher.used_blocks(),
            "wavepp_decode_tokens_total": self.token_count,
            "wavepp_decode_evictions_total": self._batcher.evictions,
            "wavepp_decode_lost_handoffs_total": self.lost_count,
        } | self._reader.stats()

    async def close(self) -> None:
        """Cancel what is left and stop; fetches under way are waited for.  Idempotent."""
        for answer in self._answers.values():
            self.cancel(answer)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
            self._drop_unwanted()
        if self._fetches:
            await asyncio.wait(self._fetches)
        await asyncio.to_thread(self._model_thread.shutdown)

    async def _run(self) -> None:
        try:
            while True:
                self._wake.clear()
                self._drop_unwanted()
                for sequence in self._batcher.admit():
                    self._spawn(self._fetch(sequence))
                if not await self._step():
                    await self._wake.wait()
        except Exception as error:  # the top of all decisions: nothing can go on without it
            self._fail(error)

    async def _step(self) -> bool:
        """Run one step; False if there is nothing to run."""
        chunks = self._batcher.plan()
        if not chunks:
            return False
        biases = {}
        for chunk in chunks:
            request = self._answers[chunk.rid].request
            if chunk.wants_token and request.has_biases:
                text = self._batcher.text(chunk.rid)
                biases[chunk.rid] = request.biases(text[len(request.prompt) :])
        picked = await asyncio.get_running_loop().run_in_executor(
            self._model_thread, self._runner.step, chunks, biases
        )
        self._batcher.computed(chunks)
        for rid, token, logprob in picked:
            answer = self._answers[rid]
            if not answer.is_wanted:
                continue
            self.token_count += 1
            self._batcher.append(rid, token)
            if answer.pick(token, logprob):
                self._forget(rid)
        return True

    async def _fetch(self, sequence: DecodeSequence) -> None:
        answer = self._answers[sequence.rid]
        handoff = answer.request.handoff
        if handoff is None:
            raise InvariantError("only handed state is fetched")
        blocks = ceil_div(handoff.prompt_tokens, handoff.block_tokens)
        answer.is_fetching = True
        try:
            await self._reader.fetch(
                handoff, sequence.table[:blocks], lambda: answer.is_wanted, sequence.state_slot
            )
        except UnsettledError:
            raise  # blocks that may be written to at any time: only a restart makes them usable
        except TransferError as error:
            is_lost = answer.is_wanted and not isinstance(error, IncompatibleError)
            if is_lost and self._computes_lost_state:
                logger.warning("hand-off lost, computing the prompt here: %s", error)
                self.lost_count += 1
                self._batcher.lost(sequence.rid)
            else:
                self._batcher.fetch_failed(sequence.rid)
                answer.end(error)
                del self._answers[sequence.rid]
        else:
            self._batcher.fetched(sequence.rid)
        self._wake.set()

    def _drop_unwanted(self) -> None:
        for answer in [answer for answer in self._answers.values() if not answer.is_wanted]:
            self._forget(answer.rid)

    def _forget(self, rid: int) -> None:
        answer = self._answers[rid]
        if not self._batcher.drop(rid):
            return
        del self._answers[rid]
        handoff = answer.request.handoff
        if handoff is not None and not answer.is_fetching:
            self.decline(handoff)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._fetches.add(task)
        task.add_done_callback(self._on_fetch_done)

    def _on_fetch_done(self, task: asyncio.Task[None]) -> None:
        self._fetches.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Nothing can be served any more; the owner of the loop is to end the process."""
        if self.error is not None:
            return
        logger.error("the decode loop failed", exc_info=error)
        self.error = DeviceError(f"the decode worker failed: {error}")
        if self._task is not None:
            self._task.cancel()
        for answer in self._answers.values():
            answer.end(self.error)
        self.failed.set()
