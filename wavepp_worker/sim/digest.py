"""A stage whose "cache" is digests, so that any wrong reuse changes an answer.

    block i of an attention window = H(block i-1 in the table, input of block i)
    state of a recurrent window    = H(state before, input of block i)
    output of block i              = H(every block that its tokens attend to, every state)

The input of a block is its tokens on stage 0, and the output of the stage before elsewhere.  A
slot that holds another prefix, a copy that ran too late or a state one block ahead all show in
the output, hence in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from wavepp_worker.base.errors import check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.wire.mailbox import Copy

TOKEN_BYTES = 4
NOTHING = b"nothing was ever written here"
HALF = b"a write to this slot is under way"
ZERO = b"zero"

Content = tuple[tuple[bytes, ...], ...]
"""Per window: its blocks, or its one state."""


def digest(*parts: bytes) -> bytes:
    """Return eight bytes that name the parts."""
    maker = blake2b(digest_size=8)
    for part in parts:
        maker.update(len(part).to_bytes(4, "little"))
        maker.update(part)
    return maker.digest()


def answer_of(output: bytes) -> int:
    """Return the first answer token that a prompt's last output stands for."""
    return int.from_bytes(output[:4], "little")


class DigestStage:
    """One stage's slots and what waves and copies do to them.

    Args:
        rank: mixed into every digest, so that stages never agree by accident.
        specs: the windows of this rank.
    """

    def __init__(self, rank: int, specs: Sequence[WindowSpec], block_tokens: int) -> None:
        self._name = b"stage %d" % rank
        self._specs = specs
        self._block_tokens = block_tokens
        self._device = [[NOTHING] * spec.slots for spec in specs]
        self._host = [[NOTHING] * spec.host_slots for spec in specs]

    def copy(self, copies: Sequence[Copy]) -> None:
        """Perform the copies of one Install, in their order."""
        for copy in copies:
            device, host = self._device[copy.window], self._host[copy.window]
            match copy.kind:
                case "offload":
                    host[copy.target] = device[copy.source]
                case "onboard" | "onboard_state":
                    device[copy.target] = host[copy.source]
                case "load_state":
                    device[copy.target] = device[copy.source]
                case _:
                    check(copy.kind == "zero_state", "a kind of copy", kind=copy.kind)
                    device[copy.target] = ZERO

    def begin_copy(self, copy: Copy) -> bytes:
        """Begin one copy: its target is of no use until `end_copy`.  Return what is copied."""
        source = (
            ZERO if copy.kind == "zero_state" else self._side(copy, of_target=False)[copy.source]
        )
        self._side(copy, of_target=True)[copy.target] = HALF
        return source

    def end_copy(self, copy: Copy, source: bytes) -> None:
        """End a copy that began; nobody may have touched either end of it.  [I46]"""
        target = self._side(copy, of_target=True)
        check(target[copy.target] == HALF, "a copy's target was used meanwhile [I46]", copy=copy)
        if copy.kind != "zero_state":
            now = self._side(copy, of_target=False)[copy.source]
            check(now == source, "a copy's source was written meanwhile [I46]", copy=copy)
        target[copy.target] = source

    def _side(self, copy: Copy, *, of_target: bool) -> list[bytes]:
        """Return the slots on one side of a copy."""
        is_host = copy.kind == "offload" if of_target else copy.kind in ("onboard", "onboard_state")
        return (self._host if is_host else self._device)[copy.window]

    def begin_run(self, chunk: WaveChunk) -> None:
        """A wave starts: the blocks that it will write are of no use until `run`."""
        first = chunk.start // self._block_tokens
        stop = ceil_div(chunk.start + chunk.length, self._block_tokens)
        for window, table in enumerate(chunk.tables):
            if self._specs[window].is_dense:
                slots = self._device[window]
                for slot in table[first:stop]:
                    slots[slot] = HALF

    def run(self, chunk: WaveChunk, inputs: Sequence[bytes]) -> list[bytes]:
        """Compute a chunk; return the output of each of its blocks.

        Args:
            inputs: per block of the chunk, the output of the stage before; () on stage 0.
        """
        first = chunk.start // self._block_tokens
        blocks = ceil_div(chunk.start + chunk.length, self._block_tokens) - first
        if not inputs:
            stride = self._block_tokens * TOKEN_BYTES
            inputs = [chunk.tokens[at : at + stride] for at in range(0, len(chunk.tokens), stride)]
        check(len(inputs) == blocks, "one input per block", rid=chunk.rid, inputs=len(inputs))
        views = [self._view(window, chunk, first) for window in range(len(self._specs))]
        outputs = []
        for index, block_input in enumerate(inputs, first):
            maker = blake2b(self._name, digest_size=8)
            for view in views:
                maker.update(view.advance(index, block_input))
            outputs.append(maker.digest())
        for state in chunk.states:
            if state.snapshot >= 0:
                slots = self._device[state.window]
                slots[state.snapshot] = slots[state.working]
        return outputs

    def content(
        self, tables: Sequence[Sequence[int]], states: Sequence[int], tokens: int
    ) -> Content:
        """Return what a decode worker would read.

        Args:
            states: working slot per recurrent window, in window order.
            tokens: prompt length.
        """
        blocks, working = ceil_div(tokens, self._block_tokens), iter(states)
        return tuple(
            (self._device[window][next(working)],)
            if spec.is_recurrent
            else tuple(self._attended(window, tables[window], blocks - 1))
            for window, spec in enumerate(self._specs)
        )

    def block(self, window: int, slot: int, *, is_host: bool = False) -> bytes:
        """Return what one slot holds."""
        return (self._host if is_host else self._device)[window][slot]

    def _view(self, window: int, chunk: WaveChunk, first: int) -> _View:
        spec, slots = self._specs[window], self._device[window]
        if spec.is_recurrent:
            slot = next(state.working for state in chunk.states if state.window == window)
            return _StateView(self._name, slots, slot)
        if spec.is_sliding:
            needed = spec.needed_blocks(self._block_tokens)
            return _SlidingView(self._name, slots, chunk.tables[window], needed)
        return _DenseView(self._name, slots, chunk.tables[window], first)

    def _attended(self, window: int, table: Sequence[int], index: int) -> Iterator[bytes]:
        """Yield the blocks that tokens of block `index` attend to."""
        spec = self._specs[window]
        first = 0
        if spec.is_sliding:
            first = max(0, index + 1 - spec.needed_blocks(self._block_tokens))
        for block in range(first, index + 1):
            check(table[block] >= 0, "a block that is attended to has a slot", block=block)
            yield self._device[window][table[block]]


