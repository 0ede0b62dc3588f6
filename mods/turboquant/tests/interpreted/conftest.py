"""The kernel's own code on a CPU, in Triton's interpreter. It is chosen for a whole process, before Triton is imported:

    TRITON_INTERPRET=1 python -m pytest mods/turboquant/tests/interpreted

Without that these tests are left out, so that a run of all tests uses vLLM's Triton kernels as they are.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
