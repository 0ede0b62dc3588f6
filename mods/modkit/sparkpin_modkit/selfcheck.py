"""A mod's GPU kernels against their specification, on random data, before a GPU that never ran them serves with them.

`once` does so at a machine's first start. ``python -m sparkpin_modkit.selfcheck`` does so for each mod that has an
entry point of the group ``sparkpin.selfcheck``, which needs no model, and prints a table. It ends with 0, with 78 where
a kernel is wrong, with 69 where there is nothing to compare: no GPU, or no such mod.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin_modkit.errors import EXIT_CODE, ModError
from sparkpin_modkit.kernels import put
from sparkpin_modkit.ranks import content
from sparkpin_modkit.reports import report
from sparkpin_modkit.switch import switch_name

GROUP = "sparkpin.selfcheck"
UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h
DRIVER = Path("/proc/driver/nvidia/version")

Compared = tuple[str, str, float, float]
"""Kernel, case, error and its bound, both relative."""


class Found(NamedTuple):
    """A comparison, and the seconds that it took."""

    kernel: str
    case: str
    error: float
    bound: float
    seconds: float

    @property
    def is_right(self) -> bool:
        return self.error < self.bound  # NaN is not

    def __str__(self) -> str:
        verdict = "ok" if self.is_right else "FAILED"
        return f"{self.kernel:15}{self.case:40}{self.error:<10.2g}{self.bound:<8.2g}{verdict:8}{self.seconds:.2f}"


HEADER = f"{'kernel':15}{'case':40}{'error':10}{'bound':8}{'verdict':8}seconds"


def timed(compared: Iterable[Compared]) -> Iterator[Found]:
    """An error is a number of the host's, so the GPU is done when it comes."""
    begin = time.monotonic()
    for one in compared:
        now = time.monotonic()
        yield Found(*one, now - begin)
        begin = now


def machine() -> dict[str, str]:
    """The current GPU and its driver: what a comparison's result is good for."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    text = DRIVER.read_text(encoding="utf-8") if DRIVER.is_file() else ""
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return {
        "GPU": f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors",
        "driver": driver[0] if driver else f"unknown, of CUDA {torch._C._cuda_getDriverVersion()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }


def once(mod: str, version: str, case: Mapping[str, Any], compare: Callable[[], Iterable[Compared]]) -> None:
    """Compare, unless this machine has done so: the same GPU, driver, torch, files of the mod, and `case`.

    A result that is right stays in Triton's cache, a volume of the one image. Reports event "checked": `seconds` that
    it took now, and `worst`, the largest error as a part of its bound; ``"before":true`` where it was done earlier.

    Args:
        mod: name of the mod, as in ``mods/<name>``.
        case: what is compared, besides that; values for JSON.
        compare: of the mod's package. Its kernels are loaded by now.

    Raises:
        ModError: a kernel is wrong; the next start compares again.
    """
    from triton import knobs

    here = {**machine(), mod: f"{version} {content(compare)}", **case}
    key = hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:16]
    kept = Path(knobs.cache.dir) / f"checked-{mod}-{key}.json"
    if kept.is_file():
        report(mod, "checked", before=True)
        return
    found = list(timed(compare()))
    if wrong := [one for one in found if not one.is_right]:
        others = f"; {len(wrong)} of {len(found)} comparisons fail" if len(wrong) > 1 else ""
        raise ModError(
            f"{mod}: on this GPU ({here['GPU']}; driver {here['driver']}) {wrong[0].kernel}, {wrong[0].case}, differs "
            f"from naive.py by {wrong[0].error:.3g}, expected less than {wrong[0].bound:.3g}{others}; set "
            f"{switch_name(mod)}=0, or serve the stage below (invoke rollback)"
        )
    put(kept, (json.dumps({**here, "found": found}, indent=1) + "\n").encode())
    seconds, worst = sum(one.seconds for one in found), max(one.error / one.bound for one in found)
    report(mod, "checked", comparisons=len(found), seconds=round(seconds, 2), worst=round(worst, 3))


def main() -> None:
    import torch

    points = sorted(importlib.metadata.entry_points(group=GROUP))
    if not points or not torch.cuda.is_available():
        why = "torch finds no GPU" if points else "no mod with GPU kernels is installed"
        print(f"nothing to compare: {why}")
        raise SystemExit(UNAVAILABLE)
    for name, value in machine().items():
        print(f"{name:15}{value}")
    wrong = 0
    for point in points:
        compare = point.load()
        print(f"{point.name:15}{importlib.metadata.version(f'sparkpin-{point.name}')} {content(compare)}")
        print(HEADER, flush=True)
        for one in timed(compare()):
            print(one, flush=True)
            wrong += not one.is_right
    print(f"{wrong} FAILED" if wrong else "all ok")
    raise SystemExit(EXIT_CODE if wrong else 0)


if __name__ == "__main__":
    main()
