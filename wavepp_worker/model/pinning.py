"""Host memory that a CUDA device copies to and from while it computes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # the runtime's own functions have no type annotations


def pin_while_alive(owner: object, tensor: Tensor, device: torch.device) -> None:
    """Pin `tensor`, so that its copies run beside the waves, for as long as `owner` lives.

    Torch's own pinned tensors take the next power of two of what is asked for; this is exact.

    Raises:
        RuntimeError: the system does not pin so much memory.
    """
    address = tensor.data_ptr()
    runtime = _cuda.cudart()
    with _cuda.device(device):
        _cuda.check_error(runtime.cudaHostRegister(address, tensor.nbytes, 0))
    weakref.finalize(owner, runtime.cudaHostUnregister, address)
