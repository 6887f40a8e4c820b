"""How much of a prompt all ranks can resume, against a count by definition."""

from __future__ import annotations

import random

import pytest

from kv_router_hooks.quorum import Quorum
from kv_router_hooks.window_rule import DENSE, RECURRENT, WindowRule

RANKS = {
    "dense": [[DENSE], [DENSE]],
    "recurrent": [[DENSE, RECURRENT], [DENSE]],
    "sliding": [[DENSE], [DENSE, WindowRule(3)]],
    "mixed": [[DENSE, RECURRENT], [WindowRule(2)]],
}
BLOCKS = 12


def can_resume(rule: WindowRule, held: set[bytes], chain: list[bytes], blocks: int) -> bool:
    needed = blocks if rule.needed_blocks is None else min(rule.needed_blocks, blocks)
    return all(key in held for key in chain[blocks - needed : blocks])


@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS)
def test_the_deepest_point_that_every_window_can_resume(ranks: list[list[WindowRule]]) -> None:
    rng = random.Random(7)
    for _ in range(200):
        quorum = Quorum(ranks)
        # Two chains that share their first blocks: a boundary of one is none of the other.
        shared = rng.randrange(BLOCKS)
        stem = [bytes([0, depth]) for depth in range(shared)]
        chains = [
            stem + [bytes([branch, depth]) for depth in range(shared, BLOCKS)] for branch in (1, 2)
        ]
        for chain in chains:
            for parent, key in zip([None, *chain], chain, strict=False):
                quorum.learn(key, parent)
        holders: list[tuple[WindowRule, set[bytes]]] = []
        for rank, rules in enumerate(ranks):
            for window, rule in enumerate(rules):
                share = rng.choice((0.5, 0.8, 0.95))
                keys = {key for chain in chains for key in chain}
                held = {key for key in sorted(keys) if rng.random() < share}
                holders.append((rule, held))
                for key in held:
                    quorum.store(rank, window, key)
        for chain in chains:
            for length in (BLOCKS, rng.randrange(BLOCKS)):
                want = max(
                    blocks
                    for blocks in range(length + 1)
                    if all(can_resume(rule, held, chain, blocks) for rule, held in holders)
                )
                assert quorum.resumable_blocks(chain[:length]) == want
