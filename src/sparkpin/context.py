"""A build's context as a folder: hard links into the store, wheels of the mods, requirements, tools."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sparkpin.epoch import EPOCH
from sparkpin.errors import IntegrityError
from sparkpin.files import disk_errors, sha256_file
from sparkpin.modwheels import build_wheel
from sparkpin.render import ContextFile, Rendered
from sparkpin.store import Store


@contextlib.contextmanager
def context_folder(work: Path, store: Store, rendered: Rendered) -> Iterator[Path]:
    """The folder, with the Dockerfile in it, for as long as the `with` block runs."""
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"context-{rendered.key[:12]}-", dir=work))
        try:
            fill(folder, store, rendered)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fill(folder: Path, store: Store, rendered: Rendered) -> None:
    put_text(folder / "Dockerfile", rendered.dockerfile)
    mods: dict[Path, list[str]] = defaultdict(list)
    for file in rendered.context:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.locked:
            store.link(file.locked, target)
            date(target, file.sha256)
        elif file.mod:
            wheel = build_wheel(file.mod, target.parent)
            sha256, _ = sha256_file(wheel)
            date(wheel, sha256)
            mods[target.parent].append(f"{file.mod.distribution}=={file.mod.version} --hash=sha256:{sha256}\n")
        elif file.origin:
            put_copy(target, file)
        else:
            put_text(target, file.text)
    for where, lines in mods.items():
        put_text(where / "requirements.txt", "".join(lines))


def put_text(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")
    date(target, sha256_file(target)[0])


def put_copy(target: Path, file: ContextFile) -> None:
    assert file.origin
    shutil.copyfile(file.origin, target)
    target.chmod(0o755 if file.executable else 0o644)
    sha256, size = sha256_file(target)
    if sha256 != file.sha256:
        raise IntegrityError.mismatch(
            str(file.origin),
            wanted_size=file.size,
            wanted_sha256=file.sha256,
            size=size,
            sha256=sha256,
            next_step="it changed since it was read: the same command again",
        )
    date(target, sha256)


def date(path: Path, sha256: str) -> None:
    """Date a file by its content, within two years of EPOCH.

    BuildKit sends a file again when its path, size or mtime is new. With one fixed mtime for all, a changed file of
    equal size (a requirement's next version, a mod's wheel) would not be sent, and the old one would be built.
    """
    moment = EPOCH * 10**9 + int(sha256[:14], 16)
    os.utime(path, ns=(moment, moment))
