"""The decode side of a hand-off: fetches a prompt's state from every pipeline stage.

NIXL has no timeouts and may copy inside the post call; therefore each fetch (`transfer.fetch`)
runs in a thread of a small pool, where every wait has a deadline.  [algorithms 13, A54]
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import zmq

from wavepp_worker.base.errors import TransferError, check
from wavepp_worker.base.units import ceil_div
from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.transfer.agent import BlockPool, StatePool, TransferAgent
from wavepp_worker.transfer.desk_link import DeskLink, LinkPool
from wavepp_worker.transfer.desk_wire import Decline, Opened
from wavepp_worker.transfer.fetch import Fetch, LocalSide
from wavepp_worker.transfer.handoff import Handoff

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # longest wait for a desk's answer; a desk answers between two waves
FETCH_HOLDS_MAX = 4.0  # a fetch may take this many hold times; renewals carry it on
PEERS_MAX = 256  # exporters whose metadata is kept loaded


class StateReader:
    """Owns the decode worker's NIXL agent and registered pool; call it from one asyncio loop.

    Args:
        store: the local block store with all layers; must outlive the reader.
        layers: layers of the model.
        dtype: element type of the pool, e.g. "bfloat16".
        fingerprint: names weights and cache format; hand-offs with another one are refused.
        fetches_max: fetches under way at once; further ones wait.
        states: the local recurrent states of all recurrent layers; as `store`.
        recurrent: the layers whose state is in `states`.

    Raises:
        ConfigError: NIXL or its backend cannot be used here.
    """

    def __init__(
        self,
        config: TransferConfig,
        store: BlockPool,
        *,
        layers: int,
        block_tokens: int,
        dtype: str,
        fingerprint: str,
        fetches_max: int = 8,
        states: StatePool | None = None,
        recurrent: tuple[int, ...] = (),
    ) -> None:
        blocks_of = layers - len(recurrent)
        check(store.block_bytes == blocks_of * store.layer_bytes, "the local store has all layers")
        state_bytes = 0 if states is None else states.slot_bytes
        layer_bytes = 0 if states is None else states.layer_bytes
        check(
            state_bytes == len(recurrent) * layer_bytes and (states is None) == (not recurrent),
            "the local states are of all recurrent layers",
        )
        self._state_bytes = state_bytes
        agent = TransferAgent("decode", config.backend, store, states)
        self._agent = agent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links = LinkPool(self._context)
        self._local = LocalSide(
            agent=agent,
            links=self._links,
            peers=PeerBook(agent),
            layers=layers,
            store=store,
            states=states,
            recurrent=recurrent,
            block_tokens=block_tokens,
            dtype=dtype,
            fingerprint=fingerprint,
            answer_s=min(ANSWER_S, config.hold_s),
            fetch_s=FETCH_HOLDS_MAX * config.hold_s,
        )
        self._fetches = self._failures = self._bytes = 0
        self._seconds = 0.0
        self._threads = ThreadPoolExecutor(
            fetches_max, "fetch", initializer=_use_device, initargs=(store.pool.device,)
        )

    async def fetch(
        self,
        handoff: Handoff,
        block_ids: Sequence[int],
        is_wanted: Callable[[], bool],
        state_slot: int | None = None,
    ) -> None:
        """Copy the prompt's state into the local blocks `block_ids`, one per block of the prompt.

        The recurrent layers' state goes to `state_slot`.  When this returns or raises, no byte is
        written to either any more, except after `UnsettledError`.  Do not cancel it: make
        `is_wanted` false (it is called in a thread).

        Raises:
            IncompatibleError: the exporter's model, block size, layers or type differ.
            UnsettledError: a failed transfer cannot be stopped; the blocks are lost for good.
            TransferError: refused, expired, timed out, no longer wanted, or the exporter is gone.
        """
        check(
            len(block_ids) == ceil_div(handoff.prompt_tokens, handoff.block_tokens),
            "one local block for each block of the prompt",
        )
        started = time.monotonic()
        check((state_slot is None) == (self._local.states is None), "a slot for each state")
        fetch = Fetch(self._local, handoff, block_ids, is_wanted, state_slot)
        self._fetches += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, fetch.run)
        except TransferError:
            self._failures += 1
            raise
        self._bytes += len(block_ids) * self._local.store.block_bytes + self._state_bytes
        self._seconds += time.monotonic() - started

    async def decline(self, handoff: Handoff) -> None:
        """Tell every stage that nobody will read; best effort, a hold ends by itself anyway."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._decline, handoff)

    def stats(self) -> dict[str, float]:
        """Return counters by their metric names."""
        return {
            "wavepp_fetches_total": self._fetches,
            "wavepp_fetch_failures_total": self._failures,
            "wavepp_fetch_bytes_total": self._bytes,
            "wavepp_fetch_seconds_total": self._seconds,
        }

    def close(self) -> None:
        """Wait for fetches under way (they have deadlines), then end the agent.  Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._agent.close()
        self._links.close()
        self._context.term()

    def _decline(self, handoff: Handoff) -> None:
        for stage in handoff.stages:
            try:
                link = DeskLink(self._context, stage.control_address)
            except TransferError as error:
                logger.debug("could not decline a hold: %s", error)
                continue
            try:
                ask = link.next_ask()
                link.send(Decline(ask, stage.hold))
                link.receive(ask, time.monotonic() + self._local.answer_s)
            except TransferError as error:
                logger.debug("could not decline a hold: %s", error)
            finally:
                link.close()


class PeerBook:
    """Which exporter's metadata is loaded, by its desk's address; the oldest are forgotten.

    Several fetches share it.  Forgetting an exporter invalidates the other fetches from it; they
    fail with `TransferError` and are computed again, which only happens when it is gone anyway.
    """

    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent
        self._agents: OrderedDict[str, str] = OrderedDict()

    def known(self, address: str) -> str:
        """Return the agent whose metadata is loaded; "" if none."""
        return self._agents.get(address, "")

    def learn(self, address: str, opened: Opened) -> None:
        """Load the metadata that came with a desk's answer, if any.

        Raises:
            TransferError: damaged, or missing although the agent is not known.
        """
        known = self.known(address)
        if not opened.metadata:
            if known != opened.agent:
                raise TransferError(f"hold desk {address} sent no metadata of {opened.agent}")
            return
        self._agent.add_peer(opened.agent, opened.metadata, opened.metadata_digest)
        self._agents[address] = opened.agent
        if known not in ("", opened.agent):
            self._agent.forget_peer(known)
        if len(self._agents) > PEERS_MAX:
            self._agent.forget_peer(self._agents.popitem(last=False)[1])

    def forget(self, address: str, agent: str) -> None:
        """The exporter is gone or unreachable: its metadata is loaded anew next time."""
        if self._agents.get(address) == agent:
            self._agents.pop(address, None)
            self._agent.forget_peer(agent)


def _use_device(device: torch.device) -> None:
    # UCX only uses the fast GPU paths in threads that have chosen the device.
    if device.type == "cuda":
        torch.cuda.set_device(device)
