"""Holds of finished caches on one simulated stage: open until read, dropped or expired."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp_worker.base.errors import check
from wavepp_worker.executor.commands import OpenHold

if TYPE_CHECKING:
    from wavepp_worker.sim.world import World


class SimHolds:
    """What `transfer.holds` is to a real stage, with the content checked at every turn."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._open: dict[int, OpenHold] = {}
        self.expired: set[int] = set()

    @property
    def open_count(self) -> int:
        """Holds that keep their slots."""
        return len(self._open)

    def open(self, command: OpenHold) -> None:
        """Keep a finished prompt's slots until `close`, or until the hold's time is over."""
        check(command.rid not in self._open, "a prompt is held once", rid=command.rid)
        self._open[command.rid] = command
        self.check_content(command.rid)
        self._world.steps.after(
            self._world.knobs.hold_s, lambda: self.close(command.rid, "expired")
        )

    def drop(self, rid: int) -> None:
        """Nobody will read it: end it as soon as the transport agrees."""
        check(rid in self._open, "only an open hold is dropped", rid=rid)
        self._world.steps.after(0.000_5, lambda: self.close(rid, "dropped"))

    def check_content(self, rid: int) -> None:
        """Compare what a reader would get with the prompt computed cold and alone."""
        command = self._open.get(rid)
        if command is not None:
            self._world.checkers.held(self._rank, command)

    def close(self, rid: int, how: str) -> bool:
        """End a hold; return whether it was still open, so that what was read may be used."""
        if rid not in self._open:
            return False
        self.check_content(rid)
        del self._open[rid]
        if how == "expired":
            self.expired.add(rid)
        self._world.tell(rid, self._rank, f"hold {how}")
        self._world.end_hold(self._rank, rid)
        return True
