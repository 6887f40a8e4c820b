"""NIXL, sockets and memory around one stage's `PushMachine`.

    serving ── Assign ──▶ offers ── PromptStored ─┐
    decode ── PUSH_REG ── notices ── Registered ──┼─▶ machine ─▶ Write ─▶ pack, post, poll
    decode ◀── handshake ── PeerConnected ────────┘          └─▶ Release ─▶ `turn`'s answer

Long prompts are written in pieces through a bounded staging area; only the last piece carries the
notice, so decode never counts a prompt that is not whole.  The deadline is looked at after each
packing and before each post.  A write that ends early is released first: a prompt's slots and the
staging are reused only once NIXL has let go of both.

Used by one thread, `PushDesk`'s; nothing here waits.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

import numpy as np
import zmq
from msgspec import Struct

from wavepp_worker.base.errors import PeerError, TransferError, check
from wavepp_worker.vllm_decode.agreement import Agreement, region_name
from wavepp_worker.vllm_decode.desk_wire import FROM_PUSH, TO_PUSH, Assigned, Unknown
from wavepp_worker.vllm_decode.protocol import (
    REGISTRATION_PREFIX,
    AgentMetadata,
    decode_payload,
    decode_registration,
    encode_payload,
    regions_of,
)
from wavepp_worker.vllm_decode.push import (
    AbortWrite,
    Cancelled,
    Connect,
    Disconnect,
    Dropped,
    Event,
    Outcome,
    PeerConnected,
    PeerLost,
    PromptStored,
    PushMachine,
    PushSettings,
    Registered,
    Release,
    TimePassed,
    Write,
    WriteEnded,
)
from wavepp_worker.vllm_decode.side_channel import MetadataQuestion
from wavepp_worker.vllm_decode.staging import Staging

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
ASSIGN_BYTES_MAX = 4096
ASSIGNS_PER_TURN = 256
HANDSHAKE_S = 5.0
POSTED_WAIT_S, WAITING_WAIT_S, IDLE_WAIT_S = 0.0005, 0.002, 0.05  # NIXL has nothing to wait on
CAUSES = ("unreachable", "incompatible", "layout", "refused")


class WriteAgent(Protocol):
    """What is used of NIXL; `transfer.agent.TransferAgent` is the real one."""

    metadata: bytes

    def load_peer(self, metadata: bytes) -> str: ...
    def forget_peer(self, name: str) -> None: ...
    def local_rows(
        self, base: int, row_bytes: int, rows: int, offset_bytes: int, length_bytes: int
    ) -> Any: ...
    def peer_regions(
        self, name: str, memory: str, regions: Sequence[tuple[int, int, int, int, int]]
    ) -> Any: ...
    def make_write(
        self, local: Any, local_rows: Any, remote: Any, remote_rows: Any, notice: bytes
    ) -> Any: ...
    def post(self, transfer: Any) -> bool: ...
    def is_done(self, transfer: Any) -> bool: ...
    def notify(self, name: str, notice: bytes) -> None: ...
    def take_notices(self) -> dict[str, list[bytes]]: ...
    def close(self) -> None: ...


class PushStage(Struct, frozen=True, kw_only=True):
    """Which part of the model this stage writes, and with whom it may speak."""

    layers: range
    agreement: Agreement
    settings: PushSettings
    host: str


@dataclass(slots=True)
class _Offer:
    """A finished prompt that serving has not named yet."""

    rid: int
    blocks: tuple[int, ...]
    tokens: int
    deadline: float


@dataclass(slots=True)
class _Peer:
    """A decode engine whose memory can be written."""

    agent: str
    rows: Any
    first_row: tuple[int, ...]  # of each of our layers


@dataclass(slots=True)
class _Job:
    """A write that the machine asked for."""

    rid: int
    engine_id: str
    peer: _Peer
    pairs: tuple[tuple[int, int], ...]
    notice: bytes
    done: int = 0  # pairs whose bytes have arrived
    posted: int = 0  # pairs in the transfer under way
    transfer: Any = None
    slots: list[int] = field(default_factory=list)
    is_aborted: bool = False


class PushDriver:
    """See the module's text.

    Args:
        agent: has registered `staging`.
        clock: seconds; the one that `turn` is given.
    """

    def __init__(
        self,
        stage: PushStage,
        agent: WriteAgent,
        staging: Staging,
        context: zmq.Context[Socket],
        clock: Callable[[], float],
    ) -> None:
        check(staging.layers == len(stage.layers), "staging holds the stage's layers")
        self._stage, self._agent, self._staging = stage, agent, staging
        self._context, self._clock = context, clock
        self._machine = PushMachine(stage.settings)
        self._names = [region_name(layer) for layer in stage.layers]
        self._rows = agent.local_rows(
            staging.base_address,
            staging.layer_bytes,
            staging.layers * staging.slots,
            0,
            staging.layer_bytes,
        )
        self._free = deque(range(staging.slots))
        self._piece_slots = -(-staging.slots // 2)
        self._payload = self._make_payload()
        self._offers: OrderedDict[str, _Offer] = OrderedDict()  # by hold; in deadline order
        self._tokens: dict[int, tuple[int, int]] = {}  # rid -> last block, tokens in it
        self._peers: dict[str, _Peer] = {}
        self._retired: list[_Peer] = []  # to be forgotten once no job uses them
        self._questions: dict[str, MetadataQuestion] = {}
        self._senders: dict[str, str] = {}  # engine -> agent of its last registration
        self._jobs: OrderedDict[int, _Job] = OrderedDict()
        self._ended: list[int] = []
        self._outcomes: Counter[Outcome] = Counter()
        self._failed: Counter[str] = Counter()
        self._bytes = self._registrations = self._dropped = self._write_errors = 0
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, ASSIGN_BYTES_MAX)
        self.socket.bind(f"tcp://{stage.host}:*")
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # ── from LOOP ────────────────────────────────────────────────────────────────────────────

    def offer(self, rid: int, hold: str, table: Sequence[int], tokens: int, now: float) -> None:
        """Keep a finished prompt until serving names it, or its deadline comes."""
        if len(self._offers) >= self._stage.settings.prompts_max:
            _, oldest = self._offers.popitem(last=False)
            self._finish(oldest.rid, Outcome.CROWDED_OUT)
        blocks = self._staging.virtual_blocks(table, tokens)
        self._offers[hold] = _Offer(rid, blocks, tokens, now + self._stage.settings.hold_s)

    def withdraw(self, rid: int) -> None:
        """Nobody waits for the request; its end follows once nothing is written."""
        for hold, offer in self._offers.items():
            if offer.rid == rid:
                del self._offers[hold]
                self._finish(rid, Outcome.CANCELLED)
                return
        self._feed(Cancelled(rid))

    # ── the owner's loop ─────────────────────────────────────────────────────────────────────

    def turn(self) -> list[int]:
        """Do everything that can be done now; return requests that ended, each once."""
        self._answer_serving()
        for sender, notices in self._agent.take_notices().items():
            for notice in notices:
                self._take_notice(sender, notice)
        for engine_id in list(self._questions):
            self._poll_question(engine_id)
        now = self._clock()
        while self._offers and now >= next(iter(self._offers.values())).deadline:
            _, offer = self._offers.popitem(last=False)
            self._finish(offer.rid, Outcome.EXPIRED)
        self._feed(TimePassed())
        for job in list(self._jobs.values()):
            self._advance(job)
        self._forget_retired()
        ended, self._ended = self._ended, []
        return ended

    def sockets(self) -> list[Socket]:
        """Return what to wait for; `turn` is due when one is readable."""
        return [self.socket, *(question.socket for question in self._questions.values())]

    def wait_s(self) -> float:
        """Return after how long `turn` is due although no socket is readable."""
        if self._jobs or self._retired:
            return POSTED_WAIT_S
        deadline = self._machine.next_deadline()
        return IDLE_WAIT_S if deadline is None and not self._questions else WAITING_WAIT_S

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by their metric names."""
        values: dict[str, float] = {
            "wavepp_push_offers": len(self._offers),
            "wavepp_push_writes": len(self._jobs),
            "wavepp_push_holds": len(self._offers) + len(self._tokens),
            "wavepp_push_bytes_total": self._bytes,
            "wavepp_push_registrations_total": self._registrations,
            "wavepp_push_registrations_dropped_total": self._dropped,
            "wavepp_push_write_errors_total": self._write_errors,
        }
        for outcome in Outcome:
            name = f'wavepp_push_requests_total{{outcome="{outcome.value}"}}'
            values[name] = self._outcomes[outcome]
        for cause in CAUSES:
            name = f'wavepp_push_handshakes_failed_total{{cause="{cause}"}}'
            values[name] = self._failed[cause]
        return values

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the books are wrong."""
        self._machine.check_invariants()
        used = [slot for job in self._jobs.values() for slot in job.slots]
        every = sorted([*self._free, *used])
        check(every == list(range(self._staging.slots)), "a staging slot is free or in one write")

    def close(self) -> None:
        """Stop every write, then end the agent; the cache is left alone.  Idempotent."""
        for job in list(self._jobs.values()):
            job.is_aborted = True
            self._advance(job)
        for question in self._questions.values():
            question.close()
        self._questions.clear()
        self.socket.close()
        self._agent.close()

    # ── serving ──────────────────────────────────────────────────────────────────────────────

    def _answer_serving(self) -> None:
        for _ in range(ASSIGNS_PER_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                request = TO_PUSH.decode(frames[-1]) if len(frames) == 2 else None
            except PeerError as error:
                logger.warning("dropped an assignment: %s", error)
                continue
            if request is None:
                logger.warning("dropped an assignment of %d frames", len(frames))
                continue
            offer = self._offers.pop(request.hold, None)
            if offer is None:
                self._reply(frames[0], FROM_PUSH.encode(Unknown(request.ask)))
                continue
            used = offer.tokens - (len(offer.blocks) - 1) * self._stage.agreement.block_tokens
            self._tokens[offer.rid] = (offer.blocks[-1], used)
            self._feed(PromptStored(offer.rid, request.request_id, offer.blocks))
            engine_id = self._stage.settings.engine_id
            answer = Assigned(request.ask, engine_id, self._payload)
            self._reply(frames[0], FROM_PUSH.encode(answer))

    def _reply(self, reader: bytes, frame: bytes) -> None:
        try:
            self.socket.send_multipart([reader, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # serving is gone, and the worker with it
            logger.warning("could not answer serving: %s", error)

    # ── decode ───────────────────────────────────────────────────────────────────────────────

    def _take_notice(self, sender: str, notice: bytes) -> None:
        if not notice.startswith(REGISTRATION_PREFIX):
            logger.debug("ignored a notice of %d bytes from %s", len(notice), sender)
            return
        self._registrations += 1
        try:
            registration = decode_registration(notice)
        except TransferError as error:
            self._dropped += 1
            logger.warning("dropped a registration of %s: %s", sender, error)
            return
        engine_id = registration.decode_engine_id
        if self._senders.get(engine_id, sender) != sender:
            # Restarted under its old name: what was known of its memory is void.
            logger.info("decode engine %s has a new agent", engine_id)
            self._lose(engine_id)
        self._senders[engine_id] = sender
        self._feed(Registered(registration))
        if engine_id not in self._peers and engine_id not in self._questions:
            del self._senders[engine_id]  # refused: nothing is kept of it

    def _connect(self, command: Connect) -> None:
        deadline = self._clock() + HANDSHAKE_S
        try:
            self._questions[command.engine_id] = MetadataQuestion(
                self._context, command.host, command.port, 0, deadline
            )
        except TransferError as error:
            self._refuse(command.engine_id, "unreachable", error)

    def _poll_question(self, engine_id: str) -> None:
        question = self._questions.get(engine_id)
        if question is None:
            return
        cause = "unreachable"
        try:
            frame = question.poll(self._clock())
            if frame is None:
                return
            del self._questions[engine_id]
            cause = "incompatible"
            agreement = self._stage.agreement
            expected = agreement.compatibility_hash if agreement.is_checked else None
            metadata = decode_payload(frame, expected)
            if metadata.engine_id != engine_id:
                raise TransferError(f"the answer is of engine {metadata.engine_id}")
            cause = "layout"
            regions = self._regions(metadata)
            cause = "refused"
            peer, blocks = self._open_peer(engine_id, metadata, regions)
        except TransferError as error:
            self._questions.pop(engine_id, None)
            self._refuse(engine_id, cause, error)
            return
        self._peers[engine_id] = peer
        logger.info("connected to decode engine %s", engine_id)
        self._feed(PeerConnected(engine_id, blocks))

    def _regions(self, metadata: AgentMetadata) -> tuple[int, ...]:
        agreement = self._stage.agreement
        if metadata.kv_cache_layout != agreement.kv_cache_layout:
            raise TransferError(f"decode's cache layout is {metadata.kv_cache_layout}")
        if metadata.attn_backend_name != agreement.attention_backend:
            raise TransferError(
                f"decode's attention backend is {metadata.attn_backend_name}, configured is "
                f"decode_pool.attention_backend {agreement.attention_backend}"
            )
        return regions_of(
            metadata,
            self._names,
            block_tokens=agreement.block_tokens,
            block_bytes=self._staging.layer_bytes,
        )

    def _open_peer(
        self, engine_id: str, metadata: AgentMetadata, regions: tuple[int, ...]
    ) -> tuple[_Peer, int]:
        """Load decode's agent; return it and how many blocks each of its regions has at least."""
        kinds = {metadata.region_mem_types[r] if metadata.region_mem_types else "DRAM"
                 for r in regions}  # fmt: skip
        if len(kinds) != 1:
            raise TransferError("decode keeps its layers in several kinds of memory")
        counts = [
            metadata.region_num_blocks[r] if metadata.region_num_blocks else metadata.num_blocks
            for r in regions
        ]
        if not all(counts):
            raise TransferError("decode has a region without blocks")
        name = self._agent.load_peer(metadata.agent_metadata)
        rows = [
            (
                metadata.kv_caches_base_addr[region],
                metadata.block_lens[region],
                metadata.device_id,
                metadata.block_strides[region],
                count,
            )
            for region, count in zip(regions, counts, strict=True)
        ]
        if name != self._senders.get(engine_id, name):
            if all(peer.agent != name for peer in self._peers.values()):
                self._agent.forget_peer(name)
            raise TransferError("decode's side channel names another agent than registered")
        try:
            prepared = self._agent.peer_regions(name, kinds.pop(), rows)
        except Exception as error:  # NIXL's errors share no base class
            self._agent.forget_peer(name)
            raise TransferError(f"decode's regions cannot be written: {error}") from error
        first_row = tuple(sum(counts[:at]) for at in range(len(counts)))
        return _Peer(name, prepared, first_row), min(counts)

    def _refuse(self, engine_id: str, cause: str, error: TransferError) -> None:
        self._failed[cause] += 1
        logger.warning("no hand-off to decode engine %s: %s", engine_id, error)
        self._lose(engine_id)

    def _lose(self, engine_id: str) -> None:
        """Forget what is known of an engine, after ending what is written to it."""
        self._drop_peer(engine_id)
        self._feed(PeerLost(engine_id))

    def _drop_peer(self, engine_id: str) -> None:
        question = self._questions.pop(engine_id, None)
        if question is not None:
            question.close()
        peer = self._peers.pop(engine_id, None)
        if peer is not None:
            self._retired.append(peer)
        self._senders.pop(engine_id, None)

    def _forget_retired(self) -> None:
        used = {id(job.peer) for job in self._jobs.values()}
        names = {peer.agent for peer in self._peers.values()}
        for peer in [peer for peer in self._retired if id(peer) not in used]:
            self._retired.remove(peer)
            if peer.agent not in names:  # connected anew under the same name
                self._agent.forget_peer(peer.agent)

    # ── writes ───────────────────────────────────────────────────────────────────────────────

    def _advance(self, job: _Job) -> None:
        if job.transfer is None:
            if job.is_aborted:
                self._end(job, False)
            else:
                self._post(job)
            return
        if not job.is_aborted:
            try:
                if not self._agent.is_done(job.transfer):
                    return
            except Exception as error:  # NIXL's errors share no base class
                self._fail(job, error)
        if not self._let_go(job):
            return
        if job.is_aborted:
            self._end(job, False)
            return
        self._arrived(job)

    def _arrived(self, job: _Job) -> None:
        """Count the piece in; end, or go on with the next one."""
        self._bytes += job.posted * self._staging.layers * self._staging.layer_bytes
        job.done += job.posted
        if job.done == len(job.pairs):
            self._end(job, True)
        else:
            self._post(job)

    def _post(self, job: _Job) -> None:
        """Pack and post the next piece, if there is room for it."""
        count = min(len(job.pairs) - job.done, self._piece_slots, len(self._free))
        if job.pairs and not count:
            return
        try:
            if not job.pairs:
                self._agent.notify(job.peer.agent, job.notice)
                self._end(job, True)
                return
            self._pack(job, count)
            self._feed(TimePassed())  # packing took its time
            if job.is_aborted:
                self._give_back(job)
                self._end(job, False)
                return
            is_last = job.done + count == len(job.pairs)
            job.posted = count
            job.transfer = self._agent.make_write(
                self._rows,
                self._local_rows(job),
                job.peer.rows,
                self._peer_rows(job),
                job.notice if is_last else b"",
            )
            self._agent.post(job.transfer)  # `_advance` looks whether it is done
        except TransferError as error:
            self._fail(job, error)
        except Exception as error:  # NIXL's errors share no base class
            if not type(error).__name__.startswith("nixl"):
                raise
            self._fail(job, error)

    def _pack(self, job: _Job, count: int) -> None:
        job.slots = sorted(self._free.popleft() for _ in range(count))
        blocks = [ours for ours, _ in job.pairs[job.done : job.done + count]]
        last, used = self._tokens[job.rid]
        whole = self._stage.agreement.block_tokens
        self._staging.pack(blocks, job.slots, used if blocks[-1] == last else whole)

    def _local_rows(self, job: _Job) -> Any:
        slots, per_layer = np.array(job.slots), self._staging.slots
        return np.concatenate(
            [layer * per_layer + slots for layer in range(self._staging.layers)]
        ).astype(np.int32)

    def _peer_rows(self, job: _Job) -> Any:
        theirs = np.array([block for _, block in job.pairs[job.done : job.done + job.posted]])
        return np.concatenate([first + theirs for first in job.peer.first_row]).astype(np.int32)

    def _fail(self, job: _Job, error: Exception) -> None:
        self._write_errors += 1
        logger.warning("write to decode engine %s failed: %s", job.engine_id, error)
        job.is_aborted = True
        if self._peers.get(job.engine_id) is job.peer:
            self._lose(job.engine_id)

    def _let_go(self, job: _Job) -> bool:
        """Release the transfer; False if NIXL may still touch the memory: ask again."""
        try:
            job.transfer.release()
        except Exception as error:  # NIXL's errors share no base class
            logger.debug("a write cannot be released yet: %s", error)
            return False
        job.transfer = None
        self._give_back(job)
        return True

    def _give_back(self, job: _Job) -> None:
        self._free.extend(job.slots)
        job.slots = []

    def _end(self, job: _Job, is_done: bool) -> None:
        self._give_back(job)
        del self._jobs[job.rid]
        self._feed(WriteEnded(job.rid, is_done))

    # ── the machine ──────────────────────────────────────────────────────────────────────────

    def _feed(self, event: Event) -> None:
        for command in self._machine.handle(event, self._clock()):
            match command:
                case Connect():
                    self._connect(command)
                case Disconnect(engine_id):
                    self._drop_peer(engine_id)
                case Write(rid, engine_id, pairs, notice):
                    peer = self._peers[engine_id]
                    self._jobs[rid] = _Job(rid, engine_id, peer, pairs, notice)
                case AbortWrite(rid):
                    self._jobs[rid].is_aborted = True
                case Release(rid, outcome):
                    self._tokens.pop(rid, None)
                    self._finish(rid, outcome)
                case Dropped(request_id, reason):
                    self._dropped += 1
                    logger.warning("registration %s is not served: %s", request_id, reason)
                case _:
                    assert_never(command)

    def _finish(self, rid: int, outcome: Outcome) -> None:
        self._outcomes[outcome] += 1
        self._ended.append(rid)

    def _make_payload(self) -> bytes:
        """Return this stage's handshake: its staging area, of which decode reads little."""
        staging, agreement = self._staging, self._stage.agreement
        layers = staging.layers
        metadata = AgentMetadata(
            engine_id=self._stage.settings.engine_id,
            agent_metadata=self._agent.metadata,
            kv_caches_base_addr=tuple(
                staging.base_address + layer * staging.block_bytes for layer in range(layers)
            ),
            device_id=0,
            num_blocks=staging.slots,
            block_lens=(staging.layer_bytes,) * layers,
            block_strides=(staging.layer_bytes,) * layers,
            kv_cache_layout=agreement.kv_cache_layout,
            block_size=agreement.block_tokens,
            attn_backend_name=agreement.attention_backend,
            region_num_blocks=(staging.slots,) * layers,
            region_group_ids=(0,) * layers,
            region_names=tuple(self._names),
            region_mem_types=("DRAM",) * layers,
        )
        return encode_payload(metadata, agreement.compatibility_hash)
