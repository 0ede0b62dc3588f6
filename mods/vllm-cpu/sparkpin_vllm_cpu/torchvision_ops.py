"""Let torchvision's Python code import where its compiled operators cannot be loaded.

torchvision registers fake kernels for ``torchvision::nms`` and ``torchvision::qnms`` while it is imported, and fails
when the operators are unknown. The wheel on the Python index is linked against CUDA's torch; next to torch+cpu its
library does not load. Serving text uses none of these operators: declaring them is enough. Calling one still raises.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

# torch drops the declarations when the Library object dies.
_library: Any = None


def declare_missing_operators() -> bool:
    """Declare the operators' schemas unless torchvision is absent, already imported, or loads its own.

    Returns:
        True when this call, or an earlier one, declared them.
    """
    global _library
    if _library is not None:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return False
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return False
    compiled = Path(spec.submodule_search_locations[0]) / "_C.so"
    if compiled.exists():
        try:
            torch.ops.load_library(str(compiled))
            return False
        except OSError:
            pass
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    _library = library
    return True
