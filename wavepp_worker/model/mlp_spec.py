"""The activation of a model's MLPs and experts, where it is not SiLU."""

from __future__ import annotations

from msgspec import Struct


class SituSpec(Struct, frozen=True, kw_only=True):
    """Bounds of SiTU's two factors; neither is reached."""

    gate_max: float
    up_max: float
