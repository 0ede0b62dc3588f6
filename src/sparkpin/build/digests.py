"""The digests that the project publishes, `pins/digests/<stack>.yaml`: what images its pins give, whoever builds them.

An entry holds for one build key. Where a pin, a mod or a stage was changed the key is another, and nothing is published
for it: that is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

from sparkpin.build.image import build_image
from sparkpin.build.make import fetch_for
from sparkpin.build.record import BuildRecord, read_record, record_file
from sparkpin.build.render import render_chain
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests, reading
from sparkpin.pins.schema import Sha256, StrictModel
from sparkpin.releases.record import Digest

FOLDER = "pins/digests"
HEAD = """\
# The images of these pins: build key, config digest, diff IDs of the layers that each stage adds.
# Written by `invoke lock --digests --stack {}` from images that it built; not to be edited.
images:
"""


class PublishedImage(StrictModel):
    """layers: those that the stage adds, by the name that each has in the Dockerfile, lowest first."""

    key: Sha256
    image: Digest
    layers: dict[str, Digest]


class Published(StrictModel):
    """images: by stage."""

    images: dict[str, PublishedImage]


@dataclass(frozen=True)
class Held:
    """An image beside the published one of its build key. difference: where they part, in words; "" where they do not.

    wanted: the published config digest.
    """

    wanted: str
    difference: str = ""


def file_of(stack: str) -> str:
    return f"{FOLDER}/{stack}.yaml"


def load(project: Path, stack: str) -> Published | None:
    """None where nothing is published of the stack. ManifestError for what is no such file."""
    path = project / file_of(stack)
    return reading.parse(Published, reading.read_yaml(path), path) if path.is_file() else None


class Keyed(Protocol):
    """An image of a chain, rendered or recorded."""

    @property
    def stage(self) -> str: ...
    @property
    def key(self) -> str: ...


def hold(published: Published | None, chain: Sequence[Keyed], image: str, diff_ids: Sequence[str]) -> Held | None:
    """The last image of a chain, by its config digest and diff IDs; None where nothing is published for its key."""
    known = published.images if published else {}
    entries = [known.get(one.stage) for one in chain]
    last = entries[-1]
    if last is None or last.key != chain[-1].key:
        return None
    if last.image == image:
        return Held(image)
    named = [
        (f"{name} of {one.stage}", diff_id)
        for one, entry in zip(chain, entries, strict=True)
        for name, diff_id in (entry.layers.items() if entry else ())
    ]
    for wanted, got in zip_longest(named, diff_ids):
        name, diff_id = wanted or ("one more than published", "none")
        if diff_id != got:
            return Held(
                last.image, f"the first layer that differs is {name}: published {diff_id}, here {got or 'none'}"
            )
    return Held(last.image, "each layer is the same, the configuration is another")


def publish(paths: Paths, engine: Engine, name: str, say: Say) -> int:
    """Write the file of a stack, of every stage: what is not built is. The number of images."""
    stack = manifests.load_stack(paths.project, name)
    lock = manifests.load_stack_lock(paths.project, stack)
    found: dict[str, PublishedImage] = {}
    for stage in sorted(path.stem for path in (paths.project / "stages").glob("*.yaml")):
        below = 0
        for image in render_chain(paths.project, stack, lock, manifests.load_chain(paths.project, stage)):
            if image.stage not in found:
                fetch_for(paths, engine, image, stack, lock)
                build_image(paths, engine, image, say)
            record = read_record(record_file(paths, image))
            found.setdefault(image.stage, entry_of(record, below))
            below = len(record.diff_ids)
    write(paths.project, name, found)
    return len(found)


def stale(project: Path, name: str, images: dict[str, PublishedImage]) -> list[str]:
    """The stages whose entries are of other pins, stages or mods than today's."""
    stack = manifests.load_stack(project, name)
    lock = manifests.load_stack_lock(project, stack)
    chains = {stage: manifests.load_chain(project, stage) for stage in images if is_stage(project, stage)}
    today = {stage: render_chain(project, stack, lock, chain)[-1].key for stage, chain in chains.items()}
    return [stage for stage, entry in images.items() if today.get(stage) != entry.key]


def is_stage(project: Path, name: str) -> bool:
    return (project / f"stages/{name}.yaml").is_file()


def take_out_stale(project: Path, name: str) -> list[str]:
    """From the file of a stack, which goes where nothing is left; nothing is built. The stages that it has no more."""
    published = load(project, name)
    images = published.images if published else {}
    gone = stale(project, name, images)
    if left := {stage: entry for stage, entry in images.items() if stage not in gone}:
        write(project, name, left)
    else:
        (project / file_of(name)).unlink(missing_ok=True)
    return gone


def write(project: Path, name: str, images: dict[str, PublishedImage]) -> None:
    with atomic_file(project / file_of(name)) as file:
        file.write("".join((HEAD.format(name), *rows(images))).encode())


def entry_of(record: BuildRecord, below: int) -> PublishedImage:
    """below: how many layers its parent has. What no tree of the Dockerfile made is `rootfs` or has a number."""
    own, named = record.diff_ids[below:], [layer.name for layer in record.layers if layer.diff_id]
    others = len(own) - len(named)
    names = ["rootfs"] if others == 1 and record.rootfs else [f"layer-{number}" for number in range(1, others + 1)]
    return PublishedImage(
        key=record.key, image=record.config_digest, layers=dict(zip([*names, *named], own, strict=True))
    )


def rows(images: dict[str, PublishedImage]) -> Iterator[str]:
    for stage, entry in images.items():
        yield f'  {stage}:\n    key: "{entry.key}"\n    image: {entry.image}\n    layers:'
        yield "".join(f"\n      {name}: {diff_id}" for name, diff_id in entry.layers.items()) or " {}"
        yield "\n"
