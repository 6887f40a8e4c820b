"""Messages between the processes of one worker, other than rounds and waves.  [algorithms 16.1]

    serving ── Announce, Cancel, ViewRequest, Shutdown ──▶ WAVE0
    WAVE_s  ── Install, Drop, Admitting, Waiting, Refused, Peers, Alive, Shutdown ─▶ LOOP_s
    LOOP_s  ── LoopUp, LoopReady, WaveDone, Freed, Ask, Alive ─▶ WAVE_s
    any     ── WorkerReady, Rejected, Ready, Finished, KvDelta, Gone,
               CacheView, Stats, Fatal ──────────────────▶ serving

Every pair of processes is one FIFO; nothing is assumed about the order between pairs.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.codec import Codec


class Sampling(Struct, array_like=True, frozen=True):
    """How the last stage picks the first answer token.  `temperature` 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None


# ── serving → WAVE0 ──────────────────────────────────────────────────────────────────────────


class Announce(Struct, array_like=True, frozen=True, tag="announce"):
    """A validated, hashed request."""

    rid: int
    prompt_tokens: int
    keys: bytes  # KEY_BYTES per full block
    tokens: bytes  # u32 little-endian; passed on only in rank 0's Install
    sampling: Sampling = Sampling()


class Cancel(Struct, array_like=True, frozen=True, tag="cancel"):
    """Nobody waits for this request any more; at most once, never after the terminal chunk."""

    rid: int


class ViewRequest(Struct, array_like=True, frozen=True, tag="view_request"):
    """Ask every rank for what its tree can resume; answered by one CacheView per rank."""

    number: int


class Shutdown(Struct, array_like=True, frozen=True, tag="shutdown"):
    """End in order."""

    reason: str = ""


FrontMessage = Announce | Cancel | ViewRequest | Shutdown
FRONT: Codec[FrontMessage] = Codec(FrontMessage)


# ── WAVE_s → LOOP_s ──────────────────────────────────────────────────────────────────────────


class Copy(Struct, array_like=True, frozen=True):
    """One block or state copy; performed in `ino` order, unconditionally.  [algorithms 16.2]

    kind            source              target
    offload         device slot         host slot
    onboard         host slot           device slot
    load_state      device snapshot     working state (device slot)
    onboard_state   host snapshot       working state (device slot)
    zero_state      (unused, -1)        working state (device slot)
    """

    kind: str
    window: int
    source: int
    target: int


class StateSlots(Struct, array_like=True, frozen=True):
    """Slots of one recurrent window for one sequence; all are device slots of that window."""

    window: int
    working: int  # the state that waves read and advance
    snapshots: tuple[tuple[int, int], ...] = ()  # (snapshot point in tokens, slot), rising


class Install(Struct, array_like=True, frozen=True, tag="install"):
    """An admitted request with its block tables: LOOP may run it."""

    ino: int
    rid: int
    prompt_tokens: int
    endpoint: int  # e*, tokens reused
    # Per window of this rank: slot of block 0, 1, ...; -1 outside a sliding window; () recurrent.
    tables: tuple[tuple[int, ...], ...]
    copies: tuple[Copy, ...] = ()
    states: tuple[StateSlots, ...] = ()  # one per recurrent window
    snapshot_points: tuple[int, ...] = ()  # rank 0 only: chunks end there, whoever stores it
    tokens: bytes = b""  # rank 0 only: u32 little-endian, the whole prompt
    sampling: Sampling | None = None
    announced_at: float = 0.0  # rank 0 only: when the announce arrived
    admitted_at: float = 0.0  # all three in seconds on this host's monotonic clock
    leased_at: float = 0.0  # when this rank took its first lease
    attempts: int = 0  # to admit it, the last one included


class Drop(Struct, array_like=True, frozen=True, tag="drop"):
    """Rank 0 only: an admitted request was cancelled.  [A55]"""

    rid: int
    ino: int


class Admitting(Struct, array_like=True, frozen=True, tag="admitting"):
    """Rank 0 only: how many requests are being admitted right now."""

    count: int


class Waiting(Struct, array_like=True, frozen=True, tag="waiting"):
    """Rank 0 only, where the executor asks for requests: how many it could ask for."""

    count: int


class Refused(Struct, array_like=True, frozen=True, tag="refused"):
    """Rank 0 only: the answer to an Ask that no Install will answer."""


class Peers(Struct, array_like=True, frozen=True, tag="peers"):
    """Where the other ranks' LOOPs are: index = rank."""

    wave_addresses: tuple[str, ...]  # ZeroMQ endpoint of each LOOP's wave plane
    store_address: str  # host:port of the torch.distributed store on rank 0


class Alive(Struct, array_like=True, frozen=True, tag="alive"):
    """The sender still takes messages; both processes of a rank tell the other while they serve."""


LoopInbound = Install | Drop | Admitting | Waiting | Refused | Peers | Alive | Shutdown
TO_LOOP: Codec[LoopInbound] = Codec(LoopInbound)


# ── LOOP_s → WAVE_s ──────────────────────────────────────────────────────────────────────────


class LoopUp(Struct, array_like=True, frozen=True, tag="loop_up"):
    """LOOP's sockets are bound; sent before weights are loaded."""

    wave_address: str
    store_address: str = ""  # rank 0 only


