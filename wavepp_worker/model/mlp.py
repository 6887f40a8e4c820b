"""The gated activation of an MLP, of one expert as of a dense layer.

    SiLU    silu(a) b
    SiTU    G tanh(a / G) sigmoid(a)  U tanh(b / U)     in fp32: both factors stay below G and U

Near zero SiTU is SiLU; far out it does not grow, so that no activation does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wavepp_worker.model.mlp_spec import SituSpec


def gated(gate: Tensor, up: Tensor, situ: SituSpec | None = None) -> Tensor:
    """Return the activation of two projections of one input, in their type."""
    if situ is None:
        return F.silu(gate) * up
    wide = torch.promote_types(gate.dtype, torch.float32)
    a, b = gate.to(wide), up.to(wide)
    bounded = situ.gate_max * torch.tanh(a / situ.gate_max) * a.sigmoid()
    return (bounded * situ.up_max * torch.tanh(b / situ.up_max)).to(gate.dtype)
