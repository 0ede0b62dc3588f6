"""Which of the engine's internal images this home has made or brought: homes share an engine, and each removes its own.

A build record tells it of what is finished. While a build runs, and after it was killed, a note does:
SPARKPIN_HOME/begun/<stack>-<stage>-<key12>.json: {"refs": [...]}
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from sparkpin.build.record import read_record, record_file
from sparkpin.build.render import RenderedImage
from sparkpin.core import files
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import rootfs_ref, unsealed_ref


def begun(paths: Paths, rendered: RenderedImage) -> None:
    """Note what a build is about to make. A build that ends without a record leaves its note."""
    below = [rendered.parent_ref] if rendered.rootfs else []
    refs = [rendered.ref, unsealed_ref(rendered.stage, rendered.key), *below]
    note = note_file(paths, rendered)
    with files.lock(note.parent / ".lock"):
        files.sweep(note.parent)  # nobody writes there without this lock
        files.write_json(note, {"refs": refs})


def recorded(paths: Paths, rendered: RenderedImage) -> None:
    note_file(paths, rendered).unlink(missing_ok=True)


def note_file(paths: Paths, rendered: RenderedImage) -> Path:
    return paths.home / "begun" / record_file(paths, rendered).name


def notes(paths: Paths) -> dict[Path, frozenset[str]]:
    """Note of a build -> names of the images that it makes. A note that cannot be read names none."""
    found = {}
    for path in sorted((paths.home / "begun").glob("[!.]*.json")):
        try:
            found[path] = frozenset(map(str, json.loads(path.read_text(encoding="utf-8"))["refs"]))
        except FileNotFoundError:  # a build has just ended
            continue
        except (OSError, ValueError, KeyError, TypeError):
            found[path] = frozenset()
    return found


def made_here(paths: Paths) -> frozenset[str]:
    """Names of the stages' images and root file systems that this home built, imported or began to build."""
    refs: set[str] = set().union(*notes(paths).values())
    for path in paths.images.glob("*.json"):
        with contextlib.suppress(IntegrityError, ManifestError, FileNotFoundError):
            record = read_record(path)
            refs |= {record.ref, *([record.parent_ref] if record.rootfs else [])}
            refs |= {rootfs_ref(record.builder.suite, record.builder.key)} if record.builder else set()
    return frozenset(refs)