class WindowReport(Struct, array_like=True, frozen=True):
    """One window's state kind and pool as allocated; fields as in `cache.window.WindowSpec`."""

    kind: str
    slots: int
    host_slots: int = 0
    span_tokens: int | None = None
    chunk_tokens: int = 0


class LoopReady(Struct, array_like=True, frozen=True, tag="loop_ready"):
    """Weights loaded, pools allocated, peers connected."""

    windows: tuple[WindowReport, ...]


class WaveDone(Struct, array_like=True, frozen=True, tag="wave_done"):
    """A wave's fence passed on this rank: everything before the end positions may be published."""

    wave: int
    ends: tuple[tuple[int, int], ...]  # (rid, end position in tokens), cumulative
    snapshots: tuple[tuple[int, int], ...] = ()  # (rid, snapshot point) whose slot is filled now


class Freed(Struct, array_like=True, frozen=True, tag="freed"):
    """No wave and no transfer of this request is left on this rank: its slots may be reused."""

    rid: int


class Ask(Struct, array_like=True, frozen=True, tag="ask"):
    """Rank 0 only: admit one more request; no wave is planned until Install or Refused answers."""

    may_refuse: bool  # there is other work meanwhile; else the answer waits until there is room


LoopOutbound = LoopUp | LoopReady | WaveDone | Freed | Ask | Alive
FROM_LOOP: Codec[LoopOutbound] = Codec(LoopOutbound)


# ── any process → serving ────────────────────────────────────────────────────────────────────


class WorkerReady(Struct, array_like=True, frozen=True, tag="worker_ready"):
    """WAVE0: every rank voted; requests may be announced."""

    total_tokens: int  # the smallest stage's cache, in tokens


class Rejected(Struct, array_like=True, frozen=True, tag="rejected"):
    """WAVE0: the request can never be served (client's fault) or was refused (overload)."""

    rid: int
    code: str
    text: str


class StageHandoff(Struct, array_like=True, frozen=True):
    """What a decode worker needs to fetch one stage's state of one request."""

    stage: int
    layers: tuple[int, int]  # [first, stop) of the model's layers
    control_address: str  # ZeroMQ endpoint of this LOOP's hold desk
    hold: str  # unguessable, single use


class Ready(Struct, array_like=True, frozen=True, tag="ready"):
    """LOOP_s: the last span passed its fence on this stage and the state is held."""

    rid: int
    rank: int
    handoff: StageHandoff


class Timeline(Struct, array_like=True, frozen=True):
    """When a request passed rank 0's processes; seconds on that host's monotonic clock."""

    announced_at: float = 0.0  # WAVE0 took the announce
    admitted_at: float = 0.0  # all ranks had committed; the Install left
    scheduled_at: float = 0.0  # LOOP0 emitted the first wave
    answered_at: float = 0.0  # LOOP0 had the first token
    leased_at: float = 0.0  # rank 0 took its first lease; 0: not told
    attempts: int = 0  # to admit it, the last one included; 0: not told


class Finished(Struct, array_like=True, frozen=True, tag="finished"):
    """LOOP0: the first answer token is known."""

    rid: int
    endpoint: int  # tokens reused
    token: int
    logprob: float
    timeline: Timeline = Timeline()


class KvDelta(Struct, array_like=True, frozen=True, tag="kv_delta"):
    """WAVE_s: changes of this rank's tree since the last delta, in mutation order.

    `changes` holds (is_stored, window, key); stored parents come before children, removed
    children before parents.
    """

    rank: int
    sequence: int  # 1, 2, ... per rank
    changes: tuple[tuple[bool, int, bytes], ...]


class Gone(Struct, array_like=True, frozen=True, tag="gone"):
    """WAVE0: the request holds nothing on any rank any more."""

    rid: int


class CacheView(Struct, array_like=True, frozen=True, tag="cache_view"):
    """WAVE_s: every key that this rank's tree can resume, per window, and its slot counts."""

    rank: int
    number: int
    keys: tuple[tuple[bytes, ...], ...]  # per window
    free: tuple[int, ...]  # per window: device slots holding nothing
    cached: tuple[int, ...]  # attached, unreferenced, unreserved
    referenced: tuple[int, ...]
    reserved: tuple[int, ...]
    total: tuple[int, ...]
    host_free: tuple[int, ...]  # per window: the same of the host tier
    host_cached: tuple[int, ...]
    host_referenced: tuple[int, ...]
    host_reserved: tuple[int, ...]
    host_total: tuple[int, ...]
    lease_count: int
    escrow_count: int
    sequence_count: int


class Stats(Struct, array_like=True, frozen=True, tag="stats"):
    """Counters and gauges of one process, sent when they changed; names by the house rule."""

    rank: int
    role: str  # "wave" | "loop"
    values: dict[str, float]


class Fatal(Struct, array_like=True, frozen=True, tag="fatal"):
    """The sender is about to exit; the worker fails as a unit."""

    rank: int
    role: str
    text: str


ReportMessage = (
    WorkerReady | Rejected | Ready | Finished | KvDelta | Gone | CacheView | Stats | Fatal
)
REPORTS: Codec[ReportMessage] = Codec(ReportMessage)
