"""Activations from stage to stage: one two-member process group per hop (gloo or NCCL).

    stage 0 ──hop 0──▶ stage 1 ──hop 1──▶ stage 2

A group of its own gives every hop its own connection and, with NCCL, its own stream: on a shared
one a stage's send would queue behind its receive of the next wave.  Tensors of a hop travel in
name order, waves in wave order; both ends know the shapes from the wave's header, so nothing but
the bytes is sent.  The chain has no cycle, so it cannot deadlock.

`Incoming.wait` and, when two waves are unsent, `send` wait: with gloo the calling thread, with
NCCL the current CUDA stream.  Gloo copies nothing ahead: a send ends when its receive was posted.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed
from torch import Tensor

from wavepp_worker.base.errors import check

dist: Any = torch.distributed  # its native classes are exported without types
Store = Any  # torch.distributed.Store
TensorSpec = tuple[tuple[int, ...], torch.dtype]  # shape, dtype

SENDS_MAX: Final = 2  # waves of one hop that are sent and not received: one running, one waiting
SENDER, RECEIVER = 0, 1  # ranks within a hop's group


class Incoming:
    """A wave's inputs under way."""

    def __init__(self, tensors: dict[str, Tensor], works: list[Any]) -> None:
        self._tensors = tensors
        self._works = works

    def wait(self) -> dict[str, Tensor]:
        """Return the tensors once they are here.

        Raises:
            RuntimeError: torch's own; the sender is gone or silent.
        """
        for work in self._works:
            work.wait()
        return self._tensors


class ActivationLink:
    """One stage's ends of its two hops.  Used by one thread.

    Args:
        rank: this stage.
        stages: P >= 2.
        backend: "gloo" or "nccl".
        store: reaches every stage of this epoch.
        host: address that gloo connections bind to.
        timeout_s: longest wait for a neighbour, at start and for one tensor.
        device: where received tensors live.

    Raises:
        RuntimeError: torch's own; a neighbour did not come up in time.
    """

    def __init__(
        self,
        rank: int,
        stages: int,
        *,
        backend: str,
        store: Store,
        host: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        check(0 <= rank < stages and stages > 1, "a link joins stages", rank=rank, stages=stages)
        self._device = device
        self._sending: deque[tuple[list[Tensor], list[Any]]] = deque()
        timeout = timedelta(seconds=timeout_s)

        def join(hop: int, member: int) -> Any:
            hop_store = dist.PrefixStore(f"hop{hop}", store)
            if backend == "nccl":
                return _nccl_group(hop_store, member, timeout, device)
            return _gloo_group(hop_store, member, timeout, host)

        # Upstream first: stage 0 has no upstream, so hops come up one after the other.
        self._upstream: Any = join(rank - 1, RECEIVER) if rank > 0 else None
        self._downstream: Any = join(rank, SENDER) if rank < stages - 1 else None
        self._meet()

    def receive(self, spec: Mapping[str, TensorSpec]) -> Incoming:
        """Start to receive the next wave; calls are in wave order."""
        tensors = {
            name: torch.empty(shape, dtype=dtype, device=self._device)
            for name, (shape, dtype) in sorted(spec.items())
        }
        works = [self._upstream.recv([tensor], SENDER, 0) for tensor in tensors.values()]
        return Incoming(tensors, works)

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to send a wave's outputs; waits while `SENDS_MAX` waves are unsent."""
        if len(self._sending) == SENDS_MAX:
            _, works = self._sending.popleft()
            for work in works:
                work.wait()
        # The buffers must live until their receiver has them.
        kept = [tensor.contiguous() for _, tensor in sorted(tensors.items())]
        works = [self._downstream.send([tensor], RECEIVER, 0) for tensor in kept]
        self._sending.append((kept, works))

    def _meet(self) -> None:
        """Pass one number down the chain: NCCL connects at the first use, and that may block."""
        token = torch.zeros(1, device=self._device)
        if self._upstream is not None:
            self._upstream.recv([token], SENDER, 0).wait()
        if self._downstream is not None:
            self._downstream.send([token], RECEIVER, 0).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def open_store(host: str, *, timeout_s: float) -> tuple[Store, str]:
    """Return rank 0's store and its address "host:port"; listens on `host` only."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(socket.SOMAXCONN)
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),  # the store owns and closes it
    )
    return store, f"{host}:{port}"


def join_store(address: str, *, timeout_s: float) -> Store:
    """Return a client of the store at `address`, "host:port"."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _gloo_group(store: Store, member: int, timeout: timedelta, host: str) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, member, 2, options)


def _nccl_group(store: Store, member: int, timeout: timedelta, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, member, 2, options)
