"""All findings of an image. Pure: from what `scan` gathered, nothing is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from packaging.version import InvalidVersion, Version

from sparkpin.smoke.inspect.allowed import ALLOWED
from sparkpin.smoke.inspect.elf import AARCH64, MACHINES, X86_64
from sparkpin.smoke.inspect.finding import ORDER, RULES, ImageFinding, settle
from sparkpin.smoke.inspect.gpu import gpu_findings, kernel_findings
from sparkpin.smoke.inspect.linking import Linker, some
from sparkpin.smoke.inspect.packages import InstalledPackage
from sparkpin.smoke.inspect.scan import ImageFacts

PLATFORMS = {"linux/amd64": X86_64, "linux/arm64": AARCH64}
RUNTIME = "cuda-runtime"
# Packages whose major and minor version are those of the CUDA release that they belong to.
TOOLKIT = ("cuda-nvcc", "cuda-crt", "cuda-cccl", "nvvm", "nvjitlink", "cuda-nvrtc", RUNTIME)
# CUDA's major version -> the oldest Linux driver that runs it: CUDA Toolkit release notes, table 2 "CUDA Toolkit and
# Minimum Required Driver Version for CUDA Minor Version Compatibility" (450, 525, 580), the first of each branch.
DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def findings(facts: ImageFacts, *, sm: int | None, platform: str, mods: Sequence[str] = ()) -> list[ImageFinding]:
    """The most severe first. sm: the GPU (121), None for an image without. mods: distributions that must be there."""
    names = {package.name for package in facts.packages}
    allowed = [entry for entry in ALLOWED if not entry.package or entry.package in names]
    found = [
        *file_findings(facts, platform),
        *(gpu_findings(facts, sm) if sm else ()),
        *(kernel_findings(facts, sm) if sm else ()),
        *Linker(facts, allowed).findings(),
        *server_findings(facts, sm),
        *(cuda_findings(facts) if sm else ()),
        *package_findings(facts),
        *plugin_findings(facts, mods),
    ]
    settled = [settle(one, allowed) for one in found]
    return sorted(settled, key=lambda one: (ORDER.index(one.severity), RULES.index(one.rule)))


def file_findings(facts: ImageFacts, platform: str) -> Iterator[ImageFinding]:
    """Files that cannot be read, or are for another machine; nothing to examine at all."""
    if not facts.libraries and not facts.broken:
        step = "give the folder that has usr/ and opt/ in it, or the tag of an image"
        yield ImageFinding("error", "files", "/", "no library and no program is in it", step)
    for path, text in facts.broken.items():
        yield ImageFinding("error", "files", path, text, "fetch its package again, or leave it out of the stack")
    wanted = PLATFORMS[platform]
    others = [one for one in facts.libraries.values() if one.machine in MACHINES and one.machine != wanted]
    if others:
        names = some(f"{one.path} ({MACHINES[one.machine]})" for one in others)
        yield ImageFinding("warning", "files", others[0].path, f"not for {platform}: {names}", what="machine")
    if facts.libraries and len(others) == sum(one.machine in MACHINES for one in facts.libraries.values()):
        text = f"no library or program in it is for {platform}"
        step = "build the stack for this platform"
        yield ImageFinding("error", "files", others[0].path if others else "/", text, step, what=platform)


def server_findings(facts: ImageFacts, sm: int | None) -> Iterator[ImageFinding]:
    """What is examined has to be able to serve: vLLM and PyTorch, and for a GPU a PyTorch with CUDA."""
    step = "give a release, or its image, or the folder that has its whole root file system"
    lacks = [name for name, there in (("vLLM", facts.package("vllm")), ("PyTorch", facts.torch)) if not there]
    if lacks and facts.libraries:
        yield ImageFinding("error", "packages", "/", f"no {' and no '.join(lacks)} in it: it serves nothing", step)
    mismatch = list(torch_findings(facts))
    yield from mismatch
    if sm and not mismatch and facts.torch and not facts.torch.cuda:
        text = f"PyTorch {facts.torch.version} is built without CUDA: it runs nothing on sm_{sm}"
        step = "take an image of a stack with a GPU, or leave --sm out"
        yield ImageFinding("error", "torch", facts.torch.path, text, step)


def torch_findings(facts: ImageFacts) -> Iterator[ImageFinding]:
    """vLLM's libraries and PyTorch have to be built for the same CUDA, or both for none."""
    vllm, torch = facts.package("vllm"), facts.torch
    own = [one for one in facts.libraries.values() if re.search(r"(^|/)vllm/[^/]+\.so$", one.path)]
    if not vllm or not torch or not own:
        return
    wanted = {  # CUDA's major version, "" where the name has none -> who needs it
        match[1] or "": f"{library.path} needs {name}"
        for library in own
        for name in library.needed
        if (match := re.fullmatch(r"libcudart\.so\.(\d+)(?:\..*)?|libc10_cuda\.so|libtorch_cuda\.so", name))
    }
    others = wanted.keys() - {"", torch.cuda.partition(".")[0]}
    if bool(wanted) == bool(torch.cuda) and not others:
        return
    other = min(others, default="")
    mine = f"for CUDA {other} ({wanted[other]})" if wanted else "without CUDA"
    text = f"vLLM {vllm.version} is built {mine}, torch {torch.version} for CUDA {torch.cuda or None} ({torch.path})"
    step = "pin torch and vLLM wheels that are built for one CUDA release, or both for none"
    yield ImageFinding("error", "torch", f"vllm {vllm.version}", text, step)


