"""Which GPU code of an image runs on a GPU, which has to be compiled there first, and which never will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sparkpin.smoke.inspect.elf import Library
from sparkpin.smoke.inspect.fatbin import CUBIN, PTX, Code
from sparkpin.smoke.inspect.finding import ImageFinding, Severity
from sparkpin.smoke.inspect.scan import ImageFacts

FOLDER = "opt/sparkpin/kernels"  # kernels of our mods, a folder for each mod
# Compute capabilities from Maxwell on: NVIDIA's, and 107, for which cuDNN has code. A Thor is 101 in CUDA 12, then 110.
KNOWN = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
EXPERTS_PTX = "such a kernel of experts gave wrong tokens to several requests at once (vllm-project/vllm#40923)"
Verdict = Literal["runs", "PTX only", "none"]


@dataclass(frozen=True)
class Coverage:
    """Of a library with GPU code, in compilation units."""

    path: str
    runs: int
    compiles: int  # have PTX to compile
    neither: int
    archs: tuple[tuple[str, int], ...]  # how many have code for which GPU

    @property
    def verdict(self) -> Verdict:
        return "runs" if self.runs else "PTX only" if self.compiles else "none"


def runs(code: Code, sm: int) -> bool:
    """Whether a cubin loads: "a" on that chip alone, others on their chip and later ones of the same major number.

    Of "f", the family, this holds for all families up to 12.x: none leaves out a chip of its major number.
    """
    if code.kind != CUBIN:
        return False
    return code.arch == sm if code.suffix == "a" else code.arch // 10 == sm // 10 and code.arch <= sm


def compiles(code: Code, sm: int) -> bool:
    """Whether the driver can compile PTX for the GPU."""
    if code.kind != PTX:
        return False
    if code.suffix == "a":
        return code.arch == sm
    return code.arch <= sm and (not code.suffix or code.arch // 10 == sm // 10)


def coverages(facts: ImageFacts, sm: int) -> list[Coverage]:
    return [coverage(library, sm) for library in facts.libraries.values() if library.code]


def coverage(library: Library, sm: int) -> Coverage:
    counts, archs = Counter[str](), Counter[Code]()
    for unit, count in library.code:
        ready = any(runs(code, sm) for code in unit)
        counts["runs" if ready else "compiles" if any(compiles(code, sm) for code in unit) else "neither"] += count
        for code in unit:
            archs[code._replace(compressed=False)] += count
    named = tuple((code.name, count) for code, count in sorted(archs.items(), key=lambda row: (row[0].kind, row[0])))
    return Coverage(library.path, counts["runs"], counts["compiles"], counts["neither"], named)


def of_experts(path: str) -> bool:
    """A library of kernels for experts, by its name: vLLM's `_moe_C`."""
    return "moe" in path.rpartition("/")[2].lower()


def gpu_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    for found in coverages(facts, sm):
        held = ", ".join(name for name, _ in found.archs)
        step = f"take a build with sm_{sm}"
        if found.verdict == "PTX only":
            text = f"PTX only for sm_{sm}: the driver compiles {found.compiles} units at their first use ({held})"
            if of_experts(found.path):
                yield ImageFinding("warning", "gpu", found.path, f"{text}; {EXPERTS_PTX}", step)
            else:
                yield ImageFinding("note", "gpu", found.path, text)
        elif found.verdict == "none":
            text = f"nothing in it runs on sm_{sm}: it holds {held}"
            step += ", or say in sparkpin/smoke/inspect/allowed.py why nothing needs it"
            yield ImageFinding("error", "gpu", found.path, text, step, what=held)
    for folder, codes in facts.cubins.items():
        if folder.startswith(f"{FOLDER}/"):
            continue  # the rule `kernels` judges them
        good, all_ = sum(count for code, count in codes if runs(code, sm)), sum(count for _, count in codes)
        held = ", ".join(f"{count} {code.name}" for code, count in codes)
        severity: Severity = "note" if good else "warning"
        yield ImageFinding(severity, "gpu", folder, f"{good} of {all_} .cubin files run on sm_{sm} ({held})", what=held)
