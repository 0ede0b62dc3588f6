"""Triton's compiler, without a GPU. Without Triton these tests are left out:

TRITON_INTERPRET=0 PYTHONPATH=FOLDER_WITH_TRITON python -m pytest mods/modkit/tests/compiled
"""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET", "0") != "0":
    collect_ignore_glob = ["test_*.py"]
