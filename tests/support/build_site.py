"""A made-up project, its state folders and a real engine to build it with."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
import tiny_images
from heard import heard
from private_engine import remove_tags

from sparkpin.build import render, rootfs
from sparkpin.build.image import build_image
from sparkpin.build.record import RenderedImage
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.host.images import ImageInfo
from sparkpin.pins import manifests, schema


@dataclass(frozen=True)
class Site:
    """A project, its state folders and an engine."""

    paths: Paths
    engine: Engine
    stack: schema.Stack
    lock: schema.StackLock
    said: list[str]

    @classmethod
    def make(cls, folder: Path, engine: Engine, name: str = "tiny") -> Self:
        """name: of the stack, and of the package that its root file system has."""
        project = tiny_images.make_project(folder / "project", name)
        stack = manifests.load_stack(project, name)
        lock = tiny_images.stack_lock(stack)
        lock = lock.model_copy(update={"debs": [deb.model_copy(update={"name": name}) for deb in lock.debs]})
        python = stack.python.model_copy(update={"layers": stack.python.layers[1:]})
        paths = Paths(project, folder / "cache", folder / "home")
        return cls(paths, engine, stack.model_copy(update={"python": python}), lock, heard())

    def chain(self) -> tuple[RenderedImage, ...]:
        chain = manifests.load_chain(self.paths.project, "two")
        return render.render_chain(self.paths.project, self.stack, self.lock, chain)

    def build(self, image: RenderedImage) -> ImageInfo:
        return build_image(self.paths, self.engine, image)

    def build_all(self) -> list[ImageInfo]:
        return [self.build(image) for image in self.chain()]

    def made(self) -> list[str]:
        """The stages that were built, not found, since the last call."""
        found = [line.partition(":")[0] for line in self.said if re.search(r" in [\d.]+ s$", line)]
        self.said.clear()
        return found

    def forget_images(self, images: list[ImageInfo]) -> None:
        """Each is built again."""
        for image in reversed(images):
            for tag in image.tags:
                self.engine.untag(tag)

    def elsewhere(self, folder: Path) -> Site:
        """The same project and engine with state folders that know nothing."""
        return replace(self, paths=replace(self.paths, cache=folder / "cache", home=folder / "home"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site.make(tmp_path, Engine.connect(), f"test{uuid.uuid4().hex[:8]}")
    tar = tiny_images.make_rootfs(tmp_path / "rootfs.tar")
    monkeypatch.setattr(rootfs, "build_rootfs", lambda *args: tar)
    yield site
    remove_tags(site.engine, f"stack-{site.stack.name}")
    site.engine.untag(site.chain()[0].parent_ref)
