"""Hard bounds of the core, each with its reason.  Tunable bounds live in the config instead."""

from __future__ import annotations

STAGES_MAX = 64  # rank is one byte on the rounds plane
ANNOUNCES_PER_ROUND = 16  # keys dominate a broadcast: 100 KB for 200K tokens at B = 64
ANNOUNCE_BYTES_PER_ROUND = 4 << 20  # so one round stays below a few milliseconds on loopback
FRAME_BYTES_MAX = 64 << 20  # largest message of any plane; checked before anything is decoded
MAILBOX_FRAMES_MAX = 65_536  # messages queued between two processes before it counts as overflow
UNLIMITED_TOKENS = 1 << 62  # what a rank without a dense window says of its capacity  [A50]
