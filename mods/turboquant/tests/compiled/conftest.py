"""What is CUDA C++: through NVRTC for GPUs that are not there, and on a CPU, where shim.h plays the GPU's instructions.

TRITON_INTERPRET=0 python -m pytest mods/turboquant/tests/compiled

A compiler from a wheel (Zig's clang) builds it for the CPU, as the image has none.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]

FLAGS = ("-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-nostdlib++", "-fno-exceptions", "-fno-sanitize=all")


class OnCpu:
    """Stands for `driver.Loaded`."""

    def __init__(self, functions: list[str], library: Path) -> None:
        self.functions, self.library = functions, ctypes.CDLL(str(library))

    def launch(self, launch: Any, args: ctypes.Structure, stream: int, overlap: bool = False) -> None:
        which = self.functions.index(launch.function)
        self.library.run(which, *launch.grid, launch.threads, launch.shared_bytes, ctypes.byref(args))


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Compilation -> `OnCpu`; another one where its source has changed."""
    folder = tmp_path_factory.mktemp("cpu")

    def build(compiled: Any) -> OnCpu:
        return build_source(compiled.source(), compiled.file, tuple(compiled.functions))

    @cache
    def build_source(source: str, file: str, functions: tuple[str, ...]) -> OnCpu:
        stem = folder / f"{file}{abs(hash(source))}"
        stem.with_suffix(".cc").write_text(source)
        shim = Path(__file__).parents[1]
        command = [sys.executable, "-m", "ziglang", "c++", *FLAGS, f"-I{shim}", "-o"]
        caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
        paths = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
        files = [str(stem.with_suffix(".so")), str(stem.with_suffix(".cc"))]
        subprocess.run([*command, *files], check=True, env=caches | paths, timeout=1800)
        return OnCpu(list(functions), stem.with_suffix(".so"))

    return build


@pytest.fixture
def on_cpu(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the mod launches runs on the CPU."""
    from sparkpin_turboquant import driver

    monkeypatch.setattr(driver, "loaded", lambda compiled, device: built(compiled))
    monkeypatch.setattr(driver, "stream_of", lambda device: 0)
