"""The model of a decode worker: all layers in one stage, one store, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from wavepp_worker.base.errors import ConfigError, DeviceError, InvariantError
from wavepp_worker.config.schema import DecodeConfig
from wavepp_worker.executor.ports import WaveChunk
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.sampling import sample
from wavepp_worker.model.spec import read_facts, read_spec
from wavepp_worker.wire.mailbox import Copy


class ModelRunner:
    """Weights and cache.  After construction only `step` touches them, from one thread.

    Raises:
        ConfigError: the model folder or the device cannot be used.
    """

    def __init__(self, config: DecodeConfig) -> None:
        model = config.model
        torch.set_num_threads(config.threads)
        default = "cuda:0" if torch.cuda.is_available() else "cpu"
        try:
            self.device = torch.device(config.device or default)
        except RuntimeError as error:
            raise ConfigError(f"device {config.device!r}: {error}") from error
        self.facts = read_facts(model.path, model.dtype, model.load_format, seed=model.seed)
        spec = read_spec(model.path, model.dtype)
        self._stage = load_stage(
            model.path,
            spec,
            0,
            spec.layers,
            device=self.device,
            load_format=model.load_format,
            seed=model.seed,
        )
        self.block_tokens = config.block_tokens
        self.blocks = config.batch.cache_tokens // config.block_tokens
        if self.blocks < 1:
            raise ConfigError(
                f"batch.cache_tokens ({config.batch.cache_tokens}) is less than one block of "
                f"{config.block_tokens} tokens"
            )
        self.store = self._stage.make_store(self.blocks, config.block_tokens)
        self.states = self._stage.make_states(config.batch.requests_max)

    @torch.inference_mode()
    def step(
        self, chunks: Sequence[WaveChunk], biases: Mapping[int, Mapping[int, float]]
    ) -> list[tuple[int, int, float]]:
        """Run the chunks and pick tokens; returns (rid, token, logprob) of chunks that want one.

        Args:
            biases: rid -> token -> what to add to its logit.

        Raises:
            DeviceError: the forward failed or gave no numbers.
        """
        try:
            batch = build_batch(chunks, self.block_tokens, self.device)
            if batch.tokens_T is None:
                raise InvariantError("every chunk of a decode step has its tokens")
            self._zero_states(chunks)
            output = self._stage.forward(batch, {"tokens": batch.tokens_T}, self.store, self.states)
            answering = [chunks[index] for index in batch.answers]
            if not answering:
                return []
            logits = output["logits"]
            for row, chunk in enumerate(answering):
                if bias := biases.get(chunk.rid):
                    deltas = torch.tensor(list(bias.values()), device=self.device)
                    logits[row, list(bias)] += deltas
            tokens, logprobs = sample(
                logits,
                [chunk.sampling for chunk in answering],
                [chunk.start + chunk.length for chunk in answering],
            )
            picked = zip(answering, tokens.tolist(), logprobs.tolist(), strict=True)
            result = [(chunk.rid, token, logprob) for chunk, token, logprob in picked]
        except RuntimeError as error:  # torch's operating errors, e.g. out of memory
            raise DeviceError(f"a decode step failed: {error}") from error
        if any(math.isnan(logprob) for _, _, logprob in result):
            raise DeviceError("a decode step gave no numbers")
        return result

    def _zero_states(self, chunks: Sequence[WaveChunk]) -> None:
        """Let sequences that are computed from their first token begin without a past."""
        if self.states is not None:
            self.states.copy(
                [
                    Copy("zero_state", state.window, -1, state.working)
                    for chunk in chunks
                    for state in chunk.states
                    if chunk.start == 0
                ]
            )
