"""What both stage streams do with a wave: receive, forward, pick first tokens, send.

`runtime.stage_stream` decides when and on which thread or CUDA stream each step runs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.model.kv_store import KvStore
from wavepp_worker.model.metadata import WaveBatch
from wavepp_worker.model.sampling import sample
from wavepp_worker.model.stage import StageModel
from wavepp_worker.model.state_store import StateStore
from wavepp_worker.transport.activations import ActivationLink, Incoming
from wavepp_worker.wire.mailbox import Copy

Answer = tuple[int, int, float]  # rid, token, logprob


@dataclass(slots=True)
class StreamTimes:
    """Seconds since the start.  `gap` is all time between forwards, idle time included."""

    forward_s: float = 0.0
    gap_s: float = 0.0
    receive_wait_s: float = 0.0  # the part of `gap` in which activations were awaited; CPU only
    copy_s: float = 0.0  # on the copy thread or, on CUDA, enqueueing
    offload_bytes: int = 0
    onboard_bytes: int = 0

    def note_copies(self, copies: Sequence[Copy], slot_bytes: int) -> None:
        """Add one window's copies of one Install; those within the device move nothing here."""
        kinds = [copy.kind for copy in copies]
        self.offload_bytes += kinds.count("offload") * slot_bytes
        self.onboard_bytes += (kinds.count("onboard") + kinds.count("onboard_state")) * slot_bytes

    def stats(self) -> dict[str, float]:
        """Return counters by their metric names."""
        return {
            "wavepp_forward_seconds_total": self.forward_s,
            "wavepp_gap_seconds_total": self.gap_s,
            "wavepp_receive_wait_seconds_total": self.receive_wait_s,
            "wavepp_copy_seconds_total": self.copy_s,
            "wavepp_offload_bytes_total": float(self.offload_bytes),
            "wavepp_onboard_bytes_total": float(self.onboard_bytes),
        }


@dataclass(slots=True)
class StageWork:
    """One stage's model, cache and hops.  `link` is None with P = 1.

    Windows are numbered as LOOP reports them: attention first, if the stage has any, then states.
    """

    model: StageModel
    store: KvStore
    link: ActivationLink | None
    states: StateStore | None = None  # with delta layers

    def copy(self, copies: Sequence[Copy], times: StreamTimes) -> None:
        """Perform the copies of one Install, or enqueue them on the current CUDA stream."""
        began_at = time.monotonic()
        blocks, states = copies, []
        if self.states is not None:
            window = int(self.model.has_attention)
            blocks = [copy for copy in copies if copy.window != window]
            states = [copy for copy in copies if copy.window == window]
            # The windows' pools are apart, so their copies need no order between them.
            self.states.copy(states)
            times.note_copies(states, self.states.slot_bytes)
        self.store.copy(blocks)
        times.note_copies(blocks, self.store.block_bytes)
        times.copy_s += time.monotonic() - began_at

    def receive(self, chunks: Sequence[WaveChunk]) -> Incoming | None:
        """Post the receive of a wave; None on the first stage, which starts from tokens."""
        if self.link is None or self.model.is_first:
            return None
        return self.link.receive(self.model.input_spec(sum(chunk.length for chunk in chunks)))

    def forward(self, batch: WaveBatch, inputs: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """Run a wave.  `inputs` is None on the first stage, which starts from tokens."""
        if inputs is None:
            inputs = {} if batch.tokens_T is None else {"tokens": batch.tokens_T}
        return self.model.forward(batch, inputs, self.store, self.states)

    def send(self, outputs: dict[str, Tensor]) -> None:
        """Pass a wave on; the last stage has nobody to pass it to."""
        if self.link is not None and not self.model.is_last:
            self.link.send(outputs)

    def pick(
        self, batch: WaveBatch, chunks: Sequence[WaveChunk], outputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return the first answer tokens and their logprobs, on the device; None if none is due."""
        if not batch.answers:
            return None
        asked = [chunks[index] for index in batch.answers]
        positions = [chunk.start + chunk.length for chunk in asked]
        return sample(outputs["logits"], [chunk.sampling for chunk in asked], positions)


class Doorbell:
    """An eventfd that is readable from `ring` to the next `drain`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ring(self) -> None:
        """Make `fileno` readable; any thread."""
        os.eventfd_write(self._descriptor, 1)

    def drain(self) -> None:
        """Make it unreadable until the next `ring`."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return

    def fileno(self) -> int:
        """Return the descriptor for a poll set."""
        return self._descriptor

    def close(self) -> None:
        """Give the descriptor back.  Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def pair_answers(
    batch: WaveBatch,
    chunks: Sequence[WaveChunk],
    tokens: Sequence[int],
    logprobs: Sequence[float],
) -> tuple[Answer, ...]:
    """Pair tokens with their requests.

    Raises:
        ArithmeticError: the forward produced NaN.
    """
    answers = []
    for index, token, logprob in zip(batch.answers, tokens, logprobs, strict=True):
        if math.isnan(logprob):
            raise ArithmeticError("the forward produced NaN: weights or kernels are broken")
        answers.append((chunks[index].rid, token, logprob))
    return tuple(answers)
