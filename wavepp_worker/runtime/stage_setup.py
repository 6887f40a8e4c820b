"""Builds the device side of one rank: device, weights, hops, pool, hold desk, stream.

Everything that a configuration or a machine can get wrong at start shows here, as an error whose
text is fit for the person who started the worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from wavepp_worker.base.errors import ConfigError, DeviceError, PeerError
from wavepp_worker.base.types import LEADER, Rank
from wavepp_worker.base.units import ceil_div
from wavepp_worker.config.derive import (
    HOST_FRACTION,
    block_and_fixed_bytes,
    blocks_in,
    snapshots_in,
    state_slots,
)
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.spec import read_spec
from wavepp_worker.runtime.boot import Boot
from wavepp_worker.runtime.host_memory import available_bytes
from wavepp_worker.runtime.loop_timeline import Marks, new_marks
from wavepp_worker.runtime.push_desk import PushDesk
from wavepp_worker.runtime.stage_stream import CpuStageStream, CudaStageStream
from wavepp_worker.runtime.stage_work import StageWork
from wavepp_worker.transfer.agent import BlockPool, TransferAgent
from wavepp_worker.transfer.desk import HoldDesk
from wavepp_worker.transport.activations import ActivationLink, Store, join_store, open_store
from wavepp_worker.transport.sockets import Context
from wavepp_worker.vllm_decode.agreement import agree
from wavepp_worker.vllm_decode.driver import PushDriver, PushStage
from wavepp_worker.vllm_decode.push import PushSettings
from wavepp_worker.vllm_decode.staging import Staging
from wavepp_worker.wire.mailbox import WindowReport

logger = logging.getLogger(__name__)

CPU_POOL_FRACTION = 0.25  # of the memory that is free now, shared by all stages of this host
CPU_PROMPTS = 4  # a CPU pool of default size holds no more than so many longest prompts
PROGRESS_INTERVAL_S = 2.0


@dataclass(slots=True)
class Stage:
    """What the LOOP process drives."""

    stream: CpuStageStream | CudaStageStream
    desk: HoldDesk | PushDesk
    windows: tuple[WindowReport, ...]
    marks: Marks | None = None  # what the stream tells a timeline

    def close(self) -> None:
        """Stop both.  Idempotent."""
        self.stream.close()
        self.desk.close()


class TorchSide:
    """What a LOOP process asks of torch at its start, in the order of the calls."""

    def __init__(self, boot: Boot, rank: Rank) -> None:
        self._boot, self._rank = boot, rank
        self._store: Store = None  # not used with one stage

    def open_store(self) -> str:
        """Open the torch.distributed store of this epoch on rank 0; return its address."""
        cluster = self._boot.config.cluster
        if self._rank != LEADER or cluster.stages == 1:
            return ""
        self._store, address = open_store(cluster.host, timeout_s=cluster.start_timeout_s)
        return address

    def build_stage(self, store_address: str, context: Context) -> Stage:
        """Join the store and build the stage."""
        cluster = self._boot.config.cluster
        if self._store is None and cluster.stages > 1:
            self._store = join_store(store_address, timeout_s=cluster.start_timeout_s)
        return build_stage(self._boot, self._rank, self._store, context)


def build_stage(boot: Boot, rank: Rank, store: Store, context: Context) -> Stage:
    """Return this rank's stage, connected to its neighbours.  Takes as long as loading does.

    Args:
        store: the torch.distributed store of this epoch; not used with one stage.
        context: for the hold desk's socket.

    Raises:
        ConfigError: unusable weights, devices, pool size or transfer backend.
        DeviceError: out of memory.
        PeerError: a neighbour did not come up in time.
    """
    config, plan = boot.config, boot.plan.stages[rank]
    work, windows = build_work(boot, rank, store)
    desk: HoldDesk | PushDesk
    if config.decode_pool.kind == "vllm-push":
        desk = open_push_desk(boot, rank, work.store, context)
    else:
        desk = HoldDesk(
            config.transfer,
            config.cluster.host,
            work.store,
            rank=rank,
            layers=(plan.first, plan.stop),
            block_tokens=config.cache.block_tokens,
            dtype=boot.facts.dtype,
            fingerprint=boot.plan.fingerprint,
            context=context,
            states=work.states,
        )
    marks = new_marks() if config.obs.trace_folder else None
    return Stage(open_stream(work, marks), desk, windows, marks)


def open_push_desk(boot: Boot, rank: Rank, store: BlockPool, context: Context) -> PushDesk:
    """Return the desk that writes this stage's finished prompts into vLLM decode workers.

    Raises:
        ConfigError: terms that are not supported, or NIXL cannot be used here.
        DeviceError: no room for the staging area.
    """
    config, plan = boot.config, boot.plan.stages[rank]
    terms = agree(config, boot.facts)
    stage = PushStage(
        layers=range(plan.first, plan.stop),
        agreement=terms,
        settings=PushSettings(
            engine_id=f"{boot.group}-{boot.epoch}",
            stages=config.cluster.stages,
            hold_s=config.transfer.hold_s,
            registration_s=config.decode_pool.registration_s,
            prompts_max=config.transfer.holds_max,
        ),
        host=config.cluster.host,
    )
    slots = config.decode_pool.staging_tokens // terms.block_tokens

    def open_driver() -> PushDriver:
        what = f"allocating {slots} blocks to write from (decode_pool.staging_tokens)"
        with _memory_errors(what, torch.device("cpu")):
            staging = Staging(store.pool, terms.layout, terms.block_tokens, slots)
        agent = TransferAgent(f"push{rank}", config.transfer.backend, staging)
        return PushDriver(stage, agent, staging, context, time.monotonic)

    return PushDesk(rank, (plan.first, plan.stop), config.cache.block_tokens, context, open_driver)


def open_stream(work: StageWork, marks: Marks | None = None) -> CpuStageStream | CudaStageStream:
    """Return the stream of the stage's device."""
    kind = CudaStageStream if work.model.device.type == "cuda" else CpuStageStream
    return kind(work, marks)


