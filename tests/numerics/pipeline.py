"""A model cut into stages that run in this process, and transformers as its oracle."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.spec import read_spec
from wavepp_worker.model.stage import StageModel
from wavepp_worker.wire.mailbox import Copy

TOLERANCE = {"atol": 5e-5, "rtol": 1e-4}
BLOCK_TOKENS = 16
STATE_SLOTS = 40


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as u32 little-endian."""
    return b"".join(int(token).to_bytes(4, "little") for token in tokens)


def cuts_of(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut `layers` into `stages`, as boundaries 0, ..., layers."""
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


class Pipeline:
    """All stages of a model with their pools; one wave at a time."""

    def __init__(
        self,
        folder: Path,
        bounds: Sequence[int],
        *,
        blocks: int = 64,
        load_format: str = "safetensors",
        device: str = "cpu",
        dtype: str = "auto",
    ) -> None:
        spec = read_spec(folder, dtype)
        self.device = device
        self.stages = [
            load_stage(folder, spec, first, stop, load_format=load_format, device=device)
            for first, stop in itertools.pairwise(bounds)
        ]
        self.stores = [stage.make_store(blocks, BLOCK_TOKENS) for stage in self.stages]
        self.states = [stage.make_states(STATE_SLOTS, STATE_SLOTS) for stage in self.stages]

    def run(self, chunks: Sequence[WaveChunk]) -> Tensor:
        """Run a wave through all stages and return the last one's logits."""
        outputs: dict[str, Tensor] = {}
        for stage, store, states in zip(self.stages, self.stores, self.states, strict=True):
            own = [_of_stage(chunk, stage) for chunk in chunks]
            batch = build_batch(own, BLOCK_TOKENS, self.device)
            inputs = outputs
            if batch.tokens_T is not None and stage.is_first:
                inputs = {"tokens": batch.tokens_T}
            for name, (shape, dtype) in stage.input_spec(batch.token_count).items():
                assert (tuple(inputs[name].shape), inputs[name].dtype) == (shape, dtype)
            outputs = stage.forward(batch, inputs, store, states)
        return outputs["logits"]

    def copy_states(self, *copies: Copy) -> None:
        """Perform the copies of an Install in every stage that keeps states."""
        for states in self.states:
            if states is not None:
                states.copy(copies)

    def prefill(
        self, prompt: Sequence[int], table: Sequence[int], chunks: Sequence[int], start: int = 0
    ) -> Tensor:
        """Run `prompt[start:]` in chunks of these lengths; return logits at every chunk's end."""
        rows = []
        for length in chunks:
            rows.append(self.run([make_chunk(prompt, start, length, table)]))
            start += length
        assert start == len(prompt)
        return torch.cat(rows)


def make_chunk(
    prompt: Sequence[int],
    start: int,
    length: int,
    table: Sequence[int],
    *,
    rid: int = 1,
    wants_token: bool = True,
    states: tuple[ChunkState, ...] = (),
) -> WaveChunk:
    """Return the chunk [start, start + length) of a prompt."""
    return WaveChunk(
        rid=rid,
        start=start,
        length=length,
        tables=(tuple(table),),
        tokens=token_bytes(prompt[start : start + length]),
        wants_token=wants_token,
        states=states,
    )


def _of_stage(chunk: WaveChunk, stage: StageModel) -> WaveChunk:
    """Give a chunk the windows of a stage: attention first, if there is any, then states."""
    if not chunk.states or not stage.delta_count:
        return msgspec.structs.replace(chunk, states=())
    has_attention = stage.delta_count < stage.stop - stage.first
    (state,) = chunk.states
    return msgspec.structs.replace(
        chunk,
        tables=(*chunk.tables, ()) if has_attention else ((),),
        states=(msgspec.structs.replace(state, window=int(has_attention)),),
    )


@contextmanager
def _without_fla() -> Iterator[None]:
    """Keep transformers from fla-core's kernels, which it would call with tensors of the CPU.

    It looks for them once, while it imports a model's module.
    """
    from transformers.utils import import_utils

    hidden = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]  # what makes an import fail
    try:
        with patch.object(import_utils, "is_flash_linear_attention_available", lambda: False):
            yield
    finally:
        del sys.modules["fla"]
        if hidden is not None:
            sys.modules["fla"] = hidden


class Oracle:
    """transformers on the CPU, eager attention, one shot, no cache."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(str(folder))
        rotary_dim = getattr(config, "rotary_dim", None)
        if rotary_dim and "partial_rotary_factor" not in config.rope_parameters:
            # MiniMax-M2: published checkpoints have this field, and transformers 5.17 ignores it.
            config.rope_parameters["partial_rotary_factor"] = rotary_dim / config.head_dim
        with _without_fla():
            self._model = AutoModelForCausalLM.from_pretrained(
                str(folder), config=config, dtype=dtype, attn_implementation="eager"
            ).eval()

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int]) -> Tensor:
        """Return f32 [tokens, vocabulary]."""
        logits: Tensor = self._model(torch.tensor([list(prompt)]), use_cache=False).logits[0]
        return logits.float()

    def states(self, prompt: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Return layer -> (recurrent state [H, K, V], last conv inputs [R, C]) after `prompt`."""
        return {
            index: (layer.recurrent_states[0][0], layer.conv_states[0][0, :, 1:].t())
            for index, layer in enumerate(self._cache(prompt).layers)
            if hasattr(layer, "recurrent_states")
        }

    def cached(self, prompt: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return what each layer caches of `prompt`: two tensors [H, S, D], or latent and key."""
        return [(layer.keys[0], layer.values[0]) for layer in self._cache(prompt).layers]

    @torch.inference_mode()
    def _cache(self, prompt: Sequence[int]) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        parameters = inspect.signature(self._model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"
        self._model(torch.tensor([list(prompt)]), use_cache=True, **{name: cache})
        return cache

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the `count` most likely next tokens, each computed from the whole text."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(prompt) :]


def assert_rounding_only(got: Tensor, want: Tensor, reference: Tensor) -> None:
    """Refuse an error in 16 bits well above the one that transformers makes in 16 bits.

    Args:
        want: the fp32 oracle's logits.
        reference: transformers' logits in the 16-bit type under test.
    """
    allowed = 1.5 * (reference - want).norm() / want.norm()
    error = (got - want).norm() / want.norm()
    assert error < allowed, f"{error=} {allowed=}"