class _View:
    """A chunk's way through one window."""

    def advance(self, index: int, block_input: bytes) -> bytes:
        """Compute block `index`; return a digest of everything that it sees."""
        raise AssertionError


class _StateView(_View):
    def __init__(self, name: bytes, slots: list[bytes], slot: int) -> None:
        self._name, self._slots, self._slot = name, slots, slot

    def advance(self, index: int, block_input: bytes) -> bytes:
        slots, slot = self._slots, self._slot
        slots[slot] = digest(self._name, slots[slot], block_input)
        return slots[slot]


class _DenseView(_View):
    """Everything before is read once per chunk; after that each block adds itself."""

    def __init__(self, name: bytes, slots: list[bytes], table: Sequence[int], first: int) -> None:
        self._name, self._slots, self._table = name, slots, table
        self._seen: Any = blake2b(digest_size=8)
        for block in range(first):
            check(table[block] >= 0, "a dense block has a slot", block=block)
            self._seen.update(slots[table[block]])

    def advance(self, index: int, block_input: bytes) -> bytes:
        slots, table = self._slots, self._table
        before = slots[table[index - 1]] if index else ZERO
        slots[table[index]] = digest(self._name, before, block_input)
        self._seen.update(slots[table[index]])
        seen: bytes = self._seen.copy().digest()
        return seen


class _SlidingView(_View):
    def __init__(self, name: bytes, slots: list[bytes], table: Sequence[int], needed: int) -> None:
        self._name, self._slots, self._table, self._needed = name, slots, table, needed

    def advance(self, index: int, block_input: bytes) -> bytes:
        slots, table = self._slots, self._table
        first = max(0, index + 1 - self._needed)
        for block in range(min(first, max(0, index - 1)), index + 1):
            check(table[block] >= 0, "a block that is attended to has a slot", block=block)
        # The block before is at hand in every run: an endpoint needs at least one.
        before = slots[table[index - 1]] if index else ZERO
        slots[table[index]] = digest(self._name, before, block_input)
        return digest(self._name, *(slots[table[block]] for block in range(first, index + 1)))


def reference(
    windows: Sequence[Sequence[WindowSpec]], block_tokens: int, prompt: bytes
) -> tuple[bytes, list[Content]]:
    """Return (last output, hand-off content per stage) of a prompt computed cold and alone.

    Args:
        windows: of every rank.
        prompt: u32 little-endian tokens.
    """
    tokens = len(prompt) // TOKEN_BYTES
    blocks = ceil_div(tokens, block_tokens)
    outputs: list[bytes] = []
    contents = []
    for rank, specs in enumerate(windows):
        roomy = [
            WindowSpec(
                kind=spec.kind,
                slots=blocks,
                span_tokens=spec.span_tokens,
                chunk_tokens=spec.chunk_tokens,
            )
            for spec in specs
        ]
        stage = DigestStage(rank, roomy, block_tokens)
        recurrent = [window for window, spec in enumerate(specs) if spec.is_recurrent]
        stage.copy([Copy("zero_state", window, -1, 0) for window in recurrent])
        tables = tuple(() if spec.is_recurrent else tuple(range(blocks)) for spec in specs)
        chunk = WaveChunk(
            rid=0,
            start=0,
            length=tokens,
            tables=tables,
            states=tuple(ChunkState(window, 0) for window in recurrent),
            tokens=prompt,
        )
        outputs = stage.run(chunk, outputs)
        contents.append(stage.content(tables, [0] * len(recurrent), tokens))
    return outputs[-1], contents
