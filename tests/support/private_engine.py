"""A Docker engine of the tests' own, and images made in it from nothing.

The machine's engine holds other people's images; what prune may remove must not be tried out on them.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkpin.core.paths import Paths
from sparkpin.host import private_engine as engines
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.host.machine import SYSTEM_PATH
from sparkpin.image.archive import Slice


@contextlib.contextmanager
def engine_folder() -> Iterator[Path]:
    """Where a private engine may live: a short path, since sockets lie below it."""
    if os.geteuid() != 0 or shutil.which("dockerd", path=SYSTEM_PATH) is None:
        pytest.skip("needs root and dockerd (apt-get install docker.io) to start an engine of its own")
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def private_engine(data_root: Path | None = None, **options: Any) -> Iterator[Engine]:
    with engine_folder() as folder, engines.private_engine(folder, data_root, **options) as engine:
        yield engine


def file_layer(name: str, content: bytes) -> bytes:
    """The tar of a layer that holds one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def content_of(tar: tarfile.TarFile, name: str) -> bytes:
    found = tar.extractfile(name)
    assert found is not None
    return found.read()


def load_image(engine: Engine, ref: str, layers: list[bytes]) -> ImageInfo:
    """Load a sealed image of the given layers, lowest first."""
    parts = [Slice(io.BytesIO(layer), 0, len(layer)) for layer in layers]
    engine.load_sealed(parts, {}, os="linux", architecture="amd64", tag=ref)
    engine.tag(ref, ref)  # which the engine dates
    image = engine.image(ref)
    assert image is not None
    return image


def sleeper() -> bytes:
    """A tar with `sleep` and the libraries that it needs: an image that can run."""
    listed = subprocess.run(["ldd", "/bin/sleep"], capture_output=True, text=True, check=True).stdout
    names = {"/bin/sleep", *(word for word in listed.split() if word.startswith("/"))}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for name in sorted(names):
            tar.add(name)
    return buffer.getvalue()


def remove_tags(engine: Engine, repository: str) -> None:
    """The tags of `sparkpin/<repository>`; the images under them may have others, which stay."""
    for tag in tags_in(engine):
        if tag.startswith(f"sparkpin/{repository}:"):
            engine.untag(tag)


def remove_built(engine: Engine, paths: Paths, recipe: str) -> None:
    """The tags of a recipe, and of the root file systems that its images stand on."""
    records = [path.read_text() for path in paths.images.glob("*-base-*.json")]
    for tag in tags_in(engine):
        if recipe in tag or (tag.startswith("sparkpin/rootfs:") and any(tag in text for text in records)):
            engine.untag(tag)


def tags_in(engine: Engine) -> list[str]:
    """All tags. docker-py's images.list() asks for each image, too, which another test may remove meanwhile."""
    return [tag for image in engine.client.api.images() for tag in image["RepoTags"] or () if tag != "<none>:<none>"]
