"""Triton's compiler, without a GPU. Without Triton these tests are left out:

TRITON_INTERPRET=0 PYTHONPATH=FOLDER_WITH_TRITON python -m pytest mods/modkit/tests/compiled

Where a GPU is, and PyTorch, one more test launches what was compiled.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") != "0":
    collect_ignore_glob = ["test_*.py"]
elif not Path("/dev/nvidiactl").exists():
    collect_ignore = ["test_modkit_real_gpu.py"]
