"""All findings of an image. Pure: from the facts, nothing is read."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from sparkpin.core.terminal import printable
from sparkpin.pins.reading import read_yaml
from sparkpin.smoke.inspect.facts import ORDER, RULES, ImageFacts, ImageFinding, Step
from sparkpin.smoke.inspect.gpu import gpu_findings, kernel_findings

DATA = read_yaml(Path(__file__).with_name("rules.yaml"))
SHOWN = 4
KEPT_OUT = re.compile(r"\S+ \S+ (?:requires|has requirement) ([A-Za-z0-9._-]+)")  # of pip check


@dataclass(frozen=True)
class Wanted:
    """What the image is compared with. platform: that it is for; sm: the GPU (121), None for an image without; mods:
    those that must register; accepted: distribution -> why it is left out, or has another version than others ask
    for."""

    platform: str
    sm: int | None = None
    mods: Collection[str] = ()
    accepted: Mapping[str, str] = field(default_factory=dict)


def findings(facts: ImageFacts, wanted: Wanted, platform: str) -> list[ImageFinding]:
    """The most severe first. platform: the image's."""
    step = "build the stack for this platform"
    other = ImageFinding("error", "files", "/", f"the image is for {platform}, its stack for {wanted.platform}", step)
    found = [
        *([other] if platform != wanted.platform else []),
        *step_findings(facts, wanted),
        *(ImageFinding("error", "plugins", mod, "is switched off by the release's environment") for mod in facts.off),
        *library_findings(facts),
        *package_findings(facts, wanted.accepted),
        *(cuda_findings(facts, wanted.sm) if wanted.sm else ()),
        *(gpu_findings(facts, wanted.sm) if wanted.sm else ()),
        *(kernel_findings(facts, wanted.sm) if wanted.sm else ()),
    ]
    settled = [settle(one) for one in found]
    return sorted(settled, key=lambda one: (ORDER.index(one.severity), RULES.index(one.rule)))


def settle(finding: ImageFinding) -> ImageFinding:
    """A finding as it stands, or as allowed with the reason. The image wrote parts of it: nothing that a terminal would
    obey gets through."""
    finding = replace(finding, subject=printable(finding.subject), text=printable(finding.text))
    rows = ((why, *row) for why, its in DATA["allowed"].items() for row in its)
    fit = (row for row in rows if row[1] == finding.rule and fnmatch.fnmatchcase(finding.subject, row[2]))
    why = finding.why or next((why for why, _, _, what in fit if re.fullmatch(what, finding.what)), "")
    return replace(finding, severity="allowed", why=why, next_step="") if why else finding


def step_findings(facts: ImageFacts, wanted: Wanted) -> Iterator[ImageFinding]:
    """What failed but for libraries, and what was not reached."""
    last = facts.steps[-1] if facts.steps else Step("run", "start", "begin")
    if last.kind != "end":
        where = f"{last.kind} {last.name}" if last.state == "begin" else f"what follows {last.kind} {last.name}"
        yield ImageFinding("error", "run", where, f"the process {facts.ending}; all after it was not reached")
    for row in facts.steps:
        rule = {"plugin": "plugins", "fact": "torch" if row.name == "torch" else "fact"}.get(row.kind, row.kind)
        if row.state == "refused" and row.kind in ("plugin", "platform"):
            yield ImageFinding("note", rule, row.name, f"refused without a GPU: {row.detail}")
        elif row.state not in ("begin", "ok") and row.kind != "library":
            yield ImageFinding("error", rule, row.name, str(row.detail), "the whole log: load.log of the evidence")
    registered = {row.name for row in facts.of("plugin")}
    for mod in sorted(set(wanted.mods) - registered if last.kind == "end" else ()):
        text = "the release has this mod, but no entry point of the image names it"
        yield ImageFinding("error", "plugins", mod, text, "build the image again: invoke build")
    for row in facts.of("platform"):
        if wanted.sm and "CpuPlatform" in str(row.detail):
            text = f"vLLM is built for a CPU: {row.detail}"
            yield ImageFinding("error", "platform", "vllm", text, "pin a build of vLLM with CUDA")


def library_findings(facts: ImageFacts) -> Iterator[ImageFinding]:
    """Libraries that do not load. One that does not load alone passes if it came with another that does: NVPL's LAPACK
    takes either of two BLAS that way."""
    rows = facts.of("library")
    fit = {family(row.name) for row in rows if row.state == "ok"}
    linked = {path for row in rows if row.state == "ok" for path in row.detail}
    foreign = [f"{row.name} ({row.detail})" for row in rows if row.state == "foreign"]
    if foreign:
        text = f"for another machine: {', '.join(foreign[:SHOWN])}{', ...' if foreign[SHOWN:] else ''}"
        yield ImageFinding("warning", "files", foreign[0].partition(" ")[0], text, what="machine")
    for row in rows:
        of_vllm = "-packages/vllm/" in row.name
        if row.state == "ok":
            yield from two_runtimes(facts, row) if of_vllm else ()
        elif (
            row.state != "foreign" and row.name not in linked and (row.state != "unfit" or family(row.name) not in fit)
        ):
            yield from unloaded(row, of_vllm)


