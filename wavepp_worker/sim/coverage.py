"""Marks that a kind of campaign cannot reach, each with its reason."""

from __future__ import annotations

from wavepp_worker.sim.knobs import SimOptions


def exempt(options: SimOptions) -> dict[str, str]:
    """Return mark or verdict -> why worlds of these options never reach it."""
    return {}
