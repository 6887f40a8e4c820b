"""A prefill worker in one process for tests of the decode worker: stages, desks, and bad days.

`python -m tests.integration.scripted_prefill SETTINGS` computes each prompt through stages of the
real model and offers it at one real hold desk per stage.  Settings (JSON) are `path`, `bounds`,
`hold_s`, and `spoiled_token`: of a prompt that begins with it, the first hand-off is withdrawn
before anyone reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode

from tests.integration.deployment import BLOCK
from tests.numerics.pipeline import Pipeline
from wavepp_worker.base.units import ceil_div
from wavepp_worker.config.schema import TransferConfig
from wavepp_worker.model.spec import read_facts
from wavepp_worker.serving.chunks import terminal_chunk
from wavepp_worker.transfer.desk import HoldDesk
from wavepp_worker.transfer.handoff import Handoff

BLOCKS = 256


class ScriptedPrefill(LLMEngine):
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._spoiled: set[tuple[int, ...]] = set()
        self._rids = itertools.count(1)
        self._free = list(range(BLOCKS))
        self._tables: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}  # stages whose hold has not ended

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[ScriptedPrefill, WorkerConfig]:
        settings = json.loads(await asyncio.to_thread(Path(sys.argv[1]).read_text))
        worker = WorkerConfig(
            namespace="dynamo",
            component="prefill",
            model_name=settings["path"],
            served_model_name="tiny",
            discovery_backend=os.environ["DYN_DISCOVERY_BACKEND"],
            request_plane="tcp",
            event_plane="zmq",
            disaggregation_mode=DisaggregationMode.PREFILL,
        )
        return cls(settings), worker

    async def start(self, worker_id: int) -> EngineConfig:
        path, bounds = self._settings["path"], self._settings["bounds"]
        self._facts = read_facts(path)
        self._pipeline = Pipeline(Path(path), bounds, blocks=BLOCKS)
        self._desks = [
            HoldDesk(
                TransferConfig(hold_s=self._settings["hold_s"]),
                "127.0.0.1",
                store,
                rank=rank,
                layers=layers,
                block_tokens=BLOCK,
                dtype=self._facts.dtype,
                fingerprint=self._facts.fingerprint,
            )
            for rank, (layers, store) in enumerate(
                zip(itertools.pairwise(bounds), self._pipeline.stores, strict=True)
            )
        ]
        self._serving = asyncio.create_task(self._serve_desks())
        return EngineConfig(
            model=path,
            served_model_name="tiny",
            llm=LlmRegistration(
                context_length=self._facts.context_tokens,
                kv_cache_block_size=BLOCK,
                total_kv_blocks=BLOCKS,
                max_num_seqs=8,
                max_num_batched_tokens=64,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        prompt, rid = list(request["token_ids"]), next(self._rids)
        blocks = ceil_div(len(prompt), BLOCK)
        table = [self._free.pop() for _ in range(blocks)]
        logits = self._pipeline.prefill(prompt, table, [len(prompt)])
        self._tables[rid] = table
        self._left[rid] = len(self._desks)
        now = time.monotonic()
        handoff = Handoff(
            fingerprint=self._facts.fingerprint,
            prompt_tokens=len(prompt),
            block_tokens=BLOCK,
            first_token=int(logits[-1].argmax()),
            first_logprob=float(logits[-1].log_softmax(-1).max()),
            stages=tuple(
                desk.open_hold(rid, (table,), len(prompt), (), now) for desk in self._desks
            ),
        )
        beginning = tuple(prompt[:8])  # a retry's prompt ends with the tokens answered so far
        if prompt[0] == self._settings["spoiled_token"] and beginning not in self._spoiled:
            self._spoiled.add(beginning)
            self._desks[-1].release(rid)
        yield terminal_chunk(len(prompt), 0, handoff.first_token, handoff.to_params())

    async def is_quiescent(self) -> bool | None:
        return not self._tables

    async def cleanup(self) -> None:
        self._serving.cancel()
        for desk in self._desks:
            desk.close()

    async def _serve_desks(self) -> None:
        while True:
            for desk in self._desks:
                for rid in desk.poll(time.monotonic()):
                    self._left[rid] -= 1
                    if self._left[rid] == 0:
                        self._free += self._tables.pop(rid)
                        print(f"freed {rid}", flush=True)
            await asyncio.sleep(0.002)


if __name__ == "__main__":
    run(ScriptedPrefill)
