"""Releases of a tiny project, built for real in an engine of the tests' own, to be carried to others."""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_images
from fake_image import image_tar
from places import PROJECT
from private_engine import private_engine

from sparkpin.build import make, rootfs
from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.distribute.signing import ensure_attested
from sparkpin.fetch import model as hub
from sparkpin.host.engine import Engine
from sparkpin.image.layer_tar import read_layer
from sparkpin.pins import manifests
from sparkpin.releases.record import Release

CHECKOUT = PROJECT
NAME = "carried"
BASE = """\
description: made up
parent: null
template: base.j2
checkpoint: copy
smoke: {checks: [completion, mods]}
"""


@dataclass(frozen=True)
class Source:
    """Where the releases were made; first stage first."""

    paths: Paths
    engine: Engine
    releases: tuple[Release, ...]

    @property
    def release(self) -> Release:
        return self.releases[-1]

    def elsewhere(self, folder: Path) -> Paths:
        """State folders of a machine that knows nothing, with this very checkout, which has no such recipe."""
        return Paths(CHECKOUT, folder / "cache", folder / "home")


@contextlib.contextmanager
def engine_with_url() -> Iterator[tuple[Engine, str]]:
    with private_engine() as engine:
        yield engine, engine.host["DOCKER_HOST"]


@contextlib.contextmanager
def carried_release(folder: Path, *, python: bool = False) -> Iterator[Source]:
    """Stages base -> one -> two of the scripted model: everything is real but the root file system's packages.

    python: this Python is in it, too, and the user's home.
    """
    paths = tiny_images.whole(folder, NAME, b"no package")
    project = paths.project
    use_scripted_model(project)
    tar = tiny_images.make_rootfs(folder / "rootfs.tar")
    if python:
        append(tar, image_tar())
    tar.write_bytes(b"".join(read_layer(io.BytesIO(tar.read_bytes()), everything=True).chunks()))  # as a real one is
    with pytest.MonkeyPatch.context() as patch, engine_with_url() as (engine, _):
        patch.setattr(rootfs, "build_rootfs", lambda *args: tar)
        pairing = (pairings := pair(project, NAME))[-1]
        made = []
        for release in make.build_releases(paths, engine, pairings):
            ensure_attested(paths, release)
            made.append(release)
        hub.fetch_model(paths, pairing.model, pairing.model_lock, only=["int4"])
        yield Source(paths, engine, tuple(made))


def append(tar: Path, more: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(more)) as added, tarfile.open(tar, "a") as whole:
        for member in added:
            whole.addfile(member, added.extractfile(member) if member.isfile() else None)


def use_scripted_model(project: Path) -> None:
    pins = project / "pins/models"
    for path in pins.iterdir():
        path.unlink()
    for end in ("yaml", "lock"):
        shutil.copy(CHECKOUT / f"pins/models/scripted-tiny.{end}", pins)
    model = manifests.load_model(project, "scripted-tiny")
    base = model.repositories[model.base]
    recipe = project / f"recipes/{NAME}.yaml"
    lines = [
        f"model: {base.repo}"
        if line.startswith("model:")
        else f'model_revision: "{base.revision}"'
        if line.startswith("model_revision:")
        else line
        for line in recipe.read_text().splitlines()
    ]
    recipe.write_text("\n".join(lines) + "\n")
    tiny_images.write(project / "stages/base.yaml", BASE)
