"""At run time: a mod's kernels come from the image, and the log says whether they did.

The folder that `sparkpin_modkit.ahead` filled at image build is laid out as Triton's own cache, under the keys that
Triton computes from a kernel's source, its specialisation, the compiler and ptxas. Only Triton decides whether an entry
fits, so a kernel that does not is compiled as ever; what this module adds is that nobody has to believe that none was.
Cubins that a mod makes itself, of CUDA C++, lie beside those entries (`cubin_of`).

Read in Triton 3.6.0 and 3.8.0 (runtime/cache.py, runtime/jit.py, compiler/compiler.py, knobs.py).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparkpin_modkit.reports import report

IMAGE = Path("/opt/sparkpin/kernels")
"""One folder for each mod that has kernels in the image."""
MANIFEST = "kernels.json"
Came = Literal["image", "cached", "compiled"]
ELF, FLAGS_AT, OLD_ABI = b"\x7fELF", 48, 7


@dataclass
class Seen:
    """Where the kernels of a warm-up came from. Names; a kernel has one for each specialisation.

    image: found in the image; cached: found in Triton's cache, from an earlier start; compiled: made now.
    """

    image: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.image) + len(self.cached) + len(self.compiled)


class Listener:
    """Triton's one listener for compilations (knobs.compilation.listener), in front of whatever it was.

    Triton calls it for each kernel that the process has not loaded yet, found or compiled. warming: where to note that,
    and the mod's folder in the image; None when no warm-up runs. mods: package -> mod of those that were warmed.
    """

    def __init__(self, before: Callable[..., object] | None) -> None:
        self.before = before
        self.warming: tuple[Seen, Path] | None = None
        self.mods: dict[str, str] = {}

    def __call__(self, **event: Any) -> None:
        name, hit = event["src"].name, event["cache_hit"]
        if self.warming:
            files = event["metadata_group"].values()
            ours = bool(files) and all(self.warming[1] in Path(file).parents for file in files)
        else:
            ours = False
        package = (getattr(getattr(event["src"], "fn", None), "__module__", None) or "").partition(".")[0]
        self.note(package, name, "compiled" if not hit else "image" if ours else "cached")
        if self.before is not None:
            self.before(**event)

    def note(self, package: str, name: str, came: Came) -> None:
        """A kernel is there: one of the warm-up's, or one more of a mod that was warmed, which is told if compiled."""
        if self.warming:
            getattr(self.warming[0], came).append(name)
        elif came == "compiled" and package in self.mods:
            report(self.mods[package], "compiled", kernel=name)


def warm(mod: str, warm_up: Callable[[], object], image: Path = IMAGE) -> Seen:
    """Load all kernels that a mod may launch, before the first request, and report where they came from.

    Writes ``{"mod":..,"event":"kernels","total":12,"image":12,"cached":0,"compiled":[]}``; from then on each kernel of
    the mod's package that Triton compiles in this process is reported as event "compiled". A second call for what is
    loaded already says nothing.

    Args:
        mod: name of the mod, as in ``mods/<name>``.
        warm_up: the mod's entry point of the group ``sparkpin.kernels``, or a function of the same package that asks it
            for less.
        image: where the image has its kernels; a parameter for tests.
    """
    from triton import knobs

    listener = knobs.compilation.listener
    if not isinstance(listener, Listener):
        listener = knobs.compilation.listener = Listener(listener)
    folder, seen = image / mod, Seen()
    lead(folder, Path(knobs.cache.dir))
    listener.warming = seen, folder
    try:
        warm_up()
    finally:
        listener.warming = None
    package = warm_up.__module__.partition(".")[0]
    if seen.total or package not in listener.mods:
        report(mod, "kernels", total=seen.total, image=len(seen.image), cached=len(seen.cached), compiled=seen.compiled)
    listener.mods[package] = mod
    return seen


def cubin_of(mod: str, name: str, key: str, compile: Callable[[], bytes], image: Path = IMAGE) -> bytes:
    """A cubin that is not Triton's: the image's, or an earlier start's in Triton's cache, or compiled and kept there.

    When an image is built that cache is the mod's folder of the image.

    Args:
        name: of the kernel, for reports; no "-" in it.
        key: a digest of all that the cubin is made of.
        compile: makes it; its module tells the mod's package.
    """
    from triton import knobs

    file = f"{name}-{key}.cubin"
    kept = Path(knobs.cache.dir) / file
    came: Came = "image"
    if (image / mod / file).is_file():
        cubin = (image / mod / file).read_bytes()
    elif kept.is_file():
        came, cubin = "cached", kept.read_bytes()
    else:
        came, cubin = "compiled", compile()
        put(kept, cubin)
    if isinstance(knobs.compilation.listener, Listener):
        knobs.compilation.listener.note(compile.__module__.partition(".")[0], name, came)
    return cubin


def put(file: Path, data: bytes) -> None:
    """Write a file whole, for all to read: other workers read and write there, too, and an image's user is another."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f".{uuid.uuid4().hex}")
    with made.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(made, file)


def lead(folder: Path, cache: Path) -> None:
    """Let Triton's cache lead to the image's entries: only the lists of files are copied, whose paths are absolute.

    The cache is a volume that outlives the container. An entry of the same key that was compiled into it gives way, and
    a list whose files are gone (another image with this volume) is none to Triton.
    """
    for group in sorted(folder.glob("*/__grp__*.json")):
        put(cache / group.parent.name / group.name, group.read_bytes())


def entries(folder: Path) -> list[dict[str, Any]]:
    """Name, key and GPU of each kernel of a folder: those in Triton's layout by key, then cubins by name.

    Raises ValueError for an entry that Triton would not find: without a list of files, or with one that lies elsewhere;
    and for a cubin that is none.
    """
    found = []
    for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
        groups = list(entry.glob("__grp__*.json"))
        if len(groups) != 1:
            raise ValueError(f"{entry}: {len(groups)} lists of files, expected 1")
        files = [Path(path) for path in json.loads(groups[0].read_text(encoding="utf-8"))["child_paths"].values()]
        if strangers := [file for file in files if file.parent != entry or not file.is_file()]:
            raise ValueError(f"{groups[0]} names {strangers[0]}, expected files beside it")
        told = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".json"]
        if len(told) != 1:
            raise ValueError(f"{groups[0]} names {len(told)} files with what Triton knows of the kernel, expected 1")
        metadata = told[0]
        found.append({"name": metadata["name"], "key": entry.name, "arch": metadata["target"]["arch"]})
    for file in sorted(folder.glob("*.cubin")):
        name, _, key = file.stem.partition("-")
        try:
            found.append({"name": name, "key": key, "arch": architecture_of(file.read_bytes())})
        except ValueError as error:
            raise ValueError(f"{file} is {error}") from error
    return found


def architecture_of(cubin: bytes) -> int:
    """121 for 12.1, from the flags of the ELF file's header. Raises ValueError where there is none."""
    if len(cubin) < FLAGS_AT + 4 or not cubin.startswith(ELF):
        raise ValueError("no cubin")
    flags = int.from_bytes(cubin[FLAGS_AT : FLAGS_AT + 4], "little")
    return flags & 0xFF if cubin[8] <= OLD_ABI else flags >> 8 & 0xFF
