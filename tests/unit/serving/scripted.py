"""Ranks without processes: the ports of `serving.ranks`, driven by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from wavepp_worker.base.errors import PeerError
from wavepp_worker.config.derive import ModelFacts, derive
from wavepp_worker.config.schema import (
    AdmissionConfig,
    CacheConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    ObsConfig,
    PlannerConfig,
    ServingConfig,
)
from wavepp_worker.obs.spans import RequestSpans
from wavepp_worker.serving.engine import WavePPEngine
from wavepp_worker.serving.ranks import Launched
from wavepp_worker.wire.mailbox import (
    Announce,
    Fatal,
    Finished,
    Gone,
    Ready,
    ReportMessage,
    StageHandoff,
    Timeline,
    WorkerReady,
)

FACTS = ModelFacts(
    family="llama", layers=4, hidden=64, vocab=300, context_tokens=4096, kv_heads=2, head_dim=16,
    dtype="float32", dtype_bytes=4, fingerprint="fp",
)  # fmt: skip
BLOCK = 4
CACHE_TOKENS = 1024


def make_config(stages: int = 2, obs: ObsConfig = ObsConfig(), **serving: Any) -> Config:  # noqa: B008
    return Config(
        model=ModelConfig(path="/models/tiny"),
        cluster=ClusterConfig(stages=stages, start_timeout_s=0.5),
        cache=CacheConfig(block_tokens=BLOCK),
        planner=PlannerConfig(wave_tokens_max=64),
        admission=AdmissionConfig(queue_requests_max=4),
        obs=obs,
        serving=ServingConfig(served_model_name="tiny", **serving),
    )


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Let the loop run until `condition` holds; TimeoutError after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  nothing signals these conditions
            await asyncio.sleep(0.001)


class ScriptedRanks:
    """Both ports at once.  Attributes record what serving asked for."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports: asyncio.Queue[ReportMessage] = asyncio.Queue()
        self.announced: list[Announce] = []
        self.cancelled: list[int] = []
        self.views: list[int] = []
        self.calls: list[str] = []
        self.fatals: list[Fatal] = []
        self.is_blocked = False  # the leader stopped reading

    def say(self, *reports: ReportMessage) -> None:
        for report in reports:
            self.reports.put_nowait(report)

    async def settle(self) -> None:
        """Wait until all reports are taken."""
        await until(self.reports.empty)
        await asyncio.sleep(0)

    def finish(
        self,
        rid: int,
        endpoint: int = 0,
        token: int = 7,
        logprob: float = -0.5,
        timeline: Timeline = Timeline(),  # noqa: B008  immutable
    ) -> None:
        for rank in range(self.stages):
            handoff = StageHandoff(rank, (rank * 2, rank * 2 + 2), "tcp://h:1", f"hold{rid}.{rank}")
            self.say(Ready(rid, rank, handoff))
        self.say(Finished(rid, endpoint, token, logprob, timeline))

    # RanksPort
    def note_fatal(self, fatal: Fatal) -> None:
        self.fatals.append(fatal)
        self.exited.set_result(f"{fatal.role}{fatal.rank} reported: {fatal.text}")

    async def stop(self, grace_s: float = 5.0) -> bool:
        self.calls.append("stop")
        return True

    async def kill(self) -> None:
        self.calls.append("kill")

    # FrontDoorPort
    def announce(self, announce: Announce) -> None:
        if self.is_blocked:
            raise PeerError("wave0 stopped reading")
        self.announced.append(announce)

    def cancel(self, rid: int) -> None:
        self.cancelled.append(rid)
        self.say(Gone(rid))

    def request_view(self, number: int) -> None:
        self.views.append(number)

    def shutdown(self, reason: str) -> None:
        self.calls.append("shutdown")

    async def next_report(self) -> ReportMessage:
        return await self.reports.get()

    def close(self) -> None:
        self.calls.append("close")


class Context:
    """Dynamo's request context, as far as the engine uses it."""

    def __init__(self, name: str = "request-1", headers: dict[str, str] | None = None) -> None:
        self._name = name
        self._headers = headers
        self._stopped = asyncio.get_running_loop().create_future()

    def id(self) -> str:
        return self._name

    def trace_headers(self) -> dict[str, str] | None:
        return self._headers

    def stop(self) -> None:
        self._stopped.set_result(True)

    async def async_killed_or_stopped(self) -> bool:
        return bool(await asyncio.shield(self._stopped))


class Bench:
    """An engine on scripted ranks."""

    def __init__(self, config: Config, spans: RequestSpans | None = None) -> None:
        self.left: list[int] = []
        self.ranks = ScriptedRanks(config.cluster.stages)
        self.namespaces: list[str] = []
        self.engine = WavePPEngine(config, launch=self._launch, leave=self.left.append, spans=spans)

    async def _launch(self, config: Config, namespace: str) -> Launched:
        self.namespaces.append(namespace)
        return Launched(FACTS, derive(config, FACTS), self.ranks, self.ranks)

    async def start(self) -> Any:
        self.ranks.say(WorkerReady(CACHE_TOKENS))
        return await self.engine.start(5)

    def ask(
        self, tokens: list[int], context: Context | None = None, **extra: Any
    ) -> asyncio.Task[list[dict[str, Any]]]:
        """Start a request; the task returns its chunks."""

        async def collect() -> list[dict[str, Any]]:
            request = {"token_ids": tokens, **extra}
            stream = self.engine.generate(request, context or Context())
            return [chunk async for chunk in stream]

        return asyncio.get_running_loop().create_task(collect())

    async def announced(self, count: int) -> Announce:
        """Wait until `count` requests were announced; return the last."""
        await until(lambda: len(self.ranks.announced) >= count)
        return self.ranks.announced[-1]
