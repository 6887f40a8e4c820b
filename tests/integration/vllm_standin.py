"""A Dynamo decode worker around `VllmPeer`: answers from the cache that was pushed into it.

`python -m tests.integration.vllm_standin SETTINGS` stands where `dynamo.vllm` stands, with
transformers for a model.  Like vLLM it computes the last prompt position again.  Settings (JSON)
are `path`, `hash` and `block_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import torch
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.run import run
from dynamo.common.constants import DisaggregationMode
from transformers import AutoModelForCausalLM, DynamicCache

from tests.integration.vllm_peer import VllmPeer

BLOCKS = 128


class VllmStandin(LLMEngine):
    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._free = list(range(BLOCKS - 1, 0, -1))  # block 0 is vLLM's null block

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[VllmStandin, WorkerConfig]:
        settings = json.loads(await asyncio.to_thread(Path(sys.argv[1]).read_text))
        worker = WorkerConfig(
            namespace="dynamo",
            component="backend",
            model_name=settings["path"],
            served_model_name="tiny",
            discovery_backend=os.environ["DYN_DISCOVERY_BACKEND"],
            request_plane="tcp",
            event_plane="zmq",
            disaggregation_mode=DisaggregationMode.DECODE,
        )
        return cls(settings), worker

    async def start(self, worker_id: int) -> EngineConfig:
        path, block_tokens = self._settings["path"], self._settings["block_tokens"]
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        config = self._model.config
        self._peer = VllmPeer(
            self._settings["hash"],
            layers=config.num_hidden_layers,
            heads=config.num_key_value_heads,
            block_tokens=block_tokens,
            dims=config.head_dim,
            blocks=BLOCKS,
        )
        return EngineConfig(
            model=path,
            served_model_name="tiny",
            llm=LlmRegistration(
                context_length=config.max_position_embeddings,
                kv_cache_block_size=block_tokens,
                total_kv_blocks=BLOCKS,
                max_num_seqs=8,
                max_num_batched_tokens=64,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        prompt = list(request["token_ids"])
        params = request["prefill_result"]["disaggregated_params"]["kv_transfer_params"]
        count = -(-len(prompt) // self._settings["block_tokens"])
        blocks = [self._free.pop() for _ in range(count)]
        name = f"{context.id()}-{secrets.token_hex(4)}"
        await asyncio.to_thread(self._peer.register, name, blocks, params)
        if not await asyncio.to_thread(self._peer.is_filled, name, params["pp_size"], 20.0):
            raise RuntimeError(f"nobody filled the blocks of {name}")
        limit = request["stop_conditions"]["max_tokens"]
        answer = await asyncio.to_thread(self._answer, prompt, blocks, limit)
        self._free += blocks
        for at, token in enumerate(answer, start=1):
            chunk: dict[str, Any] = {"token_ids": [token], "index": 0}
            if at == len(answer):
                chunk["finish_reason"] = "length"
            yield chunk

    def _answer(self, prompt: list[int], blocks: list[int], limit: int) -> list[int]:
        cache = DynamicCache()
        for layer in range(self._model.config.num_hidden_layers):
            pairs = [self._peer.keys_values(layer, block) for block in blocks]
            keys, values = (torch.cat(part, dim=1)[None] for part in zip(*pairs, strict=True))
            cache.update(keys[:, :, : len(prompt) - 1], values[:, :, : len(prompt) - 1], layer)
        answer: list[int] = []
        token = prompt[-1]
        with torch.no_grad():
            for _ in range(limit):
                scores = self._model(torch.tensor([[token]]), past_key_values=cache).logits
                token = int(scores[0, -1].argmax())
                answer.append(token)
        return answer

    async def cleanup(self) -> None:
        self._peer.close()


if __name__ == "__main__":
    run(VllmStandin)
