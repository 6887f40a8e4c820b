"""The hold desk of one stage: keeps finished prompts for decode workers and tells them where.

Runs inside LOOP's poll loop, without a thread of its own: NIXL's progress thread serves the
reads, the desk only answers a few small messages per request.  Typical driver:

    desk = HoldDesk(config.transfer, config.cluster.host, store, rank=s, layers=(first, stop),
                    block_tokens=B, dtype="bfloat16", fingerprint=plan.fingerprint)
    poller.register(desk.socket, zmq.POLLIN)
    handoff = desk.open_hold(rid, tables, prompt_tokens, (), now)  # after the last span's fence
    ...
    for rid in desk.poll(now):                                     # readable, or next_deadline()
        machine.handle(HoldEnded(rid), now)                        # -> Freed
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

import zmq

from wavepp_worker.base.errors import PeerError, check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.transfer.agent import BlockPool, StatePool, TransferAgent
from wavepp_worker.transfer.desk_wire import (
    DESK_VERSION,
    FROM_DESK,
    TO_DESK,
    Close,
    Decline,
    DeskReply,
    DeskRequest,
    Expired,
    Held,
    Open,
    Opened,
    OpenedState,
    Refused,
    Renew,
)
from wavepp_worker.transfer.holds import HoldTable
from wavepp_worker.wire.mailbox import StageHandoff, StateSlots

logger = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 4096  # a reader's messages are small; larger ones are dropped unread
REQUESTS_PER_POLL = 256  # so that a flood of readers cannot keep LOOP from its waves


class HoldDesk:
    """Owns the stage's NIXL agent, its registered pool and every hold.  One thread.

    Args:
        host: address that the desk's socket binds to and hands out.
        store: the stage's block store; must outlive the desk.
        rank: stage number.
        layers: [first, stop) of the model's layers that `store` holds.
        dtype: element type of the pool, e.g. "bfloat16".
        fingerprint: names weights and cache format; a reader with another one is refused.
        states: the stage's recurrent states; as `store`.

    Raises:
        ConfigError: NIXL or its backend cannot be used here.
    """

    def __init__(
        self,
        config: TransferConfig,
        host: str,
        store: BlockPool,
        *,
        rank: int,
        layers: tuple[int, int],
        block_tokens: int,
        dtype: str,
        fingerprint: str,
        states: StatePool | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        first, stop = layers
        recurrent = states.slot_bytes // states.layer_bytes if states is not None else 0
        check(
            store.block_bytes == (stop - first - recurrent) * store.layer_bytes,
            "block and state are exactly the stage's layers",
            layers=layers,
        )
        self._store = store
        self._states = states
        self._rank = rank
        self._layers = layers
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._fingerprint = fingerprint
        self._holds = HoldTable(config.hold_s, config.holds_max)
        self._agent = TransferAgent(f"stage{rank}", config.backend, store, states)
        self._socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
        self._socket.bind(f"tcp://{host}:*")
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For the caller's poller (POLLIN): call `poll` when it is readable."""
        return self._socket

    def open_hold(
        self,
        rid: int,
        tables: Sequence[Sequence[int]],
        tokens: int,
        states: Sequence[StateSlots],
        now: float,
    ) -> StageHandoff:
        """Hold a finished prompt's slots; every wave that wrote them has passed its fence.

        Args:
            tables: of each of this stage's windows: slot of block 0, 1, ...; longer is fine.
            tokens: prompt length; the blocks that cover it are offered.
            states: of the recurrent window, if there is one: `working` is after the prompt.
            now: seconds, on the clock that `poll` is given.
        """
        table = self._attention_table(rid, tables, tokens, states)
        slot = self._state_slot(rid, states)
        name = secrets.token_urlsafe(24)
        self._holds.offer(rid, name, table, tokens, now, state_slot=slot)
        return StageHandoff(
            stage=self._rank, layers=self._layers, control_address=self.address, hold=name
        )

    def release(self, rid: int) -> None:
        """End a cancelled request's hold at once; `poll` reports it.  Nothing if it has none."""
        self._holds.withdraw(rid)

    def poll(self, now: float) -> list[int]:
        """Answer waiting readers, end overdue holds; return requests whose hold ended, each once.

        Their slots may be reused: no reader is told `held` after this.
        """
        for _ in range(REQUESTS_PER_POLL):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._serve(frames, now)
        self._holds.expire(now)
        return self._holds.take_ended()

    def next_deadline(self) -> float | None:
        """Return when `poll` must be called at the latest; None without holds."""
        return self._holds.next_deadline()

    def stats(self, now: float) -> dict[str, float]:
        """Return gauges and counters by their metric names."""
        counts = self._holds.counts
        return {
            "wavepp_holds": len(self._holds),
            "wavepp_hold_oldest_seconds": self._holds.oldest_age_s(now),
            "wavepp_holds_offered_total": counts.offered,
            "wavepp_holds_read_total": counts.read,
            "wavepp_holds_expired_total": counts.expired,
            "wavepp_holds_withdrawn_total": counts.withdrawn,
            "wavepp_holds_declined_total": counts.declined,
            "wavepp_holds_crowded_out_total": counts.crowded_out,
            "wavepp_holds_refused_total": counts.refused,
        }

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the books are wrong."""
        self._holds.check_invariants()

    def close(self) -> None:
        """Stop answering, then end the agent; the pool is left alone.  Idempotent."""
        self._socket.close()
        self._agent.close()

    def _attention_table(
        self,
        rid: int,
        tables: Sequence[Sequence[int]],
        tokens: int,
        states: Sequence[StateSlots],
    ) -> Sequence[int]:
        """Return the slots of the blocks that cover the prompt; none without attention layers."""
        recurrent = {slots.window for slots in states}
        attention = [table for window, table in enumerate(tables) if window not in recurrent]
        has_attention = self._store.block_bytes > 0
        check(len(attention) == has_attention, "a table for attention alone", rid=rid)
        if not has_attention:
            return ()
        blocks = ceil_div(tokens, self._block_tokens)
        table = attention[0][:blocks]
        check(0 < blocks <= len(table), "the table covers the prompt", rid=rid, tokens=tokens)
        check(max(table) < self._store.pool.shape[0], "slots are in the pool", rid=rid)
        return table

    def _state_slot(self, rid: int, states: Sequence[StateSlots]) -> int | None:
        check(len(states) == (self._states is not None), "a state for each window", rid=rid)
        if self._states is None:
            return None
        slot = states[0].working
        check(0 <= slot < self._states.pool.shape[0], "the state is in the pool", rid=rid)
        return slot

    def _opened_state(self, slot: int | None) -> OpenedState | None:
        states = self._states
        if states is None or slot is None:
            return None
        return OpenedState(
            pool_base=states.base_address,
            pool_slots=states.pool.shape[0],
            slot_bytes=states.slot_bytes,
            layer_bytes=states.layer_bytes,
            state_shape=states.state_shape,
            tail_shape=states.tail_shape,
            slot=slot,
        )

    def _serve(self, frames: list[bytes], now: float) -> None:
        if len(frames) != 2:
            logger.warning("dropped a reader's message of %d frames", len(frames))
            return
        reader, frame = frames
        try:
            request = TO_DESK.decode(frame)
        except PeerError as error:
            logger.warning("dropped a reader's message: %s", error)
            return
        reply = FROM_DESK.encode(self._answer(request, now))
        try:
            self._socket.send_multipart([reader, reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the reader is gone; its hold ends at the deadline
            logger.warning("could not answer a reader: %s", error)

    def _answer(self, request: DeskRequest, now: float) -> DeskReply:
        match request:
            case Open():
                return self._open(request, now)
            case Renew(ask, ticket):
                return Held(ask) if self._holds.renew(ticket, now) else Expired(ask)
            case Close(ask, ticket):
                return Held(ask) if self._holds.close(ticket, now) else Expired(ask)
            case Decline(ask, hold):
                return Held(ask) if self._holds.decline(hold, now) else Expired(ask)

    def _open(self, request: Open, now: float) -> Opened | Refused:
        mismatch = self._mismatch(request)
        if mismatch:
            self._holds.counts.refused += 1
            return Refused(request.ask, mismatch)
        hold = self._holds.open(request.hold, request.ticket, now)
        if isinstance(hold, str):
            return Refused(request.ask, hold)
        agent = self._agent
        return Opened(
            ask=request.ask,
            hold_s=self._holds.hold_s,
            agent=agent.name,
            metadata=b"" if request.agent_known == agent.name else agent.metadata,
            metadata_digest=agent.metadata_digest,
            memory=agent.memory,
            device=agent.device,
            pool_base=self._store.base_address,
            pool_blocks=self._store.pool.shape[0],
            block_bytes=self._store.block_bytes,
            layer_bytes=self._store.layer_bytes,
            layers=self._layers,
            dtype=self._dtype,
            block_ids=hold.block_ids,
            tokens=hold.tokens,
            state=self._opened_state(hold.state_slot),
        )

    def _mismatch(self, request: Open) -> str:
        if request.version != DESK_VERSION:
            return f"desk version {DESK_VERSION}, reader version {request.version}"
        if request.fingerprint != self._fingerprint:
            return (
                f"the exporter holds model {self._fingerprint}, the reader has "
                f"{request.fingerprint}: weights or cache format differ"
            )
        if request.block_tokens != self._block_tokens:
            return (
                f"the exporter's block size is {self._block_tokens} tokens, the reader's "
                f"{request.block_tokens}"
            )
        return ""
