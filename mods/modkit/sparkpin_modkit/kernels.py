"""At run time: a mod's Triton kernels come from the image, and the log says whether they did.

The folder that `sparkpin_modkit.ahead` filled at image build is laid out as Triton's own cache, under the keys that
Triton computes from a kernel's source, its specialisation, the compiler and ptxas. Only Triton decides whether an entry
fits, so a kernel that does not is compiled as ever; what this module adds is that nobody has to believe that none was.

Read in Triton 3.6.0 and 3.8.0 (runtime/cache.py, runtime/jit.py, compiler/compiler.py, knobs.py).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin_modkit.reports import report

IMAGE = Path("/opt/sparkpin/kernels")
"""One folder for each mod that has kernels in the image."""
MANIFEST = "kernels.json"


@dataclass
class Seen:
    """What Triton did for the kernels of a warm-up. Names; a kernel has one for each specialisation.

    image: found in the image; cached: found in Triton's cache, from an earlier start; compiled: made now.
    """

    image: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    compiled: list[str] = field(default_factory=list)


def warm(mod: str, warm_up: Callable[[], object], image: Path = IMAGE) -> Seen:
    """Load all kernels that a mod may launch, before the first request, and report where they came from.

    Writes ``{"mod":..,"event":"kernels","total":12,"image":12,"cached":0,"compiled":[]}``; from then on each kernel of
    the mod's package that Triton compiles in this process is reported as event "compiled".

    Args:
        mod: name of the mod, as in ``mods/<name>``.
        warm_up: the mod's entry point of the group ``sparkpin.kernels``.
        image: where the image has its kernels; a parameter for tests.
    """
    from triton import knobs

    package = warm_up.__module__.partition(".")[0]
    folder = image / mod
    lead(folder, Path(knobs.cache.dir))
    seen, before = Seen(), knobs.compilation.listener

    def during(**event: Any) -> None:
        name, files = event["src"].name, event["metadata_group"].values()
        if not event["cache_hit"]:
            seen.compiled.append(name)
        elif all(folder in Path(file).parents for file in files):
            seen.image.append(name)
        else:
            seen.cached.append(name)
        if before is not None:
            before(**event)

    def afterwards(**event: Any) -> None:
        module = getattr(getattr(event["src"], "fn", None), "__module__", None) or ""
        if not event["cache_hit"] and module.partition(".")[0] == package:
            report(mod, "compiled", kernel=event["src"].name)
        if before is not None:
            before(**event)

    knobs.compilation.listener = during
    try:
        warm_up()
    finally:
        knobs.compilation.listener = afterwards
    total = len(seen.image) + len(seen.cached) + len(seen.compiled)
    report(mod, "kernels", total=total, image=len(seen.image), cached=len(seen.cached), compiled=seen.compiled)
    return seen


def lead(folder: Path, cache: Path) -> None:
    """Let Triton's cache lead to the image's entries: only the lists of files are copied, whose paths are absolute.

    The cache is a volume that outlives the container. An entry of the same key that was compiled into it gives way, and
    a list whose files are gone (another image with this volume) is none to Triton.
    """
    for group in sorted(folder.glob("*/__grp__*.json")):
        target, data = cache / group.parent.name / group.name, group.read_bytes()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".lead-", delete=False) as file:
            file.write(data)
        os.replace(file.name, target)  # other workers read and write here, too


def entries(folder: Path) -> list[dict[str, Any]]:
    """The kernels of a folder in Triton's layout, by key: name, key, and the GPU they are for.

    Raises ValueError for an entry that Triton would not find: without a list of files, or with one that lies elsewhere.
    """
    found = []
    for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
        groups = list(entry.glob("__grp__*.json"))
        if len(groups) != 1:
            raise ValueError(f"{entry}: {len(groups)} lists of files, wanted 1")
        files = [Path(path) for path in json.loads(groups[0].read_text(encoding="utf-8"))["child_paths"].values()]
        if strangers := [file for file in files if file.parent != entry or not file.is_file()]:
            raise ValueError(f"{groups[0]} names {strangers[0]}, wanted files beside it")
        (metadata,) = (json.loads(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".json")
        found.append({"name": metadata["name"], "key": entry.name, "arch": metadata["target"]["arch"]})
    return found
