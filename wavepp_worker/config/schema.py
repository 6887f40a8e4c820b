"""The one configuration tree of a prefill worker, and the smaller one of the decode worker.

YAML text becomes a plain tree, `--set path=value` overrides are merged into it, and one
conversion makes the frozen tree below.  Unknown keys, wrong types, bad ranges and broken
relations are refused with the path in the file.  After that nothing is parsed or defaulted.

Units are in the names: `_tokens`, `_bytes`, `_s`, `_ms`.  Symbols (P, B, M, K, R) are the paper's.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from wavepp_worker.base.limits import STAGES_MAX

PositiveInt = Annotated[int, Meta(ge=1)]
NaturalInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Port = Annotated[int, Meta(ge=0, le=65535)]

VLLM_CPU_BLOCK_TOKENS = 32


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, keyword-only, no unknown keys."""


class ClusterConfig(Section, frozen=True):
    """How many stages, and where their processes run."""

    stages: Annotated[int, Meta(ge=1, le=STAGES_MAX)] = 2
    """P: pipeline stages, one rank and one device each."""
    host: Name = "127.0.0.1"
    """Address that this host's sockets bind to and advertise to the other ranks."""
    group: str = ""
    """Name shared by all ranks of one worker; empty: made up by the leader (one host only)."""
    first_host_stages: PositiveInt | None = None
    """Stages 0 to n - 1 run on the first host, beside the serving process; the others join from
    other hosts by `wavepp rank`.  Default: all."""
    join_port: Port = 0
    """Port of `host` on which the first host lets the others join; needed with several hosts."""
    devices: tuple[str, ...] = ()
    """One per stage, e.g. ["cuda:0", "cuda:1"]; empty: CUDA devices in order, else CPU."""
    threads: PositiveInt = 1
    """CPU threads of each stage's tensor operations; more than cores / stages makes it slower."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest wait for all ranks to load weights and find each other."""


def first_host_ranks(cluster: ClusterConfig) -> int:
    """Return how many ranks run on the first host."""
    return cluster.first_host_stages or cluster.stages


class ModelConfig(Section, frozen=True):
    """Which weights, and how they are cut."""

    path: Name
    """Hugging Face folder: config.json and *.safetensors; `~` is expanded."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute and cache type; auto: the checkpoint's own."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy: random weights from `seed`, for tests and benchmarks; only config.json is read."""
    seed: NaturalInt = 0
    stage_layers: tuple[PositiveInt, ...] = ()
    """Layers of each stage; default: cut so that the slowest stage computes as little as possible
    for a token in the middle of a prompt of 65,536."""
    context_tokens_max: PositiveInt | None = None
    """Longest prompt; default: the model's own limit."""


class CacheConfig(Section, frozen=True):
    """The block pools of every stage."""

    block_tokens: PositiveInt = 64
    """B.  The router and the decode worker use the same block size."""
    device_tokens: PositiveInt | None = None
    """Cache per stage in tokens; default: what `device_fraction` of the free memory holds."""
    device_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.85
    """Share of the memory left after weights that the pools take (CUDA only)."""
    host_tokens: NaturalInt = 0
    """Host tier per stage in tokens: blocks that the device has no room for wait there instead of
    being computed again.  0: none.  Pinned memory on CUDA."""
    snapshot_interval_tokens: PositiveInt | None = None
    """Recurrent layers keep their state so often, and at the last block; default: M."""
    state_slots: PositiveInt | tuple[PositiveInt, ...] | None = None
    """States that a stage with recurrent layers keeps, running requests and snapshots alike; one
    number, or one per stage.  Default: K and twice as many as the cache has snapshot intervals."""
    floor_fraction: Fraction = 0.10
    """Share of a pool that leases and escrows leave alone.  [algorithms 7.3]"""
    floor_headroom_fraction: Fraction = 0.25
    """kappa_f: cap of the floor as a share of one ring of full waves (2PM tokens)."""


