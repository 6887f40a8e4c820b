"""What one request went through: its phases, and one line that tells them.  Pure.

    arrival ─hash─▶ announced ─queue─▶ leased ─lease─▶ admitted ─wait─▶ first wave
            ─execution─▶ first token ─handoff─▶ answered ─hold─▶ gone

Times are seconds on one monotonic clock: the serving process and rank 0 share a host.  A story
never holds a token id or text of the prompt.
"""

from __future__ import annotations

from msgspec import Struct

from wavepp_worker.wire.mailbox import Finished

PHASES = ("hash", "queue", "lease", "wait", "execution", "handoff", "hold")
UNANSWERED = "unanswered"  # takes the place of all phases that the ranks have not told of
REQUEST_ID_CHARS_MAX = 64  # the client may choose it


class Phase(Struct, frozen=True):
    """One phase that has ended."""

    name: str
    began_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.began_at


class Story:
    """One request, as far as the serving process knows.

    Attributes:
        outcome: "served", "probe", "cancelled" or the code of a failure; empty while it runs.
        expected_tokens: what every stage could resume when the request came.
        endpoint: tokens reused; None before the ranks told.
        attempts: how often the ranks tried to admit it; 0: not told.
    """

    def __init__(self, request_id: str, began_at: float) -> None:
        self.request_id = _printable(request_id)
        self.began_at = began_at
        self.outcome = ""
        self.rid = 0
        self.prompt_tokens = 0
        self.expected_tokens = 0
        self.endpoint: int | None = None
        self.attempts = 0
        self.phases: list[Phase] = []

    @property
    def ended_at(self) -> float:
        """When the last known phase ended."""
        return self.phases[-1].ended_at if self.phases else self.began_at

    @property
    def seconds(self) -> float:
        """From arrival to the end of the last known phase."""
        return self.ended_at - self.began_at

    def reach(self, name: str, ended_at: float) -> Phase:
        """End the phase `name`, which began when the one before it ended."""
        phase = Phase(name, self.ended_at, max(self.ended_at, ended_at))
        self.phases.append(phase)
        return phase

    def announced(
        self, rid: int, prompt_tokens: int, expected_tokens: int, ended_at: float
    ) -> None:
        """The ranks were told of the request."""
        self.rid, self.prompt_tokens, self.expected_tokens = rid, prompt_tokens, expected_tokens
        self.reach("hash", ended_at)

    def take(self, finished: Finished) -> None:
        """Add what rank 0 told.  A time that is 0 was not told: the next phase starts earlier."""
        line = finished.timeline
        self.endpoint = finished.endpoint
        self.attempts = line.attempts
        if line.leased_at:
            self.reach("queue", line.leased_at)
            self.reach("lease", line.admitted_at)
        elif line.admitted_at:
            self.reach("queue", line.admitted_at)
        if line.scheduled_at:
            self.reach("wait", line.scheduled_at)
            self.reach("execution", line.answered_at)

    def end(self, outcome: str, ended_at: float) -> None:
        """The frontend got its answer, or nobody waits for one any more."""
        self.outcome = outcome
        if self.phases:
            self.reach("handoff" if self.endpoint is not None else UNANSWERED, ended_at)
        else:  # refused before anybody heard of it
            self.reach("hash", ended_at)

    def __str__(self) -> str:
        """Return the facts as `key=value`, for the end of a log line."""
        facts: dict[str, object] = {"request": self.request_id, "seconds": f"{self.seconds:.3f}"}
        if self.prompt_tokens:
            facts["prompt_tokens"] = self.prompt_tokens
            facts["expected"] = self.expected_tokens
        if self.endpoint is not None:
            facts["endpoint"] = self.endpoint
            facts["computed"] = self.prompt_tokens - self.endpoint
        if self.attempts:
            facts["attempts"] = self.attempts
        facts |= {f"{phase.name}_ms": f"{1e3 * phase.seconds:.1f}" for phase in self.phases}
        return " ".join(f"{name}={value}" for name, value in facts.items())


def _printable(text: str) -> str:
    """Return a client's text so that it cannot break or flood a line."""
    cut = text[:REQUEST_ID_CHARS_MAX]
    return "".join(char if char.isprintable() and not char.isspace() else "?" for char in cut)
