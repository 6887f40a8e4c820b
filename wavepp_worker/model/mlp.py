"""The gated activation of an MLP, of one expert as of a dense layer.

    SiLU    silu(a) b
    SiTU    G tanh(a / G) sigmoid(a)  U tanh(b / U)     in fp32: both factors stay below G and U

Near zero SiTU is SiLU; far out it does not grow, so that no activation does.
"""

from __future__ import annotations

from torch import Tensor

from wavepp_worker.model.fused import bounded_swiglu, swiglu
from wavepp_worker.model.mlp_spec import SituSpec


def gated(gate_up: Tensor, situ: SituSpec | None = None) -> Tensor:
    """Return the activation of rows that hold both projections, [T, 2 * I] → [T, I]."""
    if situ is None:
        return swiglu(gate_up)
    return bounded_swiglu(gate_up, situ.gate_max, situ.up_max)
