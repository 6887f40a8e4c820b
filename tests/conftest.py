"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# A shell without job control starts background jobs, and so their children, with SIGINT ignored:
# tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

PLANE_SETTINGS = ("DYN_", "ETCD_", "NATS_")


@pytest.fixture(autouse=True)
def own_planes() -> Iterator[None]:
    """Undo what a test, or Dynamo's runtime in it, sets of Dynamo's environment variables."""
    before = {k: v for k, v in os.environ.items() if k.startswith(PLANE_SETTINGS)}
    yield
    for key in [key for key in os.environ if key.startswith(PLANE_SETTINGS)]:
        del os.environ[key]
    os.environ.update(before)
