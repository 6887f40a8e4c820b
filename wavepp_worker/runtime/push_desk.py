"""A stage's hand-offs to vLLM, on a thread of their own beside LOOP.

Packing copies whole prompts, and NIXL has nothing to wait on; neither may delay a wave.  LOOP sees
what it sees of a hold desk: it offers finished prompts and is told when their slots are free.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from msgspec import Struct

from wavepp_worker.base.errors import PeerError, check, describe
from wavepp_worker.vllm_decode.driver import PushDriver
from wavepp_worker.wire.mailbox import StageHandoff, StateSlots

logger = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
CLOSE_S = 5.0


class _Offer(Struct, frozen=True):
    rid: int
    hold: str
    table: tuple[int, ...]
    tokens: int


class _Withdraw(Struct, frozen=True):
    rid: int


class PushDesk:
    """Stands where `HoldDesk` stands.  One thread besides the caller's.

    Args:
        open_driver: called on the new thread, which then owns the driver and its sockets.

    Raises:
        ConfigError: the driver could not be opened; whatever `open_driver` raises.
    """

    def __init__(
        self,
        rank: int,
        layers: tuple[int, int],
        block_tokens: int,
        context: zmq.Context[Socket],
        open_driver: Callable[[], PushDriver],
    ) -> None:
        self._rank, self._layers, self._block_tokens = rank, layers, block_tokens
        self._requests: deque[_Offer | _Withdraw] = deque()
        self._ended: deque[int] = deque()
        self._stats: dict[str, float] = {}
        self._error: BaseException | None = None
        self._address = ""
        self._is_closing = False
        self._is_open = threading.Event()
        name = f"inproc://push-desk-{secrets.token_hex(8)}"
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(name)
        self._theirs = context.socket(zmq.PAIR)
        self._theirs.setsockopt(zmq.LINGER, 0)
        self._theirs.connect(name)
        self._thread = threading.Thread(
            target=self._run, args=(open_driver,), name=f"push{rank}", daemon=True
        )
        self._thread.start()
        self._is_open.wait()  # the driver opens a socket and an agent; LOOP has nothing to do
        if self._error is not None:
            self.close()
            raise self._error

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
        """Hold a finished prompt's slots until they are written; as `HoldDesk.open_hold`."""
        check(len(tables) == 1 and not states, "one attention window", rid=rid)
        blocks = -(-tokens // self._block_tokens)
        table = tuple(tables[0][:blocks])
        check(0 < blocks == len(table), "the table covers the prompt", rid=rid, tokens=tokens)
        hold = secrets.token_urlsafe(24)
        self._ask(_Offer(rid, hold, table, tokens))
        return StageHandoff(
            stage=self._rank, layers=self._layers, control_address=self._address, hold=hold
        )

    def release(self, rid: int) -> None:
        """Nobody waits for the request any more; `poll` reports its end."""
        self._ask(_Withdraw(rid))

    def poll(self, now: float) -> list[int]:
        """Return requests whose slots may be reused, each once.

        Raises:
            PeerError: the desk's thread has failed; the worker fails with it.
        """
        while True:
            try:
                self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
        if self._error is not None:
            raise PeerError(f"the push desk failed: {describe(self._error)}") from self._error
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def next_deadline(self) -> float | None:
        """Nothing is due: the thread keeps its own deadlines."""
        return None

    def stats(self, now: float) -> dict[str, float]:
        """Return gauges and counters by their metric names."""
        return self._stats

    def close(self) -> None:
        """End every write, then the agent.  Idempotent."""
        if not self._is_closing:
            self._is_closing = True
            self._wake(self._socket)
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the push desk of stage %d did not end in time", self._rank)
        self._socket.close()

    def _ask(self, request: _Offer | _Withdraw) -> None:
        self._requests.append(request)
        self._wake(self._socket)

    @staticmethod
    def _wake(socket: Socket) -> None:
        with contextlib.suppress(zmq.Again):  # it has enough reasons to wake
            socket.send(b"", zmq.NOBLOCK)

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run(self, open_driver: Callable[[], PushDriver]) -> None:
        try:
            driver = open_driver()
            try:
                self._address = driver.address
                self._stats = driver.stats()
                self._is_open.set()
                self._serve(driver)
            finally:
                driver.close()
        except BaseException as error:  # the thread's top: LOOP's next `poll` raises it
            self._error = error
            self._is_open.set()
            self._wake(self._theirs)
        finally:
            self._theirs.close()

    def _serve(self, driver: PushDriver) -> None:
        while not self._is_closing:
            self._wait(driver)
            while self._requests:
                request = self._requests.popleft()
                if isinstance(request, _Offer):
                    now = time.monotonic()
                    driver.offer(request.rid, request.hold, request.table, request.tokens, now)
                else:
                    driver.withdraw(request.rid)
            ended = driver.turn()
            self._stats = driver.stats()
            if ended:
                self._ended.extend(ended)
                self._wake(self._theirs)

    def _wait(self, driver: PushDriver) -> None:
        poller = zmq.Poller()
        for socket in (self._theirs, *driver.sockets()):
            poller.register(socket, zmq.POLLIN)
        seconds = driver.wait_s()
        if seconds >= 0.001:
            poller.poll(int(seconds * 1e3))
        else:  # ZeroMQ counts in milliseconds
            time.sleep(seconds)
        while True:
            try:
                self._theirs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
