"""In every process of a stock vLLM worker: torchvision imports, whatever build of it is there.

`dynamo.vllm` imports torchvision for models with images.  Beside a CPU build of torch only its CUDA
build may be had, whose C library does not load; then the two operators that its import looks for
are declared here.  Nothing calls them for text.  vLLM starts interpreters of its own, so this
travels on PYTHONPATH, and acts when torchvision is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

OPERATORS = ("nms", "qnms")
KEPT: list[object] = []  # operators live as long as what declared them


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def declare_operators() -> None:
    """Declare torchvision's operators where its C library does not."""
    import torch

    # Neither has annotations.
    operators: Any = torch.library
    load: Any = torch.ops.load_library
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            load(str(library))
    except OSError:
        fragment = operators.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            fragment.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        KEPT.append(fragment)


sys.meta_path.insert(0, _BeforeTorchvision())
