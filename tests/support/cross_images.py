"""The made-up project with a stack for another architecture, whose steps run in a native one."""

from __future__ import annotations

from pathlib import Path

import tiny_images
import yaml

from sparkpin.build import render, rootfs
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests, schema
from sparkpin.pins.schema import LockedDeb

CROSS_BASE = tiny_images.BASE.replace(
    "FROM {{ parent_ref }} AS venv",
    "ARG BUILDER={{ parent_ref }}\nFROM --platform=$BUILDPLATFORM $BUILDER AS venv",
)


def python_debs(version: str) -> list[LockedDeb]:
    names = ("dash", "python3.11-minimal", "libpython3.11-stdlib")
    return [LockedDeb(name=n, version=version, file=f"{n}.deb", size=1, sha256="a" * 64) for n in names]


def write_stack(project: Path, name: str, version: str = "3.11.2-6", **keys: object) -> schema.Stack:
    """A stack of the made-up project without wheels, and its lock."""
    data = yaml.safe_load(tiny_images.STACK) | keys
    data["python"]["layers"] = [{"name": "rest", "packages": ["*"]}]
    (project / f"pins/stacks/{name}.yaml").write_text(yaml.safe_dump(data))
    stack = manifests.load_stack(project, name)
    lock = schema.StackLock(stack=name, inputs=manifests.stack_inputs(stack), debs=python_debs(version), wheels=[])
    (project / f"pins/stacks/{name}.lock").write_text(manifests.lock_text(lock))
    return stack


def cross_paths(tmp_path: Path) -> Paths:
    project = tiny_images.make_project(tmp_path / "project")
    (project / "dockerfiles/base.j2").write_text(CROSS_BASE)
    write_stack(project, "native")
    write_stack(project, "far", platform="linux/arm64", build_on={"linux/amd64": "native"})
    return Paths(project, tmp_path / "cache", tmp_path / "home")


def stand_in(paths: Paths, stack: str, machine: str) -> rootfs.RootfsSpec:
    """The root file system that the steps of a stack's images run in on a machine."""
    return rootfs.rootfs_spec(*rootfs.native_stack(paths, manifests.load_stack(paths.project, stack), machine))


def chain_of(paths: Paths, name: str) -> tuple[render.RenderedImage, ...]:
    stack = manifests.load_stack(paths.project, name)
    lock = manifests.load_stack_lock(paths.project, stack)
    return render.render_chain(paths.project, stack, lock, manifests.load_chain(paths.project, "two"))
