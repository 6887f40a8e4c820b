"""The world outside the ranks: clients, the serving process, decode workers.

Serving sends at most one of {terminal chunk, Cancel} per request [I49].  A decode worker reads
every stage's part of a finished cache; it may use what it read only if the hold was still open
when it was done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field

from wavepp_worker.base.errors import check
from wavepp_worker.cache.hashing import split_keys
from wavepp_worker.sim.workload import SimPrompt
from wavepp_worker.wire.mailbox import Announce, Finished, KvDelta, Sampling

if TYPE_CHECKING:
    from wavepp_worker.sim.world import World

RESEND_CHANCE = 0.7  # of a client whose request failed with the worker
NOBODY = 1 << 40  # a request id that was never announced


class Client(Struct):
    """One request as serving knows it."""

    rid: int
    number: int  # of its prompt
    prompt: SimPrompt
    ready: set[int] = field(default_factory=set)  # ranks that hold its finished cache
    finished: Finished | None = None
    terminal: bool = False
    cancelled: bool = False
    end: str = ""  # gone, failed, or the code of a rejection


class Clients:
    """All requests of a world, across restarts of its worker."""

    def __init__(self, world: World, prompts: list[SimPrompt]) -> None:
        self._world = world
        self._rng = world.steps.rng("clients")
        self._last_rid = 0
        self.all: dict[int, Client] = {}
        self.live: dict[int, Client] = {}
        self._prompt_count = self._to_send = len(prompts)
        self.lost_handoffs = self.read_handoffs = 0
        for number, prompt in enumerate(prompts):
            world.steps.at(prompt.at_s, partial(self._arrive, number, prompt), outlives=True)

    @property
    def arrived_count(self) -> int:
        """Prompts that were sent so far."""
        return self._prompt_count - self._to_send

    @property
    def is_done(self) -> bool:
        """Whether every request was sent and has ended."""
        return not self._to_send and not self.live

    # ── serving ──────────────────────────────────────────────────────────────────────────────

    def _arrive(self, number: int, prompt: SimPrompt) -> None:
        self._to_send -= 1
        self._announce(number, prompt)

    def _announce(self, number: int, prompt: SimPrompt) -> None:
        world = self._world
        self._last_rid += 1
        client = Client(self._last_rid, number, prompt)
        self.all[client.rid] = self.live[client.rid] = client
        keys = split_keys(prompt.keys)
        world.checkers.announced(keys)
        world.router.open(client.rid, keys, prompt.tokens)
        announce = Announce(
            client.rid, prompt.prompt_tokens, prompt.keys, prompt.tokens, Sampling(seed=client.rid)
        )
        world.tell(client.rid, -1, f"announced, {prompt.prompt_tokens} tokens")
        world.send_front(announce)
        if self._rng.random() < world.knobs.cancel_chance:
            delay_s = self._rng.choice([0.0, 0.001, 0.005, 0.02, 0.1, 0.4])
            world.steps.after(delay_s, lambda: self._cancel(client))

    def _cancel(self, client: Client) -> None:
        if client.terminal or client.end:
            return  # I49: after the terminal chunk there is no cancel
        client.cancelled = True
        self._world.tell(client.rid, -1, "client left")
        self._world.send_cancel(client.rid)
        if self._rng.random() < 0.2:
            self._world.send_cancel(client.rid)
        if self._rng.random() < 0.1:
            self._world.send_cancel(NOBODY)

    def leave(self, rid: int) -> None:
        """The client of a request goes away; a no-op for one that has ended."""
        self._cancel(self.all[rid])

    def take_ready(self, rank: int, rid: int) -> None:
        """A stage holds a finished cache."""
        client = self.live.get(rid)
        if client is not None and not client.cancelled:
            check(rank not in client.ready, "a stage is ready once", rid=rid, rank=rank)
            client.ready.add(rank)
            self._answer(client)

    def take_finished(self, finished: Finished) -> None:
        """LOOP0 knows the first token."""
        client = self.live.get(finished.rid)
        if client is not None and not client.cancelled:
            check(client.finished is None, "a request finishes once", rid=client.rid)
            client.finished = finished
            self._answer(client)

    def _answer(self, client: Client) -> None:
        world = self._world
        if client.finished is None or len(client.ready) < len(world.ranks):
            return
        client.terminal = True
        world.checkers.answered(client)
        world.tell(client.rid, -1, "answered")
        dies = self._rng.random() < world.knobs.death_chance
        for rank in range(len(world.ranks)):
            if not (dies and self._rng.random() < 0.7):
                self._read(client, rank)

    def _read(self, client: Client, rank: int) -> None:
        """A decode worker reads one stage's part, and asks whether the hold was open all along."""
        world = self._world
        longest = 3 * world.knobs.hold_s if self._rng.random() < world.knobs.stall_chance else 0.02

        def end() -> None:
            if world.holds[rank].close(client.rid, "read"):
                self.read_handoffs += 1
            else:
                self.lost_handoffs += 1  # answered `expired`: the reader discards it  [A54]

        world.steps.after(self._rng.random() * longest, end)

    def take_gone(self, rid: int) -> None:
        """The request holds nothing on any rank."""
        client = self.all[rid]
        is_over = client.terminal or client.cancelled
        if not is_over:  # a hold ran out before the slowest stage had its part
            check(
                any(rid in holds.expired for holds in self._world.holds),
                "a request is gone that nobody answered or cancelled",
                rid=rid,
            )
        self._end(rid, "gone" if is_over else "expired")

    def take_rejected(self, rid: int, code: str) -> None:
        """It can never be served, or the worker is full."""
        self._end(rid, code)

    def _end(self, rid: int, how: str) -> None:
        client = self.all[rid]
        check(not client.end, "a request ends once", rid=rid, end=client.end, again=how)
        client.end = how
        del self.live[rid]
        self._world.router.close(rid)
        self._world.tell(rid, -1, f"ended: {how}")

    def take_delta(self, delta: KvDelta) -> None:
        """A rank's tree changed."""
        self._world.router.apply(delta.rank, delta.sequence, delta.changes)
        self._world.checkers.delta_taken(delta)

    # ── restart ──────────────────────────────────────────────────────────────────────────────

    def worker_failed(self) -> None:
        """Every request that has no answer fails; its client may send it again, as a new one."""
        for client in list(self.live.values()):
            client.end = "failed"
            del self.live[client.rid]
            self._world.tell(client.rid, -1, "ended: the worker failed")
            if not client.terminal and not client.cancelled and self._rng.random() < RESEND_CHANCE:
                self._announce(client.number, client.prompt)
