"""At image build: compile a mod's kernels for a GPU that need not be there.

usage: python -m sparkpin_modkit.ahead MOD SM FOLDER

MOD names an entry point of the group ``sparkpin.kernels``; SM is a compute capability ("12.1"). FOLDER becomes a cache
in Triton's layout, with absolute paths: it must be where the image will have it. The same Triton with the same ptxas
writes the same bytes each time, if its own files have the same times, as those of a sealed image have. Cubins that the
mod makes itself (`sparkpin_modkit.kernels.cubin_of`) lie there, too; NVRTC's depend on no time.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkpin_modkit.kernels import MANIFEST, entries

GROUP = "sparkpin.kernels"
USAGE = 64  # EX_USAGE of sysexits.h


class AbsentGpu:
    """What Triton asks a driver for while it compiles: which GPU it is. Anything else has no answer."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # loaded kernels are kept by device: none meets one that is there, or another

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_all(warm_up: Callable[[], object], sm: str, folder: Path) -> list[dict[str, Any]]:
    """Fill the empty `folder` with what a call of `warm_up` compiles for the GPU; returns the kernels."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    major, minor = sm.split(".")
    # Triton makes sm_121a of 121: from SM90 on it always compiles for the one chip.
    target = GPUTarget("cuda", int(major) * 10 + int(minor), 32)
    driver.set_active(AbsentGpu(target))
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(folder)
        knobs.compilation.store_binary_only = True  # the steps on the way to a cubin are nine tenths of the bytes
        warm_up()
    made = entries(folder)
    if strangers := [kernel for kernel in made if kernel["arch"] != target.arch]:
        name, architecture = strangers[0]["name"], strangers[0]["arch"]
        raise ValueError(f"{name} was compiled for sm_{architecture}, expected sm_{target.arch}")
    return made


def without_times(package: str) -> None:
    """ptxas writes into a cubin when each source was last changed (DWARF's line table); 0 means that it is not known.

    Those of Triton came with the image, where all times are alike; the mod was installed a moment ago.
    """
    for folder in sys.modules[package].__path__:
        for source in Path(folder).rglob("*.py"):
            os.utime(source, (0, 0))


def main(arguments: list[str]) -> None:
    if len(arguments) != 3:
        print(__doc__, file=sys.stderr)
        raise SystemExit(USAGE)
    mod, sm, folder = arguments[0], arguments[1], Path(arguments[2]).absolute()
    points = sorted(importlib.metadata.entry_points(group=GROUP))
    if [point.name for point in points].count(mod) != 1:
        seen = ", ".join(f"{point.name} = {point.value}" for point in points) or "none"
        raise SystemExit(f"entry points of {GROUP}: got {seen}; expected one that is called as its mod's folder, {mod}")
    point = next(point for point in points if point.name == mod)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: what lies there was not compiled now")
    warm_up = point.load()
    without_times(point.module.partition(".")[0])
    made = compile_all(warm_up, sm, folder)
    if not made:
        raise SystemExit(f"{mod}: {point.value} compiled no kernel")
    record = {
        "mod": mod,
        "sm": sm,
        "triton": importlib.metadata.version("triton"),
        "kernels": [{"name": kernel["name"], "key": kernel["key"]} for kernel in made],
    }
    (folder / MANIFEST).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{mod}: {len(made)} kernels for sm_{sm.replace('.', '')}")


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1:])
