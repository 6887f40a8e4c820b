"""`wavepp bench serve`: drive an OpenAI completions endpoint and say what it did.

    closed loop   `concurrency` clients, each sends its next prompt when its last one is answered
    open loop     prompts are sent at their times, whatever is still unanswered

Works with every OpenAI-compatible server that takes token ids as a prompt and reports
`usage.prompt_tokens_details.cached_tokens`, so peers run through the same driver.  With the
workers' metrics pages, it also shows where each stage's time went.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import aiohttp
from msgspec import Struct

from wavepp_worker.base.errors import ConfigError
from wavepp_worker.bench.workload import BenchPrompt

GOOD_HIT_SHARE = 0.8  # of the expected prefix
CONNECT_TIMEOUT_S = 10.0
SAMPLE = re.compile(r'^(wavepp_\w+)\{[^}]*\brank="(\d+)"[^}]*\} (\S+)$', re.MULTILINE)
STAGE_SECONDS = {
    "forward": "wavepp_forward_seconds_total",
    "gap": "wavepp_gap_seconds_total",
    "receive_wait": "wavepp_receive_wait_seconds_total",
    "install_wait": "wavepp_install_wait_seconds_total",
}


class Target(Struct, frozen=True, kw_only=True):
    """Where to send, and how.

    Attributes:
        url: of the API, e.g. http://127.0.0.1:8000/v1.
        metrics_urls: metrics pages of the prefill workers; () if unknown.
        wants_token_ids: ask for the answer's token ids, in Dynamo's way; others may refuse it.
    """

    url: str
    model: str
    output_tokens: int = 1
    timeout_s: float = 600.0
    metrics_urls: tuple[str, ...] = ()
    wants_token_ids: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    """What became of one request; times in seconds after the start of the run."""

    number: int
    sent_s: float
    ended_s: float
    prompt_tokens: int
    expected_reuse: int
    cached_tokens: int = 0
    status: int = 200
    error: str = ""
    token_ids: tuple[int, ...] = ()  # of the answer, if they were asked for and given

    @property
    def seconds(self) -> float:
        """Completion time."""
        return self.ended_s - self.sent_s

    @property
    def is_good_hit(self) -> bool:
        """Whether at least 80 % of what could be reused was."""
        return self.cached_tokens >= GOOD_HIT_SHARE * self.expected_reuse


class ServeReport(Struct, frozen=True, kw_only=True):
    """Summary of one run."""

    requests: int
    failed: int
    seconds: float
    served_tokens_per_s: float
    computed_tokens_per_s: float
    completion_s: dict[str, float]  # p50, p95, p99, max
    cached_share: float
    good_hit_share: float | None  # None: nothing could be reused
    stage_seconds: dict[str, dict[str, float]]  # worker#rank -> cause -> seconds in the run
    errors: dict[str, int]


async def drive(
    target: Target,
    prompts: Iterable[BenchPrompt],
    *,
    concurrency: int | None,
    note: Callable[[Answer], None] = lambda _answer: None,
) -> list[Answer]:
    """Send all prompts; return the answers in order of their end.

    Args:
        concurrency: closed loop with so many clients; None: open loop at `at_s`.
        note: told each answer as it comes.

    Raises:
        ConfigError: the server cannot be reached at all.
    """
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        sender = _Sender(session, target, note)
        if concurrency is not None:
            await sender.closed_loop(iter(prompts), concurrency)
        else:
            await sender.open_loop(prompts)
        return sender.answers


class _Sender:
    def __init__(
        self, session: aiohttp.ClientSession, target: Target, note: Callable[[Answer], None]
    ) -> None:
        self._session, self._target, self._note = session, target, note
        self._began = time.monotonic()
        self.answers: list[Answer] = []

    async def closed_loop(self, prompts: Iterator[BenchPrompt], concurrency: int) -> None:
        async def client() -> None:
            for prompt in prompts:  # shared: each takes the next one
                await self._send(prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())

    async def open_loop(self, prompts: Iterable[BenchPrompt]) -> None:
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                due = self._began + (prompt.at_s or 0.0)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self._send(prompt))

    async def _send(self, prompt: BenchPrompt) -> None:
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "prompt": prompt.tokens,
            "max_tokens": target.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if target.wants_token_ids:
            body["nvext"] = {"extra_fields": ["completion_token_ids"]}
        sent_s = time.monotonic() - self._began
        status, cached, error = 0, 0, ""
        token_ids: tuple[int, ...] = ()
        try:
            async with self._session.post(f"{target.url}/completions", json=body) as reply:
                status = reply.status
                if status == 200:
                    document = await reply.json()
                    cached, token_ids = cached_tokens(document), answer_token_ids(document)
                else:
                    error = f"HTTP {status}"
        except (aiohttp.ClientError, TimeoutError) as failure:
            error = type(failure).__name__
        answer = Answer(
            number=prompt.number,
            sent_s=sent_s,
            ended_s=time.monotonic() - self._began,
            prompt_tokens=len(prompt.tokens),
            expected_reuse=prompt.expected_reuse,
            cached_tokens=cached,
            status=status,
            error=error,
            token_ids=token_ids,
        )
        self.answers.append(answer)
        self._note(answer)


def cached_tokens(reply: dict[str, Any]) -> int:
    """Return what a completion's usage says of reuse; 0 if it says nothing."""
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def answer_token_ids(reply: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a completion; () if it says nothing of them."""
    return tuple((reply.get("nvext") or {}).get("completion_token_ids") or ())


async def find_model(url: str) -> str:
    """Return the name of the only model served.

    Raises:
        ConfigError: unreachable, or not exactly one model.
    """
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/models") as reply,
        ):
            names = [entry["id"] for entry in (await reply.json())["data"]]
    except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{url}/models does not answer: {error}") from error
    if len(names) != 1:
        raise ConfigError(f"{url} serves {names or 'no model'}: name one with --model")
    return str(names[0])


async def stage_seconds(metrics_urls: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return, per worker and rank, the seconds that its LOOP spent so far, by cause."""
    found: dict[str, dict[str, float]] = {}
    timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for worker, url in enumerate(metrics_urls):
            async with session.get(url) as reply:
                text = await reply.text()
            for name, rank, value in SAMPLE.findall(text):
                for cause, metric in STAGE_SECONDS.items():
                    if name == metric:
                        key = f"{worker}#{rank}"
                        found.setdefault(key, {})[cause] = float(value)
    return found


def summarize(
    answers: Sequence[Answer],
    before: dict[str, dict[str, float]],
    after: dict[str, dict[str, float]],
) -> ServeReport:
    """Return the summary of the answers of one run.

    Raises:
        ConfigError: no request succeeded.
    """
    served = [answer for answer in answers if not answer.error]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    if not served:
        raise ConfigError(f"no request was answered: {errors}")
    seconds = max(a.ended_s for a in served) - min(a.sent_s for a in served)
    prompt_tokens = sum(a.prompt_tokens for a in served)
    cached = sum(a.cached_tokens for a in served)
    hoping = [a for a in served if a.expected_reuse]
    times = sorted(a.seconds for a in served)
    return ServeReport(
        requests=len(answers),
        failed=len(answers) - len(served),
        seconds=seconds,
        served_tokens_per_s=prompt_tokens / seconds,
        computed_tokens_per_s=(prompt_tokens - cached) / seconds,
        completion_s={
            "p50": quantile(times, 0.5),
            "p95": quantile(times, 0.95),
            "p99": quantile(times, 0.99),
            "max": times[-1],
        },
        cached_share=cached / prompt_tokens,
        good_hit_share=sum(a.is_good_hit for a in hoping) / len(hoping) if hoping else None,
        stage_seconds={
            key: {
                cause: value - before.get(key, {}).get(cause, 0.0) for cause, value in now.items()
            }
            for key, now in after.items()
        },
        errors=errors,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile of sorted values."""
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
