"""States on a GPU: python -m pytest mods/draft-vocabulary/tests/on_gpu. Left out where torch finds none, as in CI."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
