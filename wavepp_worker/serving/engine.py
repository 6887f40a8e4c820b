"""WavePPEngine: the worker as Dynamo sees it, one prefill engine in front of P ranks.

Validates each request, submits it to the `Pipeline` and turns the result into one terminal chunk
or one of Dynamo's exceptions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, WorkerConfig
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.utils.namespace import get_worker_namespace

from wavepp_worker.base.errors import InvariantError, PeerError, RequestError, WavePPError
from wavepp_worker.config.load import load_config
from wavepp_worker.config.schema import Config
from wavepp_worker.obs.metrics import ServingMetrics
from wavepp_worker.obs.spans import RequestSpans, spans_from_environment
from wavepp_worker.obs.timeline import open_recorder
from wavepp_worker.runtime.vllm_pool import VllmPool
from wavepp_worker.serving.chunks import cancelled_chunk, terminal_chunk
from wavepp_worker.serving.errors import RequestTimeoutError, error_code, to_dynamo
from wavepp_worker.serving.pipeline import Pipeline
from wavepp_worker.serving.ranks import Launch, launch, read_plan
from wavepp_worker.serving.registration import engine_config, worker_config
from wavepp_worker.serving.request import RequestLimits, read_request
from wavepp_worker.serving.request_timeline import RequestTimeline
from wavepp_worker.serving.requests import LiveRequest
from wavepp_worker.serving.stories import ServingStory, Stories
from wavepp_worker.vllm_decode.agreement import agree
from wavepp_worker.wire.mailbox import Finished

logger = logging.getLogger(__name__)

VIEW_TIMEOUT_S = 5.0
UNREGISTER_TIMEOUT_S = 0.5
LAST_ANSWERS_S = 0.3  # for errors already raised to reach the frontend
EXIT_FAILED = 1
PROBE_TOKEN = 1


def exit_process(code: int) -> None:
    """Leave at once, without Python's own ending.

    That would wait for requests which cannot end any more, and Dynamo's native threads sometimes
    abort the process in it, so that even an orderly stop looks like a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class WavePPEngine(LLMEngine):  # type: ignore[misc]  # Dynamo is untyped
    """See the module's text.

    Args:
        launch: starts the ranks; tests put scripted ones in.
        leave: ends this process when the worker has failed.
        spans: where traces go; None: nowhere.
    """

    def __init__(
        self,
        config: Config,
        *,
        launch: Launch,
        leave: Callable[[int], None] = exit_process,
        spans: RequestSpans | None = None,
    ) -> None:
        self._config = config
        self._launch = launch
        self._leave = leave
        self._metrics = ServingMetrics()
        recorder = open_recorder(config.obs.trace_folder, worker=os.getpid(), role="serving")
        timeline = None if recorder is None else RequestTimeline(recorder)
        self._stories = Stories(self._metrics, logger, config.obs.slow_request_s, spans, timeline)
        self._pipeline: Pipeline | None = None
        self._vllm: VllmPool | None = None
        self._limits: RequestLimits | None = None  # set once requests can be served
        self._leaving: asyncio.Task[None] | None = None
        self._endpoint: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[WavePPEngine, WorkerConfig]:
        """Read `--config FILE` and `--set path=value`.

        Raises:
            ConfigError: the file, the model or a plane's setting cannot be used.
        """
        parser = argparse.ArgumentParser(description="WavePP prefill worker for NVIDIA Dynamo")
        parser.add_argument("--config", required=True, help="YAML or JSON file of the worker")
        parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
        options = parser.parse_args(argv)
        config = load_config(options.config, options.set)
        logging.getLogger("wavepp_worker").setLevel(config.obs.log_level)
        facts, plan = read_plan(config)
        if config.decode_pool.kind == "vllm-push":
            agree(config, facts)  # refuses what cannot work before anything starts
        worker = worker_config(config)
        spans = spans_from_environment(os.environ)
        return cls(config, launch=partial(launch, facts, plan), spans=spans), worker

    async def start(self, worker_id: int) -> EngineConfig:
        """Start the ranks and wait until they can take requests.

        Raises:
            PeerError: a rank failed, or was not ready in `cluster.start_timeout_s`.
        """
        started = time.monotonic()
        launched = await self._launch(self._config, get_worker_namespace())
        pipeline = self._pipeline = Pipeline(self._config, launched, self._metrics)
        if self._config.decode_pool.kind == "vllm-push":
            self._vllm = VllmPool(self._config, agree(self._config, launched.facts))
        limits = await pipeline.until_ready(self._config.cluster.start_timeout_s)
        pipeline.failed.add_done_callback(self._on_failed)
        self._limits = limits
        logger.info(
            "ready: worker=%d stages=%d cache_tokens=%d context_tokens=%d start_s=%.1f",
            worker_id,
            len(pipeline.plan.stages),
            limits.cache_tokens,
            limits.context_tokens,
            time.monotonic() - started,
        )
        return engine_config(self._config, pipeline.plan, limits.cache_tokens)

    async def generate(
        self, request: GenerateRequest, context: Any
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Serve one request: one terminal chunk, or one of Dynamo's exceptions."""
        pipeline = self._pipeline
        story = self._stories.begin(context.id(), context.trace_headers())
        try:
            if pipeline is None or self._limits is None:
                raise PeerError("the worker is not ready")
            chunk = await self._serve(request, context, story, pipeline, self._limits)
        except WavePPError as error:
            # The text of a client's mistake may quote the prompt: the client alone gets it.
            told = "" if isinstance(error, RequestError) else str(error)
            self._stories.fail(story, error_code(error), told)
            raise to_dynamo(error) from None
        except InvariantError as error:  # the top of this request: the program is wrong
            if pipeline is not None:
                pipeline.fail(f"serving: {error}")
            logger.exception("invariant broken: %s", story)
            raise to_dynamo(PeerError(str(error))) from error
        except asyncio.CancelledError:
            self._stories.end(story, "cancelled")
            raise
        yield chunk

    async def is_quiescent(self) -> bool | None:
        """Return whether no rank holds anything for a request."""
        return self._pipeline is None or self._pipeline.is_quiet

    async def cleanup(self) -> None:
        """Stop the ranks.  Idempotent; also after a failed `start`."""
        if self._pipeline is not None and self._leaving is None:
            logger.info("stopping the ranks")
            await self._pipeline.stop()
            if self._vllm is not None:
                self._vllm.close()
            self._limits = None
            await self._stories.close()

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Keep the endpoint, to leave discovery when the worker fails."""
        self._endpoint = endpoint

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Publish the pipeline's blocks as those of one worker."""
        if self._pipeline is None:
            return []
        return [PushSource(on_ready=self._pipeline.publisher.attach_from_thread, dp_rank=0)]

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a one-token prompt; it passes through every stage."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=PROBE_TOKEN)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """Add our metrics to the worker's page."""
        register_engine_registry(metrics, self._metrics.registry, prefix_filters=["wavepp_"])

    def component_metrics_dp_ranks(self) -> list[int]:
        """One data-parallel rank: the pipeline."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Send the router our load whenever the ranks report."""

        def publish(used_blocks: int, total_blocks: int) -> None:
            snapshot = ComponentSnapshot(
                kv_used_blocks=used_blocks,
                kv_total_blocks=total_blocks,
                gpu_cache_usage=used_blocks / total_blocks,
                dp_rank=0,
                kv_cache_hit_rate=self._metrics.reuse_rate(),
            )
            publisher.publish(0, snapshot)

        if self._pipeline is not None:
            self._pipeline.on_load = publish

    def supported_controls(self) -> set[str]:
        """Return the names for `engine_control`."""
        return {"cache_view"}

    async def engine_control(self, control: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer `cache_view`: the router's view beside every rank's."""
        if control != "cache_view" or self._pipeline is None:
            return {"status": "error", "message": f"not available: {control}"}
        try:
            return await self._pipeline.cache_view(VIEW_TIMEOUT_S)
        except (TimeoutError, PeerError) as error:
            return {"status": "error", "message": str(error) or "a rank did not answer"}

    async def _serve(
        self,
        request: GenerateRequest,
        context: Any,
        story: ServingStory,
        pipeline: Pipeline,
        limits: RequestLimits,
    ) -> GenerateChunk:
        prompt = read_request(request, limits)
        count = prompt.prompt_tokens
        live = pipeline.submit(prompt)
        self._stories.announced(story, live, count)
        try:
            finished = await self._until_finished(live, context)
            if finished is None:
                self._stories.end(story, "cancelled")
                return cancelled_chunk(count)
            if is_probe(request):  # nobody will fetch the state: `cancel` below ends its holds
                self._stories.end(story, "probe")
                return terminal_chunk(count, finished.endpoint, finished.token, None)
            params = None
            if self._vllm is not None:
                # Both legs of a request have the same id in Dynamo, so decode asks by it.
                params = await self._vllm.hand_off(live.handoffs(), context.id(), count)
            handoff = pipeline.hand_off(live, prompt, finished)
        finally:
            pipeline.cancel(live)
        self._stories.end(story, "served")
        params = handoff.to_params() if params is None else params
        return terminal_chunk(count, finished.endpoint, finished.token, params)

    async def _until_finished(self, live: LiveRequest, context: Any) -> Finished | None:
        """Return the result, or None if the client gave up first."""
        given_up = asyncio.ensure_future(context.async_killed_or_stopped())
        timeout_s = self._config.serving.request_timeout_s
        try:
            await asyncio.wait(
                [live.outcome, given_up],
                timeout=timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            given_up.cancel()
        if live.outcome.done():
            return live.outcome.result()
        if given_up.done():
            return None
        raise RequestTimeoutError(f"the prompt was not served within {timeout_s:g} s")

    def _on_failed(self, failed: asyncio.Future[str]) -> None:
        logger.error("worker failed: %s", failed.result())
        self._leaving = asyncio.get_running_loop().create_task(self._leave_failed())

    async def _leave_failed(self) -> None:
        """End this process, after the errors of all requests had time to reach the frontend."""
        try:
            if self._endpoint is not None:
                # Otherwise the router goes on choosing this worker until its lease expires.
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(
                        self._endpoint.unregister_endpoint_instance(), UNREGISTER_TIMEOUT_S
                    )
            if self._pipeline is not None:
                await self._pipeline.stop()
            if self._vllm is not None:
                self._vllm.close()
            await asyncio.sleep(LAST_ANSWERS_S)
            await self._stories.close()
        finally:
            self._leave(EXIT_FAILED)