def build_work(boot: Boot, rank: Rank, store: Store) -> tuple[StageWork, tuple[WindowReport, ...]]:
    """Return this rank's model, hops and pools, and its windows as allocated.

    Args and raises as `build_stage`, but for the hand-off.
    """
    config, plan = boot.config, boot.plan.stages[rank]
    torch.set_num_threads(config.cluster.threads)
    device = stage_device(config.cluster.devices, boot.ranks_here, rank)
    spec = read_spec(config.model.path, config.model.dtype)
    with _memory_errors(f"loading the weights of layers {plan.first} to {plan.stop - 1}", device):
        model = load_stage(
            config.model.path,
            spec,
            plan.first,
            plan.stop,
            device=device,
            load_format=config.model.load_format,
            seed=config.model.seed,
            progress=_progress_log(rank),
        )
    # Before the link: no stage allocates until all have come this far, so all see the same memory.
    on_host, states_on_host = host_blocks(boot), host_states(boot, rank)
    # Before the pool: its size is what the device has left once the hops have their buffers.
    link = _open_link(boot, rank, store, device)
    blocks = pool_blocks(boot, rank, device)
    slots = state_slots(config, boot.plan, rank, blocks)
    size = f"{blocks} blocks of {plan.block_bytes} bytes"
    if slots:
        size += f" and {slots} states of {plan.state_bytes} bytes"
    what = f"allocating a cache of {size} (cache.device_tokens)"
    if on_host:
        what += f" and {on_host} blocks in host memory (cache.host_tokens)"
    with _memory_errors(what, device):
        kv_store = model.make_store(blocks, config.cache.block_tokens, on_host)
        states = model.make_states(slots, states_on_host)
    logger.info("cache: %s rank=%d device=%s", size, rank, device)
    if on_host:
        logger.info(
            "host tier: %d blocks, %d states, %d bytes rank=%d",
            on_host,
            states_on_host,
            on_host * plan.block_bytes + states_on_host * plan.state_bytes,
            rank,
        )
    windows = []
    if model.has_attention:
        windows.append(WindowReport("attention", blocks, on_host))
    if states is not None:
        windows.append(WindowReport("recurrent", slots, states_on_host))
    return StageWork(model, kv_store, link, states), tuple(windows)