class AdmissionConfig(Section, frozen=True):
    """Rounds, queues and how much is promised ahead.  [P-ADMISSION]"""

    mode: Literal["leases", "waves", "naive"] = "leases"
    """leases: up to K requests at once, each protected by lease and escrow.  The others are the
    paper's lower rungs, for comparison.  waves: one request at a time, beside the pipeline.
    naive: one at a time, by two tree walks, while the executor waits."""

    batch_requests_max: PositiveInt = 16
    """K: requests being admitted at once, and spans in one wave."""
    headroom_factor: Annotated[float, Meta(ge=0)] = 1.0
    """kappa: tokens kept free at selection = kappa * 2 * P * M."""
    queue_requests_max: PositiveInt = 1024
    """Requests in the worker at most; further ones are refused with HTTP 429."""
    round_min_ms: PositiveFloat = 0.2
    round_active_ms: PositiveFloat = 0.5
    round_idle_ms: PositiveFloat = 5.0
    round_quiet_ms: PositiveFloat = 50.0
    """Spacing of rounds: least; while answers are due; while requests wait; heartbeat."""
    auto_commit: bool = True
    """Commit in the same step when the lease equals the candidate."""
    hint_refine: bool = False
    """Repeat the hint vote below the candidate until it stops falling (hybrid models)."""


class PlannerConfig(Section, frozen=True):
    """What the next wave contains."""

    kind: Literal["mpu", "greedy", "throttle"] = "mpu"
    """mpu: budgets that keep every stage supplied.  greedy: every wave as full as it gets.
    throttle: gLLM's rule, for comparison.  [P-MPU]"""
    wave_tokens_max: PositiveInt = 16_384
    """M: largest wave, in tokens."""
    wave_tokens_min: PositiveInt | None = None
    """b_min: smallest wave that work is cut into; default M / 2.  Smaller ones fill the pipeline
    with less work and cost launches and transfers."""
    fill_factor: PositiveInt = 2
    """F: pipeline fills to keep queued, the one in the ring counted."""
    split_fraction_max: Annotated[float, Meta(ge=0, le=1)] = 0.125
    """Share of the work that a smaller budget may newly split once the ring is full."""
    inflight: Literal["latest", "all"] = "latest"
    """Chunks in the ring that count as work when a wave is sized: each request's latest, or all.
    all keeps waves large with a few very long prompts."""
    lone_wait_ms: Annotated[float, Meta(ge=0)] = 1.0
    """T_lone: a small wave of one request waits so long for one that is being admitted."""
    emit_wait_ms: PositiveFloat = 5.0
    """T_emit: nothing optional holds work back for longer."""


class ExecutorConfig(Section, frozen=True):
    """The ring of waves and its alarms."""

    admit_timeout_s: PositiveFloat = 5.0
    """T_admit: a wave named a request that this rank does not know yet."""
    stall_timeout_s: PositiveFloat = 60.0
    """T_stall: waves in the ring and none retired."""


class TransportConfig(Section, frozen=True):
    """How ranks talk."""

    rounds: Literal["zmq", "dynamo"] = "zmq"
    """zmq: own sockets (0.1 ms a hop).  dynamo: Dynamo endpoints (0.9 ms a hop)."""
    activations: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA devices, gloo on CPU."""
    collective_timeout_s: PositiveFloat = 120.0
    """T_coll: a rank that answers no round for this long is lost, and so is one whose WAVE or LOOP
    process says nothing to the other."""


class TransferConfig(Section, frozen=True):
    """The hand-off to decode workers through NIXL."""

    backend: Name = "UCX"
    hold_s: PositiveFloat = 30.0
    """A finished prompt is kept this long for its reader; each renewal starts it anew."""
    holds_max: PositiveInt = 4096


class DecodePoolConfig(Section, frozen=True):
    """Which decode workers take finished prompts, and what a stock vLLM must agree with."""

    kind: Literal["wavepp", "vllm-push"] = "wavepp"
    """wavepp: the reference decode worker reads the cache.  vllm-push: the stages write it into
    stock vLLM workers that run `NixlPushConnector`."""
    vllm_version: Name = "0.31.0"
    """`vllm.__version__` of the decode workers."""
    model: str = ""
    """The decode workers' `--model`, letter for letter; empty: `model.path` with `~` expanded."""
    attention_backend: Name = "CPU_ATTN"
    """The decode workers' attention backend; it decides how a block's bytes lie."""
    enforce_handshake_compat: bool = True
    """False if the decode workers run with the same in `kv_connector_extra_config`: then neither
    side compares versions, models and types."""
    block_tokens: PositiveInt | None = None
    """The decode workers' `--block-size`; divides `cache.block_tokens`, which is the default.
    vLLM on CPU wants multiples of 32."""
    side_channel_port: Port = 0
    """Port of `cluster.host` that answers handshakes; 0: a free one."""
    registration_s: PositiveFloat = 60.0
    """Nothing is written into blocks that decode offered longer ago; below vLLM's own
    `push_registration_timeout`, and below the time after which clients give up."""
    staging_tokens: PositiveInt = 8192
    """Per stage: room in host memory where blocks wait, packed, for their write."""


