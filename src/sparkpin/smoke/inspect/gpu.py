"""Which GPU code of an image runs on a GPU, which has to be compiled there first, and which never will; and whether the
kernels that a mod compiles when the image is built are all there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sparkpin.smoke.inspect.facts import ImageFacts, ImageFinding

AGAIN = "build the image again: invoke build"
# Compute capabilities from Maxwell on: NVIDIA's, and 107, for which cuDNN has code. A Thor is 101 in CUDA 12, then 110.
KNOWN = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 107, 110, 120, 121)
EXPERTS_PTX = "such a kernel of experts gave wrong tokens to several requests at once (vllm-project/vllm#40923)"
Verdict = Literal["runs", "PTX only", "none"]


def fits(name: str, sm: int) -> bool:
    """Whether a cubin ("sm_120a") loads on a GPU, or its driver can compile PTX ("compute_80") for it.

    "a" is for that chip alone. A cubin is for its chip and later ones of the same major number, PTX for all later ones.
    Of "f", the family, the former holds for both: no family up to 12.x leaves out a chip of its major number.
    """
    kind, _, arch = name.partition("_")
    chip, suffix = int(arch.rstrip("af")), arch.lstrip("0123456789")
    if suffix == "a":
        return chip == sm
    return chip <= sm and (chip // 10 == sm // 10 or (kind, suffix) == ("compute", ""))


@dataclass(frozen=True)
class Coverage:
    """Of a library with GPU code, in pieces (a cubin or PTX for one architecture)."""

    path: str
    runs: int
    compiles: int
    archs: dict[str, int]  # how many pieces are for which
    verdict: Verdict


def coverages(facts: ImageFacts, sm: int) -> list[Coverage]:
    """Of the libraries whose code cuobjdump listed, by path."""
    found = []
    for path, archs in sorted((facts.fact("gpu") or {}).items()):
        if isinstance(archs, dict):
            fitting = {name: count for name, count in archs.items() if fits(name, sm)}
            ready = sum(count for name, count in fitting.items() if name.startswith("sm_"))
            ptx = sum(fitting.values()) - ready
            found.append(Coverage(path, ready, ptx, archs, "runs" if ready else "PTX only" if ptx else "none"))
    return found


def gpu_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    libraries = facts.fact("gpu") or {}
    if facts.version("vllm") and not any("/vllm/" in path for path in libraries):
        step = "pin a build of vLLM with CUDA"
        yield ImageFinding("error", "gpu", "vllm", "no library of vLLM's has code for any GPU", step)
    for path, why in libraries.items():
        if isinstance(why, str):
            yield ImageFinding("error", "gpu", path, f"its GPU code is not known: {why}", AGAIN)
    for found in coverages(facts, sm):
        archs = ", ".join(found.archs)
        step = f"take a build with sm_{sm}"
        if found.verdict == "PTX only":
            text = f"PTX only for sm_{sm}: the driver compiles {found.compiles} pieces at their first use ({archs})"
            if "moe" in found.path.rpartition("/")[2].lower():  # of experts: vLLM's `_moe_C`
                yield ImageFinding("warning", "gpu", found.path, f"{text}; {EXPERTS_PTX}", step)
            else:
                yield ImageFinding("note", "gpu", found.path, text)
        elif found.verdict == "none":
            text = f"nothing in it runs on sm_{sm}: it holds {archs}"
            step += ", or say in sparkpin/smoke/inspect/rules.yaml why nothing needs it"
            yield ImageFinding("error", "gpu", found.path, text, step, what=archs)


def kernel_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    """Kernels of our mods that are not there are compiled on the machine, at each first start. That each is for the GPU
    of the list the build has checked."""
    wanted, triton = f"{sm // 10}.{sm % 10}", facts.version("triton") or "none"
    none = {"there": 0, "listed": 0, "sm": "", "triton": ""}
    for mod in (mod for package in facts.packages for mod in package["kernels"]):
        its = (facts.fact("kernels") or {}).get(mod, none)
        if not its["listed"] or its["there"] != its["listed"]:
            text, step = f"{its['there']} of its {its['listed'] or 'unlisted'} kernels are in the image", AGAIN
        elif its["sm"] != wanted:
            text, step = f"its kernels are for {its['sm']}", f"take a stack whose gpu.sm is {wanted}, and build"
        elif its["triton"] != triton:
            text, step = f"its kernels are by Triton {its['triton']}, the image has {triton}, which finds none", AGAIN
        else:
            text = f"{its['there']} kernels for {its['sm']} were compiled ahead"
            yield ImageFinding("note", "kernels", mod, text)
            continue
        yield ImageFinding("error", "kernels", mod, text, step, what=f"{its['there']} of {its['listed']}")
