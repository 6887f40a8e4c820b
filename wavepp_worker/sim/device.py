"""The device of one simulated rank: a copy stream and a compute stream, both late.

    copies   in order, at any time from the moment they are enqueued        [algorithms 16.2]
    waves    in order, after their activations and after as many copies as `RunWave` says

So a copy of a later Install may run before, during or after an earlier wave: what the rules do
not order, a seed does.  A copy takes time as well: of each Install's copies one is seen half done,
and a slot that a wave will write holds nothing useful from its start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from wavepp_worker.base.errors import check
from wavepp_worker.executor.commands import RunWave
from wavepp_worker.executor.ports import WaveFenced
from wavepp_worker.sim.digest import DigestStage, answer_of
from wavepp_worker.wire.mailbox import Copy

Activations = list[list[bytes]]  # per chunk, per block
Later = Callable[[Callable[[], object]], None]


class SimDevice:
    """Runs what the LoopMachine enqueues.

    Args:
        later: schedules a step of this device after a drawn delay.
        pick: draws a number below its argument.
        on_fence: told of each complete wave, in order.
        on_output: gets the activations of each complete wave.
        before_write: told (window, slot, rid) of each block that a wave is about to write.
    """

    def __init__(
        self,
        stage: DigestStage,
        *,
        is_first: bool,
        block_tokens: int,
        later: Later,
        pick: Callable[[int], int],
        on_fence: Callable[[WaveFenced], None],
        on_output: Callable[[int, Activations], None],
        before_write: Callable[[int, int, int], None],
    ) -> None:
        self.stage = stage
        self._is_first = is_first
        self._block_tokens = block_tokens
        self._later, self._pick = later, pick
        self._on_fence, self._on_output = on_fence, on_output
        self._before_write = before_write
        self._copies: deque[Sequence[Copy]] = deque()
        self._waves: deque[RunWave] = deque()
        self._inputs: dict[int, Activations] = {}
        self._is_computing = self._is_copying = False
        self.copies_enqueued = self.copies_done = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is enqueued or under way."""
        return not (self._copies or self._waves or self._inputs)

    def enqueue_copies(self, copies: Sequence[Copy]) -> None:
        """Put the copies of one Install on the copy stream."""
        self.copies_enqueued += 1
        self._copies.append(copies)
        self._start_copies()

    def enqueue_wave(self, run: RunWave) -> None:
        """Put a wave on the compute stream."""
        check(run.copies_before <= self.copies_enqueued, "no wave waits for ever", wave=run.wave)
        self._waves.append(run)
        self._start_wave()

    def take_activations(self, wave: int, activations: Activations) -> None:
        """The stage before is done with a wave."""
        self._inputs[wave] = activations
        self._start_wave()

    def _start_copies(self) -> None:
        if self._copies and not self._is_copying:
            self._is_copying = True
            self._later(self._copy)

    def _copy(self) -> None:
        copies = self._copies[0]
        half = self._pick(len(copies) + 1)
        if half == len(copies):  # all of them at once
            self.stage.copy(copies)
            self._end_copies()
            return
        self.stage.copy(copies[:half])
        source = self.stage.begin_copy(copies[half])

        def go_on() -> None:
            self.stage.end_copy(copies[half], source)
            self.stage.copy(copies[half + 1 :])
            self._end_copies()

        self._later(go_on)

    def _end_copies(self) -> None:
        self._copies.popleft()
        self.copies_done += 1
        self._is_copying = False
        self._start_copies()
        self._start_wave()

    def _start_wave(self) -> None:
        if self._is_computing or not self._waves:
            return
        run = self._waves[0]
        if self.copies_done < run.copies_before:
            return
        if self._is_first or run.wave in self._inputs:
            self._is_computing = True
            for chunk in run.chunks:
                self.stage.begin_run(chunk)
            self._later(self._compute)

    def _compute(self) -> None:
        run = self._waves.popleft()
        self._is_computing = False
        inputs = self._inputs.pop(run.wave, None)
        outputs: Activations = []
        answers = []
        for index, chunk in enumerate(run.chunks):
            first = chunk.start // self._block_tokens
            stop = -(-(chunk.start + chunk.length) // self._block_tokens)
            for window, table in enumerate(chunk.tables):
                for slot in table[first:stop]:
                    self._before_write(window, slot, chunk.rid)
            for state in chunk.states:
                for slot in (state.working, state.snapshot):
                    if slot >= 0:
                        self._before_write(state.window, slot, chunk.rid)
            output = self.stage.run(chunk, inputs[index] if inputs else [])
            outputs.append(output)
            if chunk.wants_token:
                answers.append((chunk.rid, answer_of(output[-1]), -1.0))
        check(inputs is None or len(inputs) == len(run.chunks), "activations fit", wave=run.wave)
        self._on_output(run.wave, outputs)
        self._on_fence(WaveFenced(run.wave, tuple(answers)))
        self._start_wave()
