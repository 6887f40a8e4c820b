"""DecodeEngine: the reference decode worker as Dynamo sees it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.engine import GenerateChunk, GenerateRequest
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.namespace import get_worker_namespace
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from wavepp_worker.base.errors import DeviceError, WavePPError
from wavepp_worker.config.load import load_decode_config
from wavepp_worker.config.schema import DecodeConfig
from wavepp_worker.decode.batcher import Batcher
from wavepp_worker.decode.loop import Answer, DecodeLoop
from wavepp_worker.decode.request import read_handoff, read_request
from wavepp_worker.decode.runner import ModelRunner
from wavepp_worker.obs.metrics import RankStats
from wavepp_worker.serving.errors import to_dynamo
from wavepp_worker.transfer.handoff import IncompatibleError
from wavepp_worker.transfer.reader import StateReader
from wavepp_worker.wire.mailbox import Stats

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 512  # computed per step for evicted sequences: bounds how long the others wait
LAST_ANSWERS_S = 0.3  # for errors already raised to reach the frontend
UNREGISTER_S = 0.5
EXIT_FAILED = 1
PROBE_TOKEN = 1


class DecodeEngine(LLMEngine):  # type: ignore[misc]  # Dynamo is untyped
    """See `wavepp_worker.decode`."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._runner: ModelRunner | None = None
        self._reader: StateReader | None = None
        self._loop: DecodeLoop | None = None
        self._watch: asyncio.Task[None] | None = None
        self._answers: dict[str, set[Answer]] = {}  # by Dynamo's id, which may come twice
        self._load_sink: Any = None
        self._endpoint: Any = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[DecodeEngine, WorkerConfig]:
        """Read `--config FILE` and `--set path=value`.

        Raises:
            ConfigError: the file cannot be used.
        """
        parser = argparse.ArgumentParser(description="WavePP reference decode worker")
        parser.add_argument("--config", required=True, help="YAML or JSON file of the worker")
        parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
        options = parser.parse_args(argv)
        config = load_decode_config(options.config, options.set)
        logging.getLogger("wavepp_worker").setLevel(config.obs.log_level)
        worker = WorkerConfig(
            namespace=get_worker_namespace(),
            component=config.component,
            endpoint=config.endpoint,
            model_name=str(_folder(config)),
            served_model_name=_served_name(config),
            discovery_backend=os.environ.get("DYN_DISCOVERY_BACKEND", "etcd"),
            request_plane=os.environ.get("DYN_REQUEST_PLANE") or "tcp",
            event_plane=os.environ.get("DYN_EVENT_PLANE") or "zmq",
            disaggregation_mode=DisaggregationMode.DECODE,
        )
        return cls(config), worker

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model and register its cache.

        Raises:
            ConfigError: the model, the device or NIXL cannot be used.
        """
        config = self._config
        runner = self._runner = await asyncio.to_thread(ModelRunner, config)
        facts = runner.facts
        self._reader = StateReader(
            config.transfer,
            runner.store,
            layers=facts.layers,
            block_tokens=config.block_tokens,
            dtype=facts.dtype,
            fingerprint=facts.fingerprint,
            fetches_max=config.batch.requests_max,
            states=runner.states,
            recurrent=facts.delta_layers,
        )
        batcher = Batcher(
            runner.blocks,
            config.block_tokens,
            config.batch.requests_max,
            config.batch.queue_requests_max,
            CHUNK_TOKENS,
            has_states=runner.states is not None,
        )
        self._loop = DecodeLoop(
            runner, self._reader, batcher, computes_lost_state=config.lost_state == "compute"
        )
        self._loop.start()
        self._watch = asyncio.create_task(self._leave_on_failure(self._loop))
        logger.info("ready: worker=%d cache_tokens=%d", worker_id, self._cache_tokens(runner))
        return EngineConfig(
            model=str(_folder(config)),
            served_model_name=_served_name(config),
            runtime_data={"wavepp_fingerprint": facts.fingerprint},
            llm=LlmRegistration(
                context_length=facts.context_tokens,
                kv_cache_block_size=config.block_tokens,
                total_kv_blocks=runner.blocks,
                max_num_seqs=config.batch.requests_max,
                max_num_batched_tokens=config.batch.requests_max + CHUNK_TOKENS,
                data_parallel_size=1,
            ),
        )

    async def generate(
        self, request: GenerateRequest, context: Any
    ) -> AsyncGenerator[GenerateChunk, None]:
        """Stream one answer, a chunk per token."""
        answer: Answer | None = None
        try:
            loop, runner = self._loop, self._runner
            if loop is None or runner is None:
                raise DeviceError("the worker is not ready")
            checked = read_request(
                request,
                vocab=runner.facts.vocab,
                context_tokens=runner.facts.context_tokens,
                cache_tokens=self._cache_tokens(runner),
                is_probe=is_probe(request),
            )
            answer = loop.submit(checked)
            self._answers.setdefault(context.id(), set()).add(answer)
            is_ended = False
            while not is_ended:
                picked = None if context.is_stopped() else await answer.next()
                if picked is None:
                    yield _last_chunk(answer, [], "cancelled")
                    return
                is_ended = picked.finish_reason != ""
                chunk: GenerateChunk = {"token_ids": [picked.token], "index": 0}
                if is_ended:
                    chunk = _last_chunk(answer, [picked.token], picked.finish_reason)
                if checked.wants_logprobs:
                    chunk["log_probs"] = [picked.logprob]
                yield chunk
        except WavePPError as error:
            logger.warning("request failed: request=%s: %s", context.id(), error)
            if answer is None and self._loop is not None:
                _decline(self._loop, request)
            raise to_dynamo(error) from None
        finally:
            if answer is not None and self._loop is not None:
                self._loop.cancel(answer)
                self._discard(context.id(), answer)
            self._show_load()

    async def abort(self, context: Any) -> None:
        """The client is gone: end the answers of this request."""
        if self._loop is not None:
            for answer in self._answers.get(context.id(), ()):
                self._loop.cancel(answer)

    async def cleanup(self) -> None:
        """Stop.  Idempotent; also after a failed `start`."""
        loop, self._loop = self._loop, None
        reader, self._reader = self._reader, None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
        if loop is not None:
            await loop.close()
        if reader is not None:
            await asyncio.to_thread(reader.close)

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Keep the endpoint, to leave discovery when the worker fails."""
        self._endpoint = endpoint

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a one-token prompt; it is computed here and needs no prefill worker."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=PROBE_TOKEN)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        """Add our metrics to the worker's page."""
        registry = CollectorRegistry()
        registry.register(_LoopStats(self))
        register_engine_registry(metrics, registry, prefix_filters=["wavepp_"])

    def component_metrics_dp_ranks(self) -> list[int]:
        """One data-parallel rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Keep where the router's load figures go."""
        self._load_sink = publisher

    def stats(self) -> dict[str, float]:
        """Return the loop's gauges and counters; nothing before `start`."""
        return self._loop.stats() if self._loop is not None else {}

    def _cache_tokens(self, runner: ModelRunner) -> int:
        return runner.blocks * runner.block_tokens

    def _discard(self, request_id: str, answer: Answer) -> None:
        answers = self._answers[request_id]
        answers.discard(answer)
        if not answers:
            del self._answers[request_id]

    def _show_load(self) -> None:
        if self._load_sink is None or self._loop is None or self._runner is None:
            return
        used, total = self._loop.used_blocks(), self._runner.blocks
        self._load_sink.publish(
            0,
            ComponentSnapshot(
                kv_used_blocks=used,
                kv_total_blocks=total,
                gpu_cache_usage=used / total,
                dp_rank=0,
                kv_cache_hit_rate=None,
            ),
        )

    async def _leave_on_failure(self, loop: DecodeLoop) -> None:
        """A failed model does not recover: answer what is there with errors, then exit."""
        await loop.failed.wait()
        if self._endpoint is not None:
            # Otherwise the router goes on choosing this worker until its lease expires.
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._endpoint.unregister_endpoint_instance(), UNREGISTER_S)
        await asyncio.sleep(LAST_ANSWERS_S)
        logger.error("the decode worker failed: %s", loop.error)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)


class _LoopStats(Collector):
    """The loop's numbers, read when somebody scrapes."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine
        self._shown = RankStats()

    def collect(self) -> Iterator[Metric]:
        self._shown.take(Stats(rank=0, role="decode", values=self._engine.stats()))
        return self._shown.collect()


def _folder(config: DecodeConfig) -> Path:
    return Path(config.model.path).expanduser()


def _served_name(config: DecodeConfig) -> str:
    return config.served_model_name or _folder(config).resolve().name


def _decline(loop: DecodeLoop, request: GenerateRequest) -> None:
    """A refused request's state would wait at the prefill worker until its hold ends."""
    with contextlib.suppress(IncompatibleError):
        loop.decline(read_handoff(request))


def _last_chunk(answer: Answer, tokens: list[int], reason: str) -> GenerateChunk:
    request = answer.request
    usage: dict[str, Any] = {
        "prompt_tokens": len(request.prompt),
        "completion_tokens": answer.count,
        "total_tokens": len(request.prompt) + answer.count,
    }
    if request.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": request.cached_tokens}
    chunk: GenerateChunk = {
        "token_ids": tokens,
        "index": 0,
        "finish_reason": reason,
        "completion_usage": usage,
    }
    return chunk
