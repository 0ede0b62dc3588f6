"""vLLM's own FP8 methods on a GPU: python -m pytest mods/hybrid-int4-fp8/tests/on_gpu. Left out where there is none."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