def unloaded(row: Step, of_vllm: bool) -> list[ImageFinding]:
    """One finding for each library that it lacks. of_vllm: of vLLM's, which has to load."""
    if row.state in ("crashed", "unfit") and not of_vllm:
        text = f"{row.detail}, perhaps because there is no GPU, or because of the CPU"
        return [ImageFinding("warning", "load", row.name, text, what=row.state)]
    for rule, step, pattern in DATA["causes"]:
        if lacks := [name for name in re.findall(pattern, row.detail) if name != row.name]:
            return [ImageFinding("error", rule, row.name, row.detail, step, what=name) for name in lacks]
    rule = "files" if row.state == "failed" else "load"
    step = "fetch its package again, or leave it out of the stack"
    return [ImageFinding("error", rule, row.name, row.detail, step, what=row.state)]


def family(library: str) -> str:
    """The same for libraries of which vLLM takes the one for the CPU: _C, _C_AVX2, _C_AVX512."""
    return re.sub(r"_AVX[0-9A-Z_]*(?=\.[^/]*$)", "", library)


def two_runtimes(facts: ImageFacts, row: Step) -> Iterator[ImageFinding]:
    """vLLM's libraries and PyTorch have to be built for the same CUDA, or both for none (then they do not load)."""
    torch = (facts.fact("torch") or {}).get("cuda", "")
    majors = set(re.findall(r"libcudart(?:-\w+)?\.so\.(\d+)", " ".join(row.detail)))
    for other in sorted(majors - {torch.partition(".")[0]}):
        text = f"is built for CUDA {other}, torch for CUDA {torch or None}"
        step = "pin torch and vLLM wheels that are built for one CUDA release, or both for none"
        yield ImageFinding("error", "torch", row.name, text, step, what=other)


def package_findings(facts: ImageFacts, accepted: Mapping[str, str]) -> Iterator[ImageFinding]:
    """What is examined has to be able to serve; one version of a distribution lies in a folder that Python imports
    from; what each requires is there."""
    lacks = [name for name in ("vllm", "torch") if not facts.version(name)]
    if lacks and facts.fact("packages") is not None:
        text = f"no {' and no '.join(lacks)} in it: it serves nothing"
        yield ImageFinding("error", "packages", "/", text, "build the image again: invoke build")
    for site, name in sorted({(one["site"], one["name"]) for one in facts.packages}):
        versions = [one["version"] for one in facts.packages if (one["site"], one["name"]) == (site, name)]
        if len(versions) > 1:
            text = f"{len(versions)} times in {site}: versions {', '.join(versions)}"
            step = "lock the stack again: one wheel of a name"
            yield ImageFinding("error", "packages", name, text, step, what=", ".join(sorted(versions)))
    for line in filter(None, facts.fact("pip") or ()):
        match = KEPT_OUT.match(line)
        name, what = (canonicalize_name(match[1]), "requirement") if match else (line.split()[0], "platform")
        step = "add it to the stack's pins, or say in `exclude` why not"
        yield ImageFinding("error", "packages", name, line, step, what=what, why=accepted.get(name, ""))


def toolkit(facts: ImageFacts) -> dict[str, str]:
    """Parts of CUDA's toolkit: package -> version."""
    named = {one["name"]: one["version"] for one in facts.packages if one["name"].startswith("nvidia-")}
    return {name: version for name, version in named.items() if part_of(name) in DATA["toolkit"]}


def part_of(package: str) -> str:
    return re.sub(r"-cu\d+$", "", package.removeprefix("nvidia-"))


def release(version: str) -> str:
    """Major and minor: "13.0" of "13.0.88"."""
    return ".".join(version.split(".")[:2])


def cuda_findings(facts: ImageFacts, sm: int) -> Iterator[ImageFinding]:
    """PyTorch has CUDA. Compiler, headers and runtime are of one release: code that is compiled at run time meets all
    of them."""
    torch, parts = facts.fact("torch"), toolkit(facts)
    if torch and not torch["cuda"]:
        text = f"PyTorch {torch['version']} is built without CUDA: it runs nothing on sm_{sm}"
        yield ImageFinding("error", "torch", "torch", text, "take an image of a stack with a GPU, or leave --sm out")
    if len({release(version) for version in parts.values()}) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in parts.items())
        step = f"constrain them to {cuda_release(facts) or '13.0'}.* in the stack's pins"
        yield ImageFinding("error", "cuda", "CUDA toolkit", f"of several CUDA releases: {listed}", step)


def cuda_release(facts: ImageFacts) -> str:
    """The CUDA release whose runtime the image has, the newest of several; "" where it has none."""
    runtimes = [version for name, version in toolkit(facts).items() if part_of(name) == DATA["toolkit"][-1]]
    if runtimes:
        return release(max(runtimes, key=Version))
    return str((facts.fact("torch") or {}).get("cuda", ""))


def minimum_driver(facts: ImageFacts) -> str:
    """The oldest driver that runs the image; "" where that is not known."""
    major = cuda_release(facts).partition(".")[0]
    return str(DATA["drivers"].get(major, ""))
