"""What images these pins give, whoever builds them: the digests that the project publishes, and builders' statements.

pins/digests/<stack>.yaml               by stage: build key, config digest, diff IDs of the layers that it adds
pins/digests/builders/<name>.json       build keys, each with the config digest and diff IDs that came out
pins/digests/builders/<name>.json.sig   the builder's signature over it, in a namespace of its own

An entry is of one build key. Where a pin, a mod or a stage was changed the key is another, and nothing is published for
it: that is no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from sparkpin.build.consistent import is_from_elsewhere
from sparkpin.build.image import build_image
from sparkpin.build.make import fetch_for
from sparkpin.build.record import BuildRecord, RenderedImage, read_record, record_file, records_of
from sparkpin.build.render import render_chain
from sparkpin.core.errors import InputError, IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say, count
from sparkpin.distribute import signing
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests, reading
from sparkpin.pins.schema import Sha256, StrictModel
from sparkpin.releases.record import Digest, Release

FOLDER = "pins/digests"
BUILDERS = f"{FOLDER}/builders"
NAMESPACE = "sparkpin-builder"  # who may say what came out need not be who may sign a release
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
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
class Comparison:
    """An image and the published one of its build key. published: that one's config digest; difference: the first of
    the layers that differs, in words; "" where nothing does.
    """

    published: str
    difference: str = ""


def file_of(stack: str) -> str:
    return f"{FOLDER}/{stack}.yaml"


def load(project: Path, stack: str) -> Published | None:
    """None where nothing is published of the stack. ManifestError for what is no such file."""
    path = project / file_of(stack)
    return reading.parse(Published, reading.read_yaml(path), path) if path.is_file() else None


def compare(
    published: Published | None,
    chain: Sequence[RenderedImage | BuildRecord],
    image: str,
    diff_ids: Sequence[str],
) -> Comparison | None:
    """The last image of a chain, by its config digest and diff IDs; None where nothing is published for its key."""
    known = published.images if published else {}
    entries = [known.get(one.stage) for one in chain]
    last = entries[-1]
    if last is None or last.key != chain[-1].key:
        return None
    if last.image == image:
        return Comparison(image)
    named = [
        (f"{name} of {one.stage}", diff_id)
        for one, entry in zip(chain, entries, strict=True)
        for name, diff_id in (entry.layers.items() if entry else ())
    ]
    for expected, got in zip_longest(named, diff_ids):
        name, diff_id = expected or ("one more than published", "none")
        if diff_id != got:
            difference = f"the first layer that differs is {name}: published {diff_id}, here {got or 'none'}"
            return Comparison(last.image, difference)
    return Comparison(last.image, "each layer is the same, the configuration is another")


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
    stages = [stage for stage in images if (project / f"stages/{stage}.yaml").is_file()]
    today = {
        stage: render_chain(project, stack, lock, manifests.load_chain(project, stage))[-1].key for stage in stages
    }
    return [stage for stage, entry in images.items() if today.get(stage) != entry.key]


def remove_stale(project: Path, name: str) -> list[str]:
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
    added, named = record.diff_ids[below:], [layer.name for layer in record.layers if layer.diff_id]
    others = len(added) - len(named)
    names = ["rootfs"] if others == 1 and record.rootfs else [f"layer-{number}" for number in range(1, others + 1)]
    layers = dict(zip([*names, *named], added, strict=True))
    return PublishedImage(key=record.key, image=record.config_digest, layers=layers)


def rows(images: dict[str, PublishedImage]) -> Iterator[str]:
    for stage, entry in images.items():
        yield f'  {stage}:\n    key: "{entry.key}"\n    image: {entry.image}\n    layers:'
        yield "".join(f"\n      {name}: {diff_id}" for name, diff_id in entry.layers.items()) or " {}"
        yield "\n"


class BuiltImage(StrictModel):
    """What came out of one build."""

    stack: str
    stage: str
    image: Digest
    layers: list[Digest]


class Statement(StrictModel):
    """images: by build key."""

    statement: Literal["built"] = "built"
    builder: str
    images: dict[Sha256, BuiltImage]


@dataclass(frozen=True)
class Confirmations:
    """What builders say of one build key. builders: those that are trusted and have the same image; others: those that
    are trusted and have another; uncounted: why a statement does not count.
    """

    builders: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        names = f" ({', '.join(self.builders)})" if self.builders else ""
        return f"confirmed by {count(len(self.builders), 'builder') if self.builders else 'no builder yet'}{names}"


def confirm(paths: Paths, release: Release, name: str, key: Path | None) -> Path:
    """Add a release and what it stands on to a builder's statement, and sign it. The statement's file."""
    if not NAME.fullmatch(name):
        form = "up to 64 lower-case letters, digits, `.` and `-`, first a letter or a digit"
        raise InputError(f"--builder: got {name!r}, expected {form}", next_step="choose another name: --builder my-lab")
    if key is None:
        step = f"name a key in {signing.places(signing.SIGNING_KEY)}"
        raise InputError("a builder's statement is signed, and there is no key", next_step=step)
    if is_from_elsewhere(paths, release):
        raise InputError(
            f"{release.tag}: a bundle brought it, and a builder states what was built here",
            next_step=f"invoke build --recipe {release.recipe} --stage {release.stage}",
        )
    path = paths.project / BUILDERS / f"{name}.json"
    old = read_statement(path) if path.is_file() else None
    images = dict(old[0].images) if old else {}
    for one in records_of(paths, release):
        images[one.key] = BuiltImage(stack=one.stack, stage=one.stage, image=one.config_digest, layers=one.diff_ids)
    statement = Statement(builder=name, images=images).model_dump(mode="json")
    data = json.dumps(statement, indent=1, sort_keys=True).encode() + b"\n"
    signature = signing.sign(data, key, NAMESPACE)
    if old and old[1] != signing.verify(data, signature, None, NAMESPACE):
        raise InputError(f"{path} is signed with another key: {old[1]}", next_step="choose another --builder name")
    for file, content in ((path, data), (signature_of(path), signature)):
        with atomic_file(file) as out:
            out.write(content)
    return path


def signature_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sig")


def read_statement(path: Path, allowed: Path | None = None) -> tuple[Statement, signing.Signer]:
    """A statement that is signed, and by whom. IntegrityError for any other; UntrustedError as `signing.verify`."""
    try:
        data = path.read_bytes()
        signer = signing.verify(data, signature_of(path).read_bytes(), allowed, NAMESPACE)
        statement = Statement.model_validate_json(data)
        if statement.builder != path.stem:
            raise IntegrityError(f"got builder {statement.builder!r}, expected {path.stem!r}")
        return statement, signer
    except signing.UntrustedError:
        raise
    except FileNotFoundError:
        fault = "it is not signed"
    except ValidationError as error:
        fault = f"no builder's statement: {error.errors()[0]['msg']}"
    except IntegrityError as error:
        fault = error.message
    step = f"get {path.name} and {path.name}.sig from its builder again, or remove both"
    raise IntegrityError(f"{path}: {fault}", next_step=step)


def confirmations(project: Path, key: str, image: str, allowed: Path | None) -> Confirmations:
    """key: build key; image: the config digest that came out here. Who has several keys or files counts once."""
    builders, others, uncounted = dict[str, None](), dict[str, None](), list[str]()
    for path in sorted((project / BUILDERS).glob("*.json")):
        try:
            statement, signer = read_statement(path, allowed)
        except SparkpinError as error:
            uncounted.append(f"{path.name}: {error.message.removeprefix(f'{path}: ')}")
            continue
        if (built := statement.images.get(key)) is None:
            continue
        if signer.principal is None:
            uncounted.append(f"{path.name}: whose key it is nobody says: no {signing.places(signing.ALLOWED_SIGNERS)}")
        else:
            (builders if built.image == image else others)[signer.principal] = None
    return Confirmations(tuple(builders), tuple(others), tuple(uncounted))
