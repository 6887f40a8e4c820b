"""What every rank does with the schedule: positions, order and ends of its requests.

    header FIFO ──all Installs here, span == position──▶ RunWave ──fence──▶ WaveDone
    last span fenced ──▶ OpenHold ──HoldEnded──▶ Freed           [algorithms 12.4, 13, 16.2, 16.3]

A wave waits here for nothing but the Installs of its own requests, and on the device for the copies
of all Installs up to the largest ino that it names: it may read a block that an earlier, not yet
scheduled request onboarded.  Copies of later Installs never hold it back.  [I47, FS-03]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from wavepp_worker.base.errors import DeviceError, InvariantError, PeerError, check
from wavepp_worker.base.marks import mark
from wavepp_worker.base.types import Instant
from wavepp_worker.executor.commands import (
    DropHold,
    LoopCommand,
    OpenHold,
    RunCopies,
    RunWave,
    ToWave,
)
from wavepp_worker.executor.ports import ChunkState, WaveChunk, WaveFenced
from wavepp_worker.wire.mailbox import Freed, Install, Sampling, WaveDone
from wavepp_worker.wire.waves import SPAN_FIRST, SPAN_LAST, Release, SpanEntry, WaveHeader

GREEDY_SAMPLING = Sampling()


class InstalledRequest(Struct):
    """A request with slots on this rank, from its Install to `Freed`."""

    install: Install
    position: int  # tokens reused or enqueued
    copies_before: int  # `RunCopies` up to its Install, its own included
    unfenced_count: int = 0  # waves that name it and have not passed their fence
    is_released: bool = False
    is_held: bool = False


class StageCounts(Struct):
    """Plain totals since the start."""

    installs: int = 0
    waves: int = 0  # fenced
    spans: int = 0  # fenced
    tokens_computed: int = 0  # fenced
    releases: int = 0
    install_wait_s: float = 0.0  # a header was at the front and an Install was missing


class StageQueue:
    """Applies headers and releases in their order, on every rank alike.

    Args:
        is_last: this rank's stage computes the first answer tokens.
        admit_timeout_s: T_admit; a header names a request that WAVE does not install: fatal.
    """

    def __init__(self, *, is_last: bool, block_tokens: int, admit_timeout_s: float) -> None:
        self._is_last = is_last
        self._block_tokens = block_tokens
        self._admit_timeout_s = admit_timeout_s
        self._fifo: deque[WaveHeader | Release] = deque()
        self._blocked_since: Instant | None = None
        self._requests: dict[int, InstalledRequest] = {}
        self._last_ino = 0
        self._copies_count = 0  # `RunCopies` so far
        self._early_releases: dict[int, int] = {}  # ino -> rid, of Releases ahead of the Install
        self._in_flight: deque[WaveHeader] = deque()  # enqueued, not fenced
        self._last_wave = 0
        self.counts = StageCounts()

    @property
    def request_count(self) -> int:
        """Requests with slots on this rank."""
        return len(self._requests)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is held."""
        return not (self._fifo or self._requests or self._in_flight or self._early_releases)

    def install(self, install: Install, now: Instant) -> list[LoopCommand]:
        """Take in an admitted request; its copies run whatever becomes of it."""
        check(install.ino == self._last_ino + 1, "Installs come in order", ino=install.ino)  # I45
        check(install.rid not in self._requests, "a request is installed once", rid=install.rid)
        check(len(install.tables) > 0, "a rank has a window", rid=install.rid)
        self._last_ino = install.ino
        self.counts.installs += 1
        commands: list[LoopCommand] = []
        if install.copies:
            commands.append(RunCopies(install.copies))
            self._copies_count += 1
        released_rid = self._early_releases.pop(install.ino, None)
        if released_rid is not None:
            check(released_rid == install.rid, "ino names one request", rid=install.rid)
            commands.append(ToWave(Freed(install.rid)))
        else:
            self._requests[install.rid] = InstalledRequest(
                install, install.endpoint, self._copies_count
            )
        return commands + self._drain(now)

    def enqueue(self, message: WaveHeader | Release, now: Instant) -> list[LoopCommand]:
        """Take the next message of the header FIFO."""
        self._fifo.append(message)
        return self._drain(now)

    def fence(self, fenced: WaveFenced) -> list[LoopCommand]:
        """A wave is complete on this stage.

        Raises:
            DeviceError: its receive, forward or send failed.
        """
        if fenced.error:
            raise DeviceError(f"wave {fenced.wave}: {fenced.error}")
        check(bool(self._in_flight), "a fence belongs to a wave in flight", wave=fenced.wave)
        header = self._in_flight.popleft()
        check(header.wave == fenced.wave, "fences pass in wave order", wave=fenced.wave)
        self._check_answers(header, fenced)
        self.counts.waves += 1
        self.counts.spans += len(header.spans)
        self.counts.tokens_computed += header.tokens
        # WaveDone goes first: WAVE publishes what was computed before it frees the slots.
        ends = tuple((span.rid, span.start + span.length) for span in header.spans)
        commands: list[LoopCommand] = [ToWave(WaveDone(header.wave, ends, self._written(header)))]
        for span in header.spans:
            request = self._requests[span.rid]
            request.unfenced_count -= 1
            if request.is_released:
                commands += self._free_if_unused(request)
            elif span.flags & SPAN_LAST:
                install = request.install
                request.is_held = True
                commands.append(
                    OpenHold(span.rid, install.tables, install.prompt_tokens, install.states)
                )
        return commands

    def end_hold(self, rid: int) -> list[LoopCommand]:
        """The transfer is over: the slots may be used again."""
        request = self._requests[rid]
        check(request.is_held, "only a held request's hold ends", rid=rid)
        request.is_held = False
        request.is_released = True
        return self._free_if_unused(request)

    def next_deadline(self) -> Instant | None:
        """Return when `check_progress` must be called at the latest."""
        if self._blocked_since is None:
            return None
        return Instant(self._blocked_since + self._admit_timeout_s)

    def check_progress(self, now: Instant) -> None:
        """Raise PeerError if a header waits too long for this rank's own WAVE."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return
        head = self._fifo[0]
        if not isinstance(head, WaveHeader):
            raise InvariantError(f"only a header waits for an Install head={head!r}")
        missing = [(span.rid, span.ino) for span in head.spans if span.ino > self._last_ino]
        raise PeerError(
            f"wave {head.wave} names requests that were not installed here within "
            f"{self._admit_timeout_s:g} s (executor.admit_timeout_s); missing (rid, ino)={missing} "
            f"last_ino={self._last_ino}"
        )

    def check_invariants(self) -> None:
        """Raise InvariantError if counts and waves in flight disagree."""
        unfenced: dict[int, int] = {}
        for header in self._in_flight:
            for span in header.spans:
                unfenced[span.rid] = unfenced.get(span.rid, 0) + 1
        for rid, request in self._requests.items():
            count = unfenced.pop(rid, 0)
            check(count == request.unfenced_count, "waves in flight are counted", rid=rid)
            check(not request.is_held or count == 0, "a hold follows the last fence", rid=rid)
            install = request.install
            check(
                install.endpoint <= request.position <= install.prompt_tokens,
                "a position stays inside its request",
                rid=rid,
            )
        check(not unfenced, "a wave in flight names installed requests", rids=sorted(unfenced))
        check(
            all(ino > self._last_ino for ino in self._early_releases),
            "an early release waits for a later Install",
            last_ino=self._last_ino,
        )

    def _drain(self, now: Instant) -> list[LoopCommand]:
        """Apply messages up to the first header that must wait for an Install."""
        commands: list[LoopCommand] = []
        while self._fifo:
            message = self._fifo[0]
            if isinstance(message, Release):
                commands += self._release(message)
            elif max(span.ino for span in message.spans) <= self._last_ino:
                commands.append(self._run(message))
            else:
                if self._blocked_since is None:
                    mark("executor.install_awaited")
                    self._blocked_since = now
                return commands
            self._fifo.popleft()
            if self._blocked_since is not None:
                self.counts.install_wait_s += now - self._blocked_since
                self._blocked_since = None
        return commands

    def _run(self, header: WaveHeader) -> RunWave:
        check(header.wave == self._last_wave + 1, "waves arrive in order", wave=header.wave)
        check(
            header.tokens == sum(span.length for span in header.spans) <= header.budget,
            "a wave's spans add up",
            wave=header.wave,
        )
        self._last_wave = header.wave
        self._in_flight.append(header)
        chunks = tuple(self._advance(span) for span in header.spans)
        # Counts rise with ino, so the most is what the largest ino needs.
        copies_before = max(self._requests[span.rid].copies_before for span in header.spans)
        return RunWave(header.wave, chunks, header.budget, copies_before)

    def _advance(self, span: SpanEntry) -> WaveChunk:
        """Check one span against this rank's own position, and move it.  [I41]"""
        request = self._requests.get(span.rid)
        if request is None:
            raise InvariantError(f"position mismatch: the request has ended span={span!r}")
        install, end = request.install, span.start + span.length
        is_last = end == install.prompt_tokens
        check(
            request.position == span.start
            and span.ino == install.ino
            and not request.is_released
            and span.length > 0
            and end <= install.prompt_tokens,
            "position mismatch",
            span=span,
            position=request.position,
            ino=install.ino,
            is_released=request.is_released,
            prompt_tokens=install.prompt_tokens,
        )
        check(is_last or end % self._block_tokens == 0, "chunks end on blocks", span=span)  # I34
        check(
            bool(span.flags & SPAN_LAST) == is_last
            and bool(span.flags & SPAN_FIRST) == (span.start == install.endpoint),
            "span flags match the request",
            span=span,
        )
        request.position = end
        request.unfenced_count += 1
        return WaveChunk(
            rid=span.rid,
            start=span.start,
            length=span.length,
            tables=install.tables,
            tokens=install.tokens[4 * span.start : 4 * end],
            wants_token=is_last and self._is_last,
            sampling=install.sampling or GREEDY_SAMPLING,
            states=tuple(
                ChunkState(slots.window, slots.working, dict(slots.snapshots).get(end, -1))
                for slots in install.states
            ),
        )

    def _written(self, header: WaveHeader) -> tuple[tuple[int, int], ...]:
        """Return (rid, snapshot point) of the states that a fenced wave left in their slots.

        A wave that is reported says so for all that it wrote: before its fence a snapshot may be
        half a state.  [I43]
        """
        written = []
        for span in header.spans:
            end = span.start + span.length
            states = self._requests[span.rid].install.states
            if any(end == point for slots in states for point, _ in slots.snapshots):
                written.append((span.rid, end))
        return tuple(written)

    def _release(self, release: Release) -> list[LoopCommand]:
        if release.ino > self._last_ino:
            mark("executor.release_before_install")
            self._early_releases[release.ino] = release.rid
            return []
        request = self._requests.get(release.rid)
        if request is None:  # its own hold ended first
            return []
        self.counts.releases += 1
        if request.is_held:
            mark("executor.release_ends_hold")
            return [DropHold(release.rid)]
        if request.unfenced_count:
            mark("executor.release_under_way")
        request.is_released = True
        return self._free_if_unused(request)

    def _free_if_unused(self, request: InstalledRequest) -> list[LoopCommand]:
        if request.unfenced_count:
            return []
        rid = request.install.rid
        del self._requests[rid]
        return [ToWave(Freed(rid))]

    def _check_answers(self, header: WaveHeader, fenced: WaveFenced) -> None:
        answered: Sequence[int] = [rid for rid, _, _ in fenced.tokens]
        wanted = [span.rid for span in header.spans if self._is_last and span.flags & SPAN_LAST]
        check(answered == wanted, "one token per last span, in order", wave=header.wave)
