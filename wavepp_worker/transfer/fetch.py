"""One fetch: every stage of one hand-off, straight through, in one thread.

    ask every desk (Open) ──▶ READ stage 0 │ READ stage 1 │ ...  ──▶ Close each ──▶ all `held`?
                                 into layers [first, stop) of the local blocks

The local store holds all layers of a block in one row, and a stage's layers are a contiguous part
of it; so one stage is one strided list with one descriptor per block.  Long reads are posted in
pieces, because a transport may copy inside the post call and holds must be renewed meanwhile.
Data counts only after every desk answered `held`.  [algorithms 13, A54, S16]
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from wavepp_worker.base.errors import TransferError
from wavepp_worker.base.units import ceil_div
from wavepp_worker.transfer.agent import BlockPool, StatePool, TransferAgent
from wavepp_worker.transfer.desk_link import LinkPool
from wavepp_worker.transfer.desk_wire import (
    DESK_VERSION,
    Close,
    Held,
    Open,
    Opened,
    Refused,
    Renew,
)
from wavepp_worker.transfer.handoff import Handoff, IncompatibleError
from wavepp_worker.wire.mailbox import StageHandoff

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20  # largest READ posted at once: below a second on every transport measured
POLL_MIN_S, POLL_MAX_S = 0.0002, 0.005  # pause between two looks at the transfers
RELEASE_S = 1.0  # how long NIXL is asked again to let go of a failed transfer


class UnsettledError(TransferError):
    """A failed transfer could not be stopped: the local blocks must never be used again."""


class Peers(Protocol):
    """The exporters whose metadata is loaded."""

    def known(self, address: str) -> str: ...
    def learn(self, address: str, opened: Opened) -> None: ...
    def forget(self, address: str, agent: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSide:
    """What every fetch of one decode worker shares."""

    agent: TransferAgent
    links: LinkPool
    peers: Peers
    layers: int
    store: BlockPool
    states: StatePool | None
    recurrent: tuple[int, ...]  # layers whose state is in `states`; the others are in `store`
    block_tokens: int
    dtype: str
    fingerprint: str
    answer_s: float  # longest wait for a desk's answer
    fetch_s: float  # longest time of a fetch

    def split(self, layer: int) -> tuple[int, int]:
        """Return how many attention and recurrent layers come before `layer`."""
        states = sum(other < layer for other in self.recurrent)
        return layer - states, states


class Fetch:
    """One hand-off on its way into local blocks."""

    def __init__(
        self,
        local: LocalSide,
        handoff: Handoff,
        block_ids: Sequence[int],
        is_wanted: Callable[[], bool],
        state_slot: int | None = None,
    ) -> None:
        self._local = local
        self._state_slot = state_slot
        self._handoff = handoff
        self._block_ids = np.asarray(block_ids, np.int32)
        self._is_wanted = is_wanted
        self._stages: list[StageRead] = []

    def run(self) -> None:
        """Do it.  Afterwards, however it ended, nothing is written to the blocks any more.

        Raises:
            TransferError: the blocks hold nothing usable; `UnsettledError`: they never will.
        """
        local = self._local
        self._handoff.check_fits(local.fingerprint, local.block_tokens, local.layers)
        try:
            self._read_all(time.monotonic() + local.fetch_s)
        finally:
            self._settle()

    def _read_all(self, deadline: float) -> None:
        for stage in self._handoff.stages:
            self._stages.append(StageRead(self._local, stage))
        for read in self._stages:
            read.ask_open()
        for read in self._stages:
            read.finish_open(self._handoff, self._block_ids, self._state_slot)
        pause_s = POLL_MIN_S
        while not all(read.is_closed for read in self._stages):
            is_moving = False
            for read in self._stages:
                if not self._is_wanted():
                    raise TransferError("the fetch is no longer wanted")
                if time.monotonic() >= deadline:
                    raise TransferError(f"the fetch took longer than {self._local.fetch_s} s")
                is_moving |= read.advance()
            pause_s = POLL_MIN_S if is_moving else min(2 * pause_s, POLL_MAX_S)
            if not is_moving:
                time.sleep(pause_s)
        for read in self._stages:
            read.confirm()

    def _settle(self) -> None:
        """Stop what still runs, then end the holds, then close the sockets, on every stage."""
        unsettled: UnsettledError | None = None
        for read in self._stages:
            try:
                read.release()
            except UnsettledError as error:
                unsettled = error
            read.abandon()
        if unsettled is not None:
            raise unsettled


class StageRead:
    """One stage of a fetch: its desk, its ticket, its transfers."""

    def __init__(self, local: LocalSide, stage: StageHandoff) -> None:
        self._local = local
        self._stage = stage
        self._link = local.links.take(stage.control_address)
        self._is_link_sound = False  # all its questions were answered
        self._ticket = secrets.token_urlsafe(24)
        self._ask = 0
        self._agent = ""
        self._hold_s = self._renew_at = 0.0
        self._handles: list[Any] = []  # lists of rows, then the piece under way
        self._lists = 0  # of the handles
        # Still to be posted: local list, local rows, remote list, remote rows.
        self._pieces: list[tuple[Any, Any, Any, Any]] = []
        self.is_closed = False  # everything was read and Close was sent

    def ask_open(self) -> None:
        """Ask the desk to open the hold."""
        stage, local = self._stage, self._local
        known = local.peers.known(stage.control_address)
        self._ask = self._link.next_ask()
        self._link.send(
            Open(
                self._ask,
                DESK_VERSION,
                stage.hold,
                self._ticket,
                local.fingerprint,
                local.block_tokens,
                known,
            )
        )

    def finish_open(self, handoff: Handoff, block_ids: Any, state_slot: int | None) -> None:
        """Take the desk's answer, check that its bytes fit the local rows, prepare the pieces."""
        opened = self._link.receive(self._ask, time.monotonic() + self._local.answer_s)
        if isinstance(opened, Refused):
            raise TransferError(f"stage {self._stage.stage} refused: {opened.reason}")
        if not isinstance(opened, Opened):
            raise TransferError(f"stage {self._stage.stage} answered {type(opened).__name__}")
        check_layout(self._local, self._stage, handoff, opened)
        self._agent = opened.agent
        self._hold_s = opened.hold_s
        self._renew_at = time.monotonic() + opened.hold_s / 3
        try:
            self._local.peers.learn(self._stage.control_address, opened)
            self._prepare_blocks(opened, block_ids)
            self._prepare_state(opened, state_slot)
        except Exception as error:  # NIXL's errors share no base class
            raise self._lost(error) from error
        self._lists = len(self._handles)

    def _prepare_blocks(self, opened: Opened, block_ids: Any) -> None:
        if not opened.block_bytes:
            return
        agent, store = self._local.agent, self._local.store
        offset = self._local.split(self._stage.layers[0])[0] * store.layer_bytes
        rows = store.pool.shape[0]
        mine = agent.local_rows(
            store.base_address, store.block_bytes, rows, offset, opened.block_bytes
        )
        self._handles.append(mine)
        other = agent.peer_rows(opened, opened.pool_base, opened.block_bytes, opened.pool_blocks)
        self._handles.append(other)
        # In the exporter's order, so that NIXL can merge blocks adjacent on both sides.
        theirs = np.asarray(opened.block_ids, np.int32)
        order = np.argsort(theirs, kind="stable")
        step = max(1, PIECE_BYTES // opened.block_bytes)
        pieces = [order[start : start + step] for start in range(0, len(order), step)]
        self._pieces = [
            (mine, block_ids[piece], other, theirs[piece]) for piece in reversed(pieces)
        ]

    def _prepare_state(self, opened: Opened, state_slot: int | None) -> None:
        state, states = opened.state, self._local.states
        if state is None or states is None or state_slot is None:
            return  # `check_layout` has seen that the stage has none
        agent = self._local.agent
        offset = self._local.split(self._stage.layers[0])[1] * states.layer_bytes
        rows = states.pool.shape[0]
        mine = agent.local_rows(
            states.base_address, states.slot_bytes, rows, offset, state.slot_bytes
        )
        self._handles.append(mine)
        other = agent.peer_rows(opened, state.pool_base, state.slot_bytes, state.pool_slots)
        self._handles.append(other)
        places = np.asarray([state_slot], np.int32), np.asarray([state.slot], np.int32)
        self._pieces.append((mine, places[0], other, places[1]))

    def advance(self) -> bool:
        """Post the next piece, look at the one under way, renew, or close.  True if it moved."""
        if self.is_closed:
            return False
        self._renew_if_due()
        under_way = self._handles[self._lists :]
        agent = self._local.agent
        try:
            if under_way:
                is_done = agent.is_done(under_way[0])
            elif self._pieces:
                transfer = agent.make_read(*self._pieces.pop())
                self._handles.append(transfer)
                is_done = agent.post(transfer)
            else:
                is_done = False
        except Exception as error:
            raise self._lost(error) from error
        if is_done:
            self._release_last()
            if not self._pieces:
                self.release()
                self._send_close()
        return is_done

    def confirm(self) -> None:
        """Wait for the desk's word that the slots were held during the whole read."""
        self._expect_held(self._ask)
        self._is_link_sound = True

    def release(self) -> None:
        """Let go of NIXL's handles; afterwards nothing is written to the local blocks.

        Raises:
            UnsettledError: NIXL does not stop the transfer.
        """
        while self._handles:
            self._release_last()

    def abandon(self) -> None:
        """Leave the desk; a hold that is still open is ended, without waiting for the answer."""
        if self._ask and not self.is_closed:
            try:
                self._send_close()
            except TransferError as error:  # the hold ends at its deadline
                logger.debug("could not close a hold: %s", error)
        if self._is_link_sound:
            self._local.links.give(self._link)
        else:
            self._link.close()

    def _release_last(self) -> None:
        give_up_at = time.monotonic() + RELEASE_S
        while True:
            try:
                self._handles[-1].release()
            except Exception as error:
                if time.monotonic() >= give_up_at:
                    raise UnsettledError(
                        f"stage {self._stage.stage}: NIXL does not stop a transfer: {error}"
                    ) from error
                time.sleep(POLL_MAX_S)
            else:
                self._handles.pop()
                return

    def _renew_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._renew_at:
            self._ask = self._link.next_ask()
            self._link.send(Renew(self._ask, self._ticket))
            self._expect_held(self._ask)
            self._renew_at = now + self._hold_s / 3

    def _send_close(self) -> None:
        self.is_closed = True
        self._ask = self._link.next_ask()
        self._link.send(Close(self._ask, self._ticket))

    def _expect_held(self, ask: int) -> None:
        reply = self._link.receive(ask, time.monotonic() + self._local.answer_s)
        if not isinstance(reply, Held):
            raise TransferError(f"stage {self._stage.stage}: the hold ended before the read did")

    def _lost(self, error: Exception) -> TransferError:
        self._local.peers.forget(self._stage.control_address, self._agent)
        if isinstance(error, TransferError):
            return error
        return TransferError(f"stage {self._stage.stage}: {type(error).__name__}: {error}")


def check_layout(local: LocalSide, stage: StageHandoff, handoff: Handoff, opened: Opened) -> None:
    """Raise `IncompatibleError` unless the exported bytes fit the local rows exactly."""
    first, stop = stage.layers
    starts, stops = local.split(first), local.split(stop)
    attention, recurrent = (stop - start for start, stop in zip(starts, stops, strict=True))
    layer_bytes = local.store.layer_bytes
    expected = {
        "layers": (first, stop),
        "dtype": local.dtype,
        "layer_bytes": layer_bytes,
        "block_bytes": attention * layer_bytes,
        "tokens": handoff.prompt_tokens,
    }
    for name, value in expected.items():
        found = getattr(opened, name)
        if found != value:
            raise IncompatibleError(
                f"stage {stage.stage} exports {name} = {found}, expected {value}"
            )
    check_state(local.states, stage, opened, recurrent)
    blocks = ceil_div(handoff.prompt_tokens, handoff.block_tokens) if attention else 0
    in_pool = all(0 <= block < opened.pool_blocks for block in opened.block_ids)
    if len(opened.block_ids) != blocks or not in_pool:
        raise IncompatibleError(f"stage {stage.stage} exports impossible blocks")


def check_state(states: StatePool | None, stage: StageHandoff, opened: Opened, layers: int) -> None:
    """Raise `IncompatibleError` unless the exported state is of `layers` layers like the local."""
    state = opened.state
    if state is None or states is None:
        if state is not None or layers:
            raise IncompatibleError(
                f"stage {stage.stage} exports {'no' if state is None else 'a'} recurrent state, "
                f"this model has {layers} recurrent layers there"
            )
        return
    expected = {
        "slot_bytes": layers * states.layer_bytes,
        "layer_bytes": states.layer_bytes,
        "state_shape": states.state_shape,
        "tail_shape": states.tail_shape,
    }
    for name, value in expected.items():
        found = getattr(state, name)
        if found != value or not layers:
            raise IncompatibleError(
                f"stage {stage.stage} exports a state with {name} = {found}, expected {value}"
            )
    if not 0 <= state.slot < state.pool_slots:
        raise IncompatibleError(f"stage {stage.stage} exports an impossible state")
