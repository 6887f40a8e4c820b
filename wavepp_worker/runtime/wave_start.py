"""How a WAVE process meets its LOOP and the other ranks, before the first round.

    LOOP: LoopUp ─▶ record in Dynamo's discovery ─▶ all P records ─▶ LOOP: Peers
    LOOP loads weights, allocates its pools: LoopReady ─▶ join the rounds star

Rounds begin when the leader has heard every follower join.  [algorithms 16]
"""

from __future__ import annotations

import logging
import select
import time

from wavepp_worker.base.errors import PeerError
from wavepp_worker.base.types import LEADER, Rank
from wavepp_worker.runtime.boot import Boot
from wavepp_worker.runtime.membership import Membership, RankRecord
from wavepp_worker.runtime.wave_sockets import WaveSockets
from wavepp_worker.transport.rounds_base import RoundsLink
from wavepp_worker.transport.rounds_dynamo import DynamoRounds
from wavepp_worker.transport.rounds_zmq import ZmqFollowerRounds, ZmqLeaderRounds
from wavepp_worker.wire.mailbox import LoopReady, LoopUp, Peers, WindowReport

logger = logging.getLogger(__name__)


class WaveStart:
    """The start of one rank; `run` once.

    Attributes:
        link: the rounds link, once there is one.
        windows: what LOOP has allocated.
        early_frames: what arrived on the link meanwhile, as `RoundsLink.receive` returns it.
        heard: neighbour in the star -> when it was last heard, on the monotonic clock.
    """

    def __init__(
        self, boot: Boot, rank: Rank, sockets: WaveSockets, membership: Membership
    ) -> None:
        self._boot = boot
        self._rank = rank
        self._sockets = sockets
        self._membership = membership
        self._deadline = time.monotonic() + boot.config.cluster.start_timeout_s
        self.link: RoundsLink | None = None
        self.windows: tuple[WindowReport, ...] = ()
        self.early_frames: list[tuple[int, bytes]] = []
        self.heard: dict[int, float] = {}

    def run(self) -> RoundsLink:
        """Return the rounds link when every rank has joined as far as this one can see.

        Raises:
            PeerError: somebody did not appear within `cluster.start_timeout_s`.
        """
        up = self._sockets.await_loop(LoopUp, self._deadline)
        records = self._meet(up)
        addresses = tuple(record.wave_address for record in records)
        self._sockets.send_loop(Peers(addresses, records[LEADER].store_address))
        self.windows = self._sockets.await_loop(LoopReady, self._deadline).windows
        if self.link is None:
            self.link = self._open_link(records)
        self._await_star(self.link)
        return self.link

    def close(self) -> None:
        """Close the link, if it was opened."""
        if self.link is not None:
            self.link.close()

    def _meet(self, up: LoopUp) -> tuple[RankRecord, ...]:
        cluster, epoch = self._boot.config.cluster, self._boot.epoch
        rounds_address = ""
        if self._rank == LEADER and self._boot.config.transport.rounds == "zmq":
            context = self._sockets.context
            self.link = link = ZmqLeaderRounds(context, cluster.host, cluster.stages, epoch)
            rounds_address = link.address
        record = RankRecord(
            rank=self._rank,
            epoch=epoch,
            instance=self._membership.instance,
            rounds_address=rounds_address,
            wave_address=up.wave_address,
            store_address=up.store_address,
        )
        remaining_s = max(0.0, self._deadline - time.monotonic())
        records = self._membership.join(record, cluster.stages, remaining_s)
        logger.info("ranks met: count=%d epoch=%d", len(records), epoch)
        return records

    def _open_link(self, records: tuple[RankRecord, ...]) -> RoundsLink:
        epoch = self._boot.epoch
        if self._boot.config.transport.rounds == "zmq":
            address = records[LEADER].rounds_address
            return ZmqFollowerRounds(self._sockets.context, address, self._rank, epoch)
        return DynamoRounds(
            self._membership.runtime,
            self._membership.loop,
            self._membership.component,
            rank=self._rank,
            epoch=epoch,
            instances={record.rank: record.instance for record in records},
        )

    def _await_star(self, link: RoundsLink) -> None:
        while True:
            self.early_frames += link.receive()
            now = time.monotonic()
            if not link.missing():
                break
            if now >= self._deadline:
                raise PeerError(f"ranks {sorted(link.missing())} did not join the rounds")
            select.select([link], [], [], self._deadline - now)
        if self._rank == LEADER:
            self.heard = dict.fromkeys(range(1, self._boot.config.cluster.stages), now)
        else:  # the leader begins when the last rank has loaded its weights
            self.heard = {int(LEADER): self._deadline}