def toolkit(facts: ImageFacts) -> list[tuple[str, InstalledPackage]]:
    """Parts of CUDA's toolkit with their packages."""
    found = []
    for package in facts.packages:
        part = re.sub(r"-cu\d+$", "", package.name.removeprefix("nvidia-"))
        if package.name.startswith("nvidia-") and part in TOOLKIT:
            found.append((part, package))
    return found


def release(version: str) -> str:
    """Major and minor: "13.0" of "13.0.88"."""
    return ".".join(version.split(".")[:2])


def cuda_findings(facts: ImageFacts) -> Iterator[ImageFinding]:
    """Compiler, headers and runtime of one CUDA release: code that is compiled at run time meets all of them."""
    parts = [package for _, package in toolkit(facts)]
    if len({release(package.version) for package in parts}) > 1:
        listed = ", ".join(f"{package.name} {package.version}" for package in parts)
        step = f"constrain them to {cuda_release(facts) or release(parts[0].version)}.* in the stack's pins"
        yield ImageFinding("error", "cuda", "CUDA toolkit", f"of several CUDA releases: {listed}", step)


def cuda_release(facts: ImageFacts) -> str:
    """The CUDA release whose runtime the image has, the newest of several; "" where it has none."""
    runtimes = [package.version for part, package in toolkit(facts) if part == RUNTIME]
    if runtimes:
        return release(max(runtimes, key=Version))
    return facts.torch.cuda if facts.torch else ""


def minimum_driver(facts: ImageFacts) -> str:
    """The oldest driver that runs the image; "" where that is not known."""
    major = cuda_release(facts).partition(".")[0]
    return DRIVERS.get(int(major), "") if major.isdecimal() else ""


def package_findings(facts: ImageFacts) -> Iterator[ImageFinding]:
    """One version of a distribution in a folder that Python imports from."""
    for site, name in sorted({(package.site, package.name) for package in facts.packages}):
        versions = [one.version for one in facts.packages if (one.site, one.name) == (site, name)]
        if len(versions) > 1:
            text = f"{len(versions)} times in /{site}: versions {', '.join(versions)}"
            step = "lock the stack again: one wheel of a name"
            yield ImageFinding("error", "packages", name, text, step, what=", ".join(versions))


def plugin_findings(facts: ImageFacts, mods: Sequence[str]) -> Iterator[ImageFinding]:
    """Our mods are there, and made for the vLLM that is there."""
    vllm = facts.package("vllm")
    for name in mods:
        if facts.package(name) is None:
            text = "the stage has this mod, the image does not"
            yield ImageFinding("error", "plugins", name, text, "build the image again: invoke build")
    for package in (package for package in facts.packages if package.plugins):
        what = f"{', '.join(package.plugins)} {package.version}"
        if not package.accepts and package.name in mods:
            text = f"{what} does not say which vLLM it is made for"
            step = "name the releases in its TOUCHES, as a literal"
            yield ImageFinding("warning", "plugins", package.name, text, step)
        elif package.accepts and vllm and not any(same_release(vllm.version, version) for version in package.accepts):
            text = f"{what} is made for vLLM {', '.join(package.accepts)}, the image has {vllm.version}"
            patched = vllm.version.partition("+")[0].rpartition(".")[0]
            if patched in {version.rpartition(".")[0] for version in package.accepts}:
                step = "smoke test it: the mod starts only if this patch release left what it replaces as it was"
                yield ImageFinding("warning", "plugins", package.name, text, step)
            else:
                step = "take a version of the mod that is made for this vLLM, or adapt it and add the version"
                yield ImageFinding("error", "plugins", package.name, text, step)


def same_release(seen: str, accepted: str) -> bool:
    """Whether a version is the release that a mod names; its local part ("+cpu") does not count."""
    try:
        return Version(seen.partition("+")[0]) == Version(accepted)
    except InvalidVersion:
        return seen == accepted
