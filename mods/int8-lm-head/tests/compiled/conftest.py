"""The kernel through Triton's compiler, for GPUs that are not there. Like tests/interpreted for a process of its own:

TRITON_INTERPRET=0 python -m pytest mods/int8-lm-head/tests/compiled
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]