def stage_device(devices: tuple[str, ...], ranks: tuple[int, ...], rank: Rank) -> torch.device:
    """Return the configured device, or the rank's CUDA device, or the CPU where there is none.

    Args:
        ranks: of this host; the first of them takes the host's first CUDA device.

    Raises:
        ConfigError: no such device, or fewer CUDA devices than stages.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        try:
            device = torch.device(devices[rank])
        except RuntimeError as error:
            raise ConfigError(f"cluster.devices: {devices[rank]!r} is not a device") from error
    elif count == 0:
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", ranks.index(rank))
    if device.type == "cuda":
        index = device.index or 0
        if index >= count:
            raise ConfigError(
                f"cluster.devices: stage {rank} wants cuda:{index}, but {count} CUDA device(s) are "
                f"visible (stages on this host: {len(ranks)})"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ConfigError(f"cluster.devices: {devices[rank]!r}: only cpu and cuda are supported")
    return device


def pool_blocks(boot: Boot, rank: Rank, device: torch.device) -> int:
    """Return how many blocks this stage's pool gets, with `state_slots` for so many beside it.

    Without attention layers: for how many blocks of the other stages it keeps snapshots.

    Raises:
        ConfigError: not even two blocks fit.
    """
    config, plan = boot.config, boot.plan
    block_bytes, fixed_bytes = block_and_fixed_bytes(config, plan, rank)
    if config.cache.device_tokens is not None:
        return config.cache.device_tokens // plan.block_tokens
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        blocks = blocks_in(free_bytes, config.cache.device_fraction, block_bytes, fixed_bytes)
    else:
        free_bytes = available_bytes()
        budget_bytes = int(free_bytes * CPU_POOL_FRACTION) // len(boot.ranks_here) - fixed_bytes
        ring_tokens = plan.ring_waves * plan.wave_tokens_max
        enough = ceil_div(CPU_PROMPTS * plan.context_tokens + ring_tokens, plan.block_tokens)
        blocks = min(budget_bytes // max(1, block_bytes), enough)
    if blocks < 2:
        raise ConfigError(
            f"no room for a cache on {device}: {free_bytes} bytes are free, one block of stage "
            f"{rank} takes {block_bytes} and its states {fixed_bytes}; use a smaller model, more "
            "stages or a smaller cache.block_tokens or cache.state_slots"
        )
    return blocks


def host_states(boot: Boot, rank: Rank) -> int:
    """Return how many states this stage's host tier gets; 0 without recurrent layers."""
    if not boot.plan.stages[rank].state_bytes:
        return 0
    return snapshots_in(boot.plan, boot.config.cache.host_tokens)


def host_blocks(boot: Boot) -> int:
    """Return how many blocks each stage's host tier gets.

    To be called before any stage of this host allocates its own: the answer is about all of them.

    Raises:
        ConfigError: the host tiers of all stages do not fit what is available now.
    """
    tokens = boot.config.cache.host_tokens
    stages = {rank: boot.plan.stages[rank] for rank in boot.ranks_here}
    blocks = tokens // boot.plan.block_tokens
    needed_bytes = blocks * sum(stage.block_bytes for stage in stages.values())
    needed_bytes += sum(
        host_states(boot, Rank(rank)) * stage.state_bytes for rank, stage in stages.items()
    )
    free_bytes = available_bytes()
    if needed_bytes > free_bytes * HOST_FRACTION:
        raise ConfigError(
            f"cache.host_tokens = {tokens}: the host tiers of {len(stages)} stages take "
            f"{needed_bytes} bytes; {free_bytes} are available, of which {HOST_FRACTION:.0%} may "
            "be taken"
        )
    return blocks


def _open_link(boot: Boot, rank: Rank, store: Store, device: torch.device) -> ActivationLink | None:
    config = boot.config
    if config.cluster.stages == 1:
        return None
    backend = config.transport.activations
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if (backend == "nccl") != (device.type == "cuda"):
        raise ConfigError(f"transport.activations: {backend} cannot move tensors of {device}")
    # Stages load weights of their own size, so the first meeting may take much longer than any
    # later exchange.  All wait for all: what each takes next, the others have not looked for yet.
    try:
        store.set(f"loaded{rank}", b"1")
        store.wait([f"loaded{other}" for other in range(config.cluster.stages)])
        return ActivationLink(
            rank,
            config.cluster.stages,
            backend=backend,
            store=store,
            host=config.cluster.host,
            timeout_s=config.transport.collective_timeout_s,
            device=device,
        )
    except RuntimeError as error:
        raise PeerError(
            f"stage {rank} could not meet the other stages within "
            f"{config.cluster.start_timeout_s:g} s (cluster.start_timeout_s): {error}"
        ) from error


@contextmanager
def _memory_errors(what: str, device: torch.device) -> Iterator[None]:
    """Say what was being done when memory ran out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # The CPU allocator raises a plain RuntimeError, the CUDA one a subclass of it.
        text = str(error)
        if not isinstance(error, MemoryError) and "memory" not in text:
            raise
        raise DeviceError(f"out of memory on {device} while {what}: {text}") from error


def _progress_log(rank: Rank) -> Callable[[int, int], None]:
    logged_at = time.monotonic()

    def log(loaded: int, total: int) -> None:
        nonlocal logged_at
        now = time.monotonic()
        if loaded == total or now - logged_at >= PROGRESS_INTERVAL_S:
            logged_at = now
            logger.info("weights: %d of %d tensors rank=%d", loaded, total, rank)

    return log
