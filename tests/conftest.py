"""Shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

PLANE_SETTINGS = ("DYN_", "ETCD_", "NATS_")


@pytest.fixture(autouse=True)
def own_planes() -> Iterator[None]:
    """Undo what a test, or Dynamo's runtime in it, sets of Dynamo's environment variables."""
    before = {k: v for k, v in os.environ.items() if k.startswith(PLANE_SETTINGS)}
    yield
    for key in [key for key in os.environ if key.startswith(PLANE_SETTINGS)]:
        del os.environ[key]
    os.environ.update(before)
