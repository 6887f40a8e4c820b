"""Identifiers and small records that every part of WavePP uses.

Identifiers that could be swapped for one another are `NewType`s.  Positions and lengths are
counts of tokens from the start of the prompt; spans are half-open `[start, stop)`.
"""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)  # u64, never reused within an epoch
Rank = NewType("Rank", int)  # 0 .. P-1; rank s runs stage s; rank 0 is the leader
Epoch = NewType("Epoch", int)  # one life of a worker's ranks; grows with every restart
BlockId = NewType("BlockId", int)  # slot number in a window's device pool
Tokens = NewType("Tokens", int)  # a count of tokens, e.g. an endpoint
SequenceHash = NewType("SequenceHash", bytes)  # 32 bytes: chained key of a block and all before it
InstallNumber = NewType("InstallNumber", int)  # `ino`: counts ADMITTED decisions in an epoch
WaveIndex = NewType("WaveIndex", int)  # 1, 2, ... in schedule order
RoundIndex = NewType("RoundIndex", int)  # 1, 2, ... on the rounds plane
Instant = NewType("Instant", float)  # seconds on a monotonic clock of one process

LEADER = Rank(0)
KEY_BYTES = 32  # a SequenceHash is a full SHA-256 digest
