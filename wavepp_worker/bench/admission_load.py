"""The prompts and the pools of `wavepp bench admission`.

    prompt    |---------- prefix of a family ----------|-- tail of its own --|
    rank 0    |################ cached ################|
    rank s    |############ cached ###########|          a little less on every further rank

So ranks answer different hints, the candidate is the smallest, and a rank that holds more is
capped.  The tokens are random and only their keys exist: admission moves no tokens.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct

from wavepp_worker.admission.settings import AdmissionSettings
from wavepp_worker.base.types import KEY_BYTES
from wavepp_worker.base.units import align_down, ceil_div
from wavepp_worker.cache.hashing import TOKEN_BYTES, scope_key, sequence_keys
from wavepp_worker.cache.window import WindowSpec

SCOPE = scope_key("admission benchmark")
WAVE_TOKENS = 16_384  # M
FLOOR_FRACTION = 0.1
FLOOR_HEADROOM_FRACTION = 0.25  # kappa_f
RANK_LOSS = 0.02  # share of a prefix that each further rank lacks


class AdmissionLoad(Struct, frozen=True, kw_only=True):
    """One configuration; limits and floors as in the default configuration.

    Attributes:
        tokens: n, length of every prompt.
        requests: how many are there at the same time.
        ranks: P.
        families: prefixes that requests share, in turn.
        reuse_share: length of a prefix as a share of `tokens`.
        is_hybrid: every rank has a recurrent window beside the dense one.
        is_crowded: running requests leave too little room, so that every arrival waits.
    """

    tokens: int
    block_tokens: int = 64
    requests: int = 64
    ranks: int = 4
    families: int = 8
    reuse_share: float = 0.9
    is_hybrid: bool = False
    is_crowded: bool = False
    seed: int = 0

    @property
    def prefix_tokens(self) -> int:
        """Tokens that the requests of a family share."""
        return align_down(int(self.reuse_share * self.tokens), self.block_tokens)

    @property
    def snapshot_tokens(self) -> int:
        """I_snap: M, or an eighth of a prompt that would have few snapshots otherwise."""
        wanted = min(WAVE_TOKENS, max(self.tokens // 8, self.block_tokens))
        return align_down(wanted, self.block_tokens)

    @property
    def headroom_tokens(self) -> int:
        """2 * P * M; less for prompts shorter than a wave."""
        return 2 * self.ranks * min(WAVE_TOKENS, self.tokens)

    def cached_tokens(self, rank: int) -> int:
        """Tokens of every prefix that `rank` holds."""
        return align_down(int((1 - RANK_LOSS * rank) * self.prefix_tokens), self.block_tokens)

    @property
    def resumed_tokens(self) -> int:
        """Endpoint at which all ranks can resume."""
        held = self.cached_tokens(self.ranks - 1)
        return align_down(held, self.snapshot_tokens) if self.is_hybrid else held

    def windows(self) -> list[WindowSpec]:
        """Return the pools of one rank.

        Crowded: the families fill it but for the margin, and stay.  Otherwise all requests fit
        beside the families, and what earlier ones left behind is evicted.
        """
        suffix_tokens = self.tokens - self.resumed_tokens
        suffix_blocks = ceil_div(suffix_tokens, self.block_tokens) + 1
        slots = self.families * (self.prefix_tokens // self.block_tokens + 1)
        slots += ceil_div(self.headroom_tokens, self.block_tokens)
        slots += suffix_blocks // 2 if self.is_crowded else self.requests * suffix_blocks
        windows = [WindowSpec(slots=slots)]
        if self.is_hybrid:
            states = ceil_div(self.tokens, self.snapshot_tokens) + 2
            count = 2 * self.families * states + 4 * self.requests
            windows.append(WindowSpec(kind="recurrent", slots=count))
        return windows

    def settings(self, rank: int, epoch: int) -> AdmissionSettings:
        """Return the settings of one rank."""
        return AdmissionSettings(
            rank=rank,
            stages=self.ranks,
            epoch=epoch,
            block_tokens=self.block_tokens,
            snapshot_interval_tokens=self.snapshot_tokens,
            headroom_tokens=self.headroom_tokens,
            floor_fraction=FLOOR_FRACTION,
            floor_headroom_blocks=ceil_div(
                int(FLOOR_HEADROOM_FRACTION * self.headroom_tokens), self.block_tokens
            ),
        )


class BenchPrompt(Struct, frozen=True):
    """A prompt as admission sees it."""

    rid: int
    tokens: int
    keys: bytes


class PromptMaker:
    """Makes families and fresh prompts of them, without end; a seed decides all of it."""

    def __init__(self, load: AdmissionLoad) -> None:
        self._load = load
        self._random = Random(load.seed)
        self._rid_last = 0
        self._prefixes: list[bytes] = []

    def new_families(self) -> list[BenchPrompt]:
        """Return one prompt per new family: its prefix, and one token that is computed."""
        load = self._load
        self._prefixes = [self._keys(load.prefix_tokens, SCOPE) for _ in range(load.families)]
        return [self._prompt(load.prefix_tokens + 1, keys) for keys in self._prefixes]

    def fresh(self, count: int) -> list[BenchPrompt]:
        """Return prompts of the newest families that nobody has seen before."""
        load, prompts = self._load, []
        for index in range(count):
            prefix = self._prefixes[index % load.families]
            # Keys are chained, so the tail goes on from the last key of the prefix.
            tail = self._keys(load.tokens - load.prefix_tokens, prefix[-KEY_BYTES:])
            prompts.append(self._prompt(load.tokens, prefix + tail))
        return prompts

    def _keys(self, tokens: int, scope: bytes) -> bytes:
        text = self._random.randbytes(TOKEN_BYTES * tokens)
        return sequence_keys(text, self._load.block_tokens, scope)

    def _prompt(self, tokens: int, keys: bytes) -> BenchPrompt:
        self._rid_last += 1
        return BenchPrompt(self._rid_last, tokens, keys)
