"""A build's context as a folder: hard links into the stores, wheels of the mods, requirements, tools."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sparkpin.build.context_files import ContextFile
from sparkpin.build.record import BuildInput
from sparkpin.build.render import RenderedImage
from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import disk_errors, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.pins.mods import build_wheel
from sparkpin.releases.kept_inputs import KeptInputs


@contextlib.contextmanager
def context_folder(paths: Paths, rendered: RenderedImage) -> Iterator[tuple[Path, tuple[BuildInput, ...]]]:
    """What the builder sees, for as long as the `with` block runs; and its files, but the Dockerfile, for the record.

    What no lock names of them is kept for later builds.
    """
    with disk_errors(paths.work):
        paths.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"context-{rendered.key[:12]}-", dir=paths.work))
        try:
            yield folder, fill(folder, KeptInputs.of(paths), rendered)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def fill(folder: Path, inputs: KeptInputs, rendered: RenderedImage) -> tuple[BuildInput, ...]:
    put_text(folder / "Dockerfile", rendered.dockerfile)
    mods: dict[Path, list[str]] = defaultdict(list)
    made: list[tuple[Path, str]] = []
    files: list[BuildInput] = []
    for file in rendered.context:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.locked:
            if file.executable:  # a link would share its mode with the store
                shutil.copyfile(inputs.holding(file.locked).verified(file.locked), target)
                target.chmod(0o755)
            else:
                inputs.holding(file.locked).link(file.locked, target)
            date(target, file.sha256)
            files.append(row(file))
        elif file.mod:
            wheel = build_wheel(file.mod, target.parent)
            sha256, _ = sha256_file(wheel)
            date(wheel, sha256)
            mods[target.parent].append(f"{file.mod.distribution}=={file.mod.version} --hash=sha256:{sha256}\n")
            made.append((wheel, file.what))
        elif file.origin:
            put_copy(target, file)
            files.append(row(file))
            inputs.keep(target, file.sha256, file.size)
        else:
            put_text(target, file.text)
            made.append((target, file.what))
    for where, lines in mods.items():
        put_text(where / "requirements.txt", "".join(lines))
        made.append((where / "requirements.txt", "list of wheels"))
    for path, what in made:
        sha256, size = sha256_file(path)
        inputs.keep(path, sha256, size)
        files.append(BuildInput(path=path.relative_to(folder).as_posix(), sha256=sha256, size=size, what=what))
    return tuple(sorted(files, key=lambda file: file.path))


def row(file: ContextFile) -> BuildInput:
    return BuildInput(path=file.path, sha256=file.sha256, size=file.size, executable=file.executable, what=file.what)


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
            expected_size=file.size,
            expected_sha256=file.sha256,
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
