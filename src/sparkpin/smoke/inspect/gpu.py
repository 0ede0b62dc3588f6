"""Which GPU code of an image runs on a GPU, which has to be compiled there first, and which never will; and whether the
kernels that a mod compiles when the image is built are all there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sparkpin.smoke.inspect.elf import Library
from sparkpin.smoke.inspect.fatbin import CUBIN, PTX, Code
from sparkpin.smoke.inspect.finding import ImageFinding
from sparkpin.smoke.inspect.scan import ImageFacts

FOLDER = "opt/sparkpin/kernels"  # kernels of our mods, a folder for each mod
AGAIN = "build the image again: invoke build"
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
        archs.update(dict.fromkeys(unit, count))
    named = tuple((code.name, count) for code, count in sorted(archs.items(), key=lambda row: (row[0].kind, row[0])))
    return Coverage(library.path, counts["runs"], counts["compiles"], counts["neither"], named)


def gpu_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    for found in coverages(facts, sm):
        held = ", ".join(name for name, _ in found.archs)
        step = f"take a build with sm_{sm}"
        if found.verdict == "PTX only":
            text = f"PTX only for sm_{sm}: the driver compiles {found.compiles} units at their first use ({held})"
            if "moe" in found.path.rpartition("/")[2].lower():  # of experts: vLLM's `_moe_C`
                yield ImageFinding("warning", "gpu", found.path, f"{text}; {EXPERTS_PTX}", step)
            else:
                yield ImageFinding("note", "gpu", found.path, text)
        elif found.verdict == "none":
            text = f"nothing in it runs on sm_{sm}: it holds {held}"
            step += ", or say in sparkpin/smoke/inspect/allowed.py why nothing needs it"
            yield ImageFinding("error", "gpu", found.path, text, step, what=held)


@dataclass(frozen=True)
class Ahead:
    """A mod that can compile its kernels ahead: what the list says that the build wrote, and the .cubin files."""

    mod: str
    there: int
    listed: int = 0
    sm: str = ""
    triton: str = ""


def ahead(facts: ImageFacts) -> list[Ahead]:
    """One row for each mod with the entry point, whether its kernels are there or not."""
    rows = []
    for mod in (mod for package in facts.packages for mod in package.kernels):
        there = facts.cubins.get(f"{FOLDER}/{mod}", 0)
        try:
            value = json.loads(facts.manifests.get(f"{FOLDER}/{mod}", ""))
            rows.append(Ahead(mod, there, len(value["kernels"]), str(value["sm"]), str(value["triton"])))
        except (ValueError, KeyError, TypeError):
            rows.append(Ahead(mod, there))
    return rows


def kernel_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    """Those that are not there are compiled on the machine, at each first start. That each is for the GPU of the list
    the build has checked."""
    package, wanted = facts.package("triton"), f"{sm // 10}.{sm % 10}"
    triton = package.version if package else "none"
    for row in ahead(facts):
        if not row.listed or row.there != row.listed:
            text, step = f"{row.there} of its {row.listed or 'unlisted'} kernels are in the image", AGAIN
        elif row.sm != wanted:
            text, step = f"its kernels are for {row.sm}", f"take a stack whose gpu.sm is {wanted}, and build"
        elif row.triton != triton:
            text, step = (f"its kernels are by Triton {row.triton}, the image has {triton}, which finds none", AGAIN)
        else:
            yield ImageFinding("note", "kernels", row.mod, f"{row.there} kernels for {row.sm} were compiled ahead")
            continue
        yield ImageFinding("error", "kernels", row.mod, text, step, what=f"{row.there} of {row.listed}")
