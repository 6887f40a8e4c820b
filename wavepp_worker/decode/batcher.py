"""Continuous batching: which sequences run in the next step, and who owns which block.  Pure.

    WAITING ──admit──▶ FETCHING ──fetched, lost──▶ RUNNING ──drop──▶ gone
       ▲        └── nothing to fetch ──────────────▶ │
       └──────────── evicted, computed again ────────┘

Every step computes each running sequence's tokens that have no keys and values yet: one for a
sequence in full swing, a chunk for one that was evicted (or had no hand-off).  When a sequence
grows and no block is free, the youngest running one is evicted and computed again later, so the
oldest always goes on.

A model with recurrent layers also has one state slot for each active sequence; the step zeroes it
when it computes a sequence from its first token, whatever a failed fetch has left there.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from wavepp_worker.base.errors import OverloadedError, check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.wire.mailbox import Sampling

STATE_WINDOW = 1  # after the attention window, 0


class Stage(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    FETCHING = "fetching"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """One answer in the making."""

    rid: int
    tokens: list[int]  # prompt and answer so far
    handed_tokens: int  # their keys and values come from the prefill worker; 0: computed here
    sampling: Sampling
    stage: Stage = Stage.WAITING
    computed: int = 0  # tokens whose keys and values are in `table`
    table: list[int] = field(default_factory=list)
    state_slot: int | None = None  # while it is active, if the model has states


class Batcher:
    """Sequences and blocks of one decode worker.

    Args:
        blocks: blocks in the pool.
        requests_max: sequences that run or fetch at once.
        queue_max: sequences that wait.
        chunk_tokens: tokens computed per step at most for sequences that are computed again.
        has_states: whether the model has recurrent layers; `requests_max` slots are theirs.
    """

    def __init__(
        self,
        blocks: int,
        block_tokens: int,
        requests_max: int,
        queue_max: int,
        chunk_tokens: int,
        *,
        has_states: bool = False,
    ) -> None:
        self.block_count = blocks
        self.block_tokens = block_tokens
        self.requests_max = requests_max
        self.queue_max = queue_max
        self.chunk_tokens = chunk_tokens
        self.evictions = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._free_slots = list(range(requests_max - 1, -1, -1)) if has_states else None
        self._waiting: deque[DecodeSequence] = deque()
        self._active: dict[int, DecodeSequence] = {}  # FETCHING or RUNNING, oldest first

    def add(self, sequence: DecodeSequence) -> None:
        """Queue a sequence.

        Raises:
            OverloadedError: the queue is full.
        """
        if len(self._waiting) >= self.queue_max:
            raise OverloadedError(f"{len(self._waiting)} requests wait for the decode worker")
        check(self._blocks_for(len(sequence.tokens)) <= self.block_count, "it fits the empty pool")
        self._waiting.append(sequence)

    def admit(self) -> list[DecodeSequence]:
        """Give blocks to waiting sequences, first come first served.

        Returns those whose state must be fetched into the first `ceil(handed_tokens / B)` blocks
        of their table; `fetched`, `lost` or `fetch_failed` follows for each.
        """
        to_fetch = []
        while self._waiting and len(self._active) < self.requests_max:
            sequence = self._waiting[0]
            needed = self._blocks_for(len(sequence.tokens))
            # One block per active sequence stays free, else the next growth evicts this one.
            if self._active and needed + len(self._active) > len(self._free):
                break
            if needed > len(self._free):
                break
            self._waiting.popleft()
            sequence.table = [self._free.pop() for _ in range(needed)]
            if self._free_slots is not None:
                sequence.state_slot = self._free_slots.pop()
            sequence.stage = Stage.FETCHING if sequence.handed_tokens else Stage.RUNNING
            self._active[sequence.rid] = sequence
            if sequence.handed_tokens:
                to_fetch.append(sequence)
        return to_fetch

    def fetched(self, rid: int) -> None:
        """The handed state is in the sequence's blocks."""
        sequence = self._active[rid]
        check(sequence.stage is Stage.FETCHING, "only what is fetched arrives", rid=rid)
        sequence.stage = Stage.RUNNING
        sequence.computed = sequence.handed_tokens
        sequence.handed_tokens = 0  # a second time it is computed here

    def lost(self, rid: int) -> None:
        """The handed state will not come: compute it here, into the same blocks.

        Nothing is written to them by the failed fetch any more.
        """
        sequence = self._active[rid]
        check(sequence.stage is Stage.FETCHING, "only what is fetched is lost", rid=rid)
        sequence.stage = Stage.RUNNING
        sequence.handed_tokens = 0

    def fetch_failed(self, rid: int) -> None:
        """The handed state will not come, and nothing is written to the blocks any more."""
        sequence = self._active.pop(rid)
        check(sequence.stage is Stage.FETCHING, "only what is fetched fails", rid=rid)
        self._free_blocks(sequence)

    def plan(self) -> list[WaveChunk]:
        """Return the next step's chunks; sequences grow, and the youngest may be evicted."""
        budget = self.chunk_tokens
        chunks = []
        for sequence in list(self._active.values()):
            if sequence.stage is not Stage.RUNNING or not self._grow(sequence):
                continue
            missing = len(sequence.tokens) - sequence.computed
            length = missing if missing == 1 else min(missing, budget)
            if length == 0:
                continue
            budget -= length if length > 1 else 0
            start = sequence.computed
            part = sequence.tokens[start : start + length]
            chunks.append(
                WaveChunk(
                    rid=sequence.rid,
                    start=start,
                    length=length,
                    tables=self._tables(sequence),
                    tokens=struct.pack(f"<{length}I", *part),
                    wants_token=length == missing,
                    sampling=sequence.sampling,
                    states=self._states(sequence),
                )
            )
        return chunks

    def computed(self, chunks: Sequence[WaveChunk]) -> None:
        """A planned step ran."""
        for chunk in chunks:
            self._active[chunk.rid].computed = chunk.start + chunk.length

    def append(self, rid: int, token: int) -> None:
        """A running sequence's next token was picked."""
        self._active[rid].tokens.append(token)

    def text(self, rid: int) -> Sequence[int]:
        """Return a running sequence's tokens: prompt, then answer so far."""
        return self._active[rid].tokens

    def drop(self, rid: int) -> bool:
        """Forget a sequence that is finished or not wanted; False while its state is fetched."""
        sequence = self._active.get(rid)
        if sequence is None:
            self._waiting = deque(other for other in self._waiting if other.rid != rid)
            return True
        if sequence.stage is Stage.FETCHING:
            return False
        del self._active[rid]
        self._free_blocks(sequence)
        return True

    def used_blocks(self) -> int:
        """Return blocks that are not free."""
        return self.block_count - len(self._free)

    def active_count(self) -> int:
        """Return sequences that run or fetch."""
        return len(self._active)

    def waiting_count(self) -> int:
        """Return sequences that wait."""
        return len(self._waiting)

    def check_invariants(self) -> None:
        """Raise `InvariantError` unless every block has exactly one owner."""
        owned = [block for sequence in self._active.values() for block in sequence.table]
        check(len(set(owned)) == len(owned), "a block has one owner")
        check(not set(owned) & set(self._free), "an owned block is not free")
        check(len(owned) + len(self._free) == self.block_count, "no block is lost")
        check(all(not sequence.table for sequence in self._waiting), "who waits owns nothing")
        check(all(s.state_slot is None for s in self._waiting), "who waits owns no state")
        if self._free_slots is not None:
            slots = [sequence.state_slot for sequence in self._active.values()]
            check(
                sorted([*self._free_slots, *(-1 if slot is None else slot for slot in slots)])
                == list(range(self.requests_max)),
                "a state slot has one owner",
            )

    def _grow(self, sequence: DecodeSequence) -> bool:
        """Get the blocks for the sequence's tokens; False if it had to give way itself."""
        while len(sequence.table) < self._blocks_for(len(sequence.tokens)):
            if self._free:
                sequence.table.append(self._free.pop())
                continue
            # At or after this sequence in the order, so it has no chunk in this step yet.
            youngest = [s for s in self._active.values() if s.stage is Stage.RUNNING][-1]
            self._evict(youngest)
            if youngest is sequence:
                return False
        return sequence.stage is Stage.RUNNING

    def _evict(self, sequence: DecodeSequence) -> None:
        self.evictions += 1
        del self._active[sequence.rid]
        self._free_blocks(sequence)
        sequence.stage = Stage.WAITING
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def _tables(self, sequence: DecodeSequence) -> tuple[tuple[int, ...], ...]:
        blocks = tuple(sequence.table)
        return (blocks,) if sequence.state_slot is None else (blocks, ())

    def _states(self, sequence: DecodeSequence) -> tuple[ChunkState, ...]:
        slot = sequence.state_slot
        return () if slot is None else (ChunkState(STATE_WINDOW, slot),)

    def _free_blocks(self, sequence: DecodeSequence) -> None:
        self._free.extend(reversed(sequence.table))
        sequence.table = []
        if self._free_slots is not None and sequence.state_slot is not None:
            self._free_slots.append(sequence.state_slot)
            sequence.state_slot = None

    def _blocks_for(self, tokens: int) -> int:
        return ceil_div(tokens, self.block_tokens)
