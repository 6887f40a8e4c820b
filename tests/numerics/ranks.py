"""Ranks with production caches and production stages in this process, one request at a time.

What the rounds, the ring and the links add to this is tested with digests; here the slots that the
caches hand out carry real states, so a wrong copy or a wrong endpoint is a wrong answer.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.numerics.pipeline import BLOCK_TOKENS, token_bytes
from wavepp_worker.cache.hashing import scope_key, sequence_keys
from wavepp_worker.cache.outcomes import Committed, Materialized, Prepared
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.snapshots import snapshot_points
from wavepp_worker.cache.window import WindowSpec
from wavepp_worker.executor.ports import ChunkState, WaveChunk
from wavepp_worker.model.load import load_stage
from wavepp_worker.model.metadata import build_batch
from wavepp_worker.model.spec import read_spec
from wavepp_worker.runtime.stage_work import StageWork, StreamTimes

INTERVAL_TOKENS = 3 * BLOCK_TOKENS
CHUNK_TOKENS = 5 * BLOCK_TOKENS


class Ranks:
    """P stages, each with the windows that its layers need."""

    def __init__(
        self,
        folder: Path,
        bounds: Sequence[int],
        *,
        blocks: int,
        states: Sequence[int],
        host_blocks: int,
        host_states: int,
    ) -> None:
        """Load the stages.

        Args:
            states: slots for states of each stage; ignored where it keeps none.
        """
        spec = read_spec(folder)
        self.works: list[StageWork] = []
        self.caches: list[RankCache] = []
        self.times = StreamTimes()
        self.copies: Counter[str] = Counter()
        self._rids = itertools.count(1)
        for (first, stop), slots in zip(itertools.pairwise(bounds), states, strict=True):
            model = load_stage(folder, spec, first, stop)
            store = model.make_store(blocks, BLOCK_TOKENS, host_blocks)
            work = StageWork(model, store, None, model.make_states(slots, host_states))
            windows = []
            if model.has_attention:
                windows.append(WindowSpec(slots=blocks, host_slots=host_blocks))
            if work.states is not None:
                windows.append(WindowSpec(kind="recurrent", slots=slots, host_slots=host_states))
            self.works.append(work)
            self.caches.append(RankCache(windows, BLOCK_TOKENS, 0.0, 0, check_always=True))

    def serve(self, prompt: Sequence[int]) -> tuple[int, list[int], Tensor]:
        """Run a prompt; return its endpoint, what each rank offered first, and its last logits."""
        rid, count = next(self._rids), len(prompt)
        keys = sequence_keys(token_bytes(prompt), BLOCK_TOKENS, scope_key("f", salt=""))
        points = snapshot_points(count, BLOCK_TOKENS, INTERVAL_TOKENS)
        for cache in self.caches:
            cache.learn(rid, count, keys, points)
        offers = [cache.hint(rid) for cache in self.caches]
        endpoint = self._agree(rid, min(offers))
        installs = [self._install(cache, rid, endpoint) for cache in self.caches]
        for work, install in zip(self.works, installs, strict=True):
            self.copies.update(copy.kind for copy in install.copies)
            work.copy(install.copies, self.times)
        start = endpoint
        while start < count:
            stop = min([start + CHUNK_TOKENS, count, *(point for point in points if point > start)])
            logits = self._run(prompt, start, stop, installs)
            for cache in self.caches:
                cache.publish(rid, stop, [stop] if stop in points else [])
            start = stop
        for cache in self.caches:
            cache.free(rid)
            cache.forget(rid)
        return endpoint, offers, logits[0]

    def _agree(self, rid: int, cap: int) -> int:
        for attempt in itertools.count(1):
            leases = [cache.acquire(rid, attempt, cap) for cache in self.caches]
            cap = min(leases)
            if cap == max(leases):
                break
        return cap

    def _install(self, cache: RankCache, rid: int, endpoint: int) -> Materialized:
        assert isinstance(cache.prepare(rid), Prepared)
        assert isinstance(cache.commit(rid, endpoint), Committed)
        return cache.materialize(rid, rid)

    def _run(
        self, prompt: Sequence[int], start: int, stop: int, installs: Sequence[Materialized]
    ) -> Tensor:
        outputs: dict[str, Tensor] | None = None
        for work, install in zip(self.works, installs, strict=True):
            chunk = WaveChunk(
                rid=1,
                start=start,
                length=stop - start,
                tables=install.tables,
                tokens=token_bytes(prompt[start:stop]) if outputs is None else b"",
                wants_token=work.model.is_last,
                states=tuple(
                    ChunkState(slots.window, slots.working, dict(slots.snapshots).get(stop, -1))
                    for slots in install.states
                ),
            )
            batch = build_batch([chunk], BLOCK_TOKENS, torch.device("cpu"))
            outputs = work.forward(batch, outputs)
        assert outputs is not None
        return outputs["logits"]