class ServingConfig(Section, frozen=True):
    """How the worker appears in Dynamo.  Planes and discovery are Dynamo's own DYN_* settings."""

    served_model_name: str = ""
    """Name in the OpenAI API; empty: the model folder's name."""
    component: Name = "prefill"
    endpoint: Name = "generate"
    request_timeout_s: PositiveFloat = 600.0
    """Longest time from arrival to the hand-off."""


class ObsConfig(Section, frozen=True):
    """What an operator sees."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    stats_interval_s: PositiveFloat = 0.5
    """Processes report changed counters this often."""
    slow_request_s: PositiveFloat = 60.0
    """A request that takes longer than this is told in the log, phase by phase."""
    trace_folder: str = ""
    """Prefill worker: folder for the parts of a timeline, at most 64 MiB per process; `serve
    --trace-out` sets it.  Empty: none."""


class DebugConfig(Section, frozen=True):
    """For tests; costs time."""

    invariants: Literal["off", "idle", "always"] = "off"
    """When the cache checks its own books: never, when nothing runs, after every section."""


class Config(Section, frozen=True):
    """Everything a prefill worker is told."""

    model: ModelConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    decode_pool: DecodePoolConfig = field(default_factory=DecodePoolConfig)
    serving: ServingConfig = field(default_factory=ServingConfig)
    obs: ObsConfig = field(default_factory=ObsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        blocks, waves = self.cache.block_tokens, self.planner.wave_tokens_max
        if waves % blocks:
            raise ValueError(
                f"planner.wave_tokens_max ({waves}) must be a multiple of "
                f"cache.block_tokens ({blocks})"
            )
        for name, tokens in (
            ("planner.wave_tokens_min", self.planner.wave_tokens_min),
            ("cache.snapshot_interval_tokens", self.cache.snapshot_interval_tokens),
            ("cache.host_tokens", self.cache.host_tokens),
        ):
            if tokens and tokens % blocks:
                raise ValueError(
                    f"{name} ({tokens}) must be a multiple of cache.block_tokens ({blocks})"
                )
        if self.admission.mode == "naive" and self.planner.kind != "greedy":
            raise ValueError(
                "admission.mode naive needs planner.kind greedy: its executor asks for the next "
                f"request when a wave is not full, which {self.planner.kind} decides otherwise"
            )
        if (self.planner.wave_tokens_min or 0) > waves:
            raise ValueError(
                f"planner.wave_tokens_min ({self.planner.wave_tokens_min}) exceeds "
                f"planner.wave_tokens_max ({waves})"
            )
        if self.cluster.devices and len(self.cluster.devices) != self.cluster.stages:
            raise ValueError(
                f"cluster.devices names {len(self.cluster.devices)} devices "
                f"for cluster.stages = {self.cluster.stages}"
            )
        cluster = self.cluster
        if (cluster.first_host_stages or 0) > cluster.stages:
            raise ValueError(
                f"cluster.first_host_stages ({cluster.first_host_stages}) exceeds "
                f"cluster.stages ({cluster.stages})"
            )
        if first_host_ranks(cluster) < cluster.stages and not (cluster.group and cluster.join_port):
            raise ValueError(
                "cluster.first_host_stages leaves stages to other hosts, which need cluster.group "
                "and cluster.join_port to join"
            )
        if self.model.stage_layers and len(self.model.stage_layers) != self.cluster.stages:
            raise ValueError(
                f"model.stage_layers has {len(self.model.stage_layers)} entries "
                f"for cluster.stages = {self.cluster.stages}"
            )
        slots = self.cache.state_slots
        if isinstance(slots, tuple) and len(slots) != self.cluster.stages:
            raise ValueError(
                f"cache.state_slots has {len(slots)} entries for cluster.stages = "
                f"{self.cluster.stages}"
            )
        if self.cache.device_tokens is not None and self.cache.device_tokens < 2 * blocks:
            raise ValueError("cache.device_tokens must hold at least two blocks")
        if self.decode_pool.kind == "vllm-push":
            self._check_vllm()

    def _check_vllm(self) -> None:
        pool, ours = self.decode_pool, self.cache.block_tokens
        theirs = pool.block_tokens or ours
        if ours % theirs:
            raise ValueError(
                f"decode_pool.block_tokens ({theirs}) must divide cache.block_tokens ({ours})"
            )
        if pool.attention_backend == "CPU_ATTN" and theirs % VLLM_CPU_BLOCK_TOKENS:
            raise ValueError(
                f"decode_pool.block_tokens ({theirs}) must be a multiple of "
                f"{VLLM_CPU_BLOCK_TOKENS}: vLLM's CPU kernel takes no other blocks"
            )
        if first_host_ranks(self.cluster) < self.cluster.stages and not pool.model:
            raise ValueError(
                "decode_pool.model must be given with stages on several hosts: all tell vLLM the "
                "same name, but model.path may differ between them"
            )
        if pool.staging_tokens < theirs:
            raise ValueError(
                f"decode_pool.staging_tokens ({pool.staging_tokens}) must hold a block of {theirs}"
            )


class DecodeBatchConfig(Section, frozen=True):
    """Limits of the reference decode worker."""

    requests_max: PositiveInt = 16
    """Requests decoded together; further ones wait."""
    queue_requests_max: PositiveInt = 256
    cache_tokens: PositiveInt = 16_384
    """Cache of the decode worker, in tokens."""


class DecodeConfig(Section, frozen=True):
    """Everything the reference decode worker is told."""

    model: ModelConfig
    served_model_name: str = ""
    component: Name = "decode"
    endpoint: Name = "generate"
    device: str = ""
    """One device; empty: the first CUDA device, else CPU."""
    threads: PositiveInt = 1
    block_tokens: PositiveInt = 64
    """Must equal the prefill worker's cache.block_tokens."""
    lost_state: Literal["compute", "fail"] = "compute"
    """When a hand-off cannot be fetched: compute the prompt here, or fail the request, which
    Dynamo then retries on another decode worker if there is one."""
    batch: DecodeBatchConfig = field(default_factory=DecodeBatchConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    obs: ObsConfig = field(default_factory=ObsConfig)


class VllmDecodeConfig(Section, frozen=True):
    """A stock vLLM decode worker under Dynamo, on the CPU, that takes what stages push."""

    model: ModelConfig
    served_model_name: str = ""
    python: str = ""
    """Interpreter of an environment with vLLM and Dynamo; empty: what `make vllm-env` makes."""
    block_tokens: PositiveInt = 32
    """Its `--block-size`; equals PrefillWorker.decode_pool.block_tokens."""
    cache_gib: PositiveInt = 1
    """Its cache, GiB."""
    threads_bind: str = "0"
    """Cores of its compute threads, as in `VLLM_CPU_OMP_THREADS_BIND`: "0", "0-3"."""
    host: str = "127.0.0.1"
    """Where prefill reaches its side channel."""
    side_channel_port: Annotated[int, Meta(ge=1, le=65535)] = 15600
    extra_arguments: tuple[str, ...] = ()
    """More arguments of `python -m dynamo.vllm`."""


class FrontendConfig(Section, frozen=True):
    """Dynamo's own frontend: OpenAI API, preprocessing, KV router."""

    host: Name = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 8000
    router_mode: Literal["kv", "round-robin", "random"] = "kv"
    migration_limit: NaturalInt = 2
    """How often Dynamo may retry a request on another worker."""


class DynamoConfig(Section, frozen=True):
    """Planes shared by every process of the graph; exported as Dynamo's DYN_* variables."""

    namespace: Name = "dynamo"
    discovery_backend: Literal["file", "etcd", "kubernetes", "mem"] = "file"
    """file: a folder, no service needed.  etcd: reads `etcd_endpoints`."""
    request_plane: Literal["tcp", "nats"] = "tcp"
    event_plane: Literal["zmq", "nats"] = "zmq"
    etcd_endpoints: str = ""
    nats_server: str = ""
    store_folder: str = ""
    """Folder of the file backend; empty: a temporary one that ends with the graph."""
