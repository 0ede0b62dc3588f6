"""What images these pins give, whoever builds them: the digests that the project publishes, and builders' statements.

pins/digests/<stack>.yaml               by stage: build key, config digest, diff IDs of the layers that it adds
pins/digests/builders/<name>.json       the statement of a release that somebody else built (their provenance.json)
pins/digests/builders/<name>.json.sig   their signature over it

An entry is of one build key. Where a pin, a mod or a stage was changed the key is another, and nothing is published for
it: that is no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sparkpin.build.image import build_image
from sparkpin.build.make import fetch_for
from sparkpin.build.record import BuildRecord, RenderedImage, read_record, record_file
from sparkpin.build.render import render_chain
from sparkpin.core.errors import IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.models import Sha256, StrictModel
from sparkpin.core.names import names_in
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count
from sparkpin.distribute import layout, signing
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.pins import manifests, reading
from sparkpin.releases.record import Digest

FOLDER = "pins/digests"
BUILDERS = f"{FOLDER}/builders"
Chain = Sequence[RenderedImage | BuildRecord]
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


def compare(published: Published | None, chain: Chain, image: str, diff_ids: Sequence[str]) -> Comparison | None:
    """The last image of a chain, by its config digest and diff IDs; None where nothing is published for its key."""
    known = published.images if published else {}
    last = known.get(chain[-1].stage)
    if last is None or last.key != chain[-1].key:
        return None
    if last.image == image:
        return Comparison(image)
    return Comparison(last.image, difference(known, chain, diff_ids))


def difference(known: Mapping[str, PublishedImage], chain: Chain, diff_ids: Sequence[str]) -> str:
    """The first layer of a chain's last image that is not the published one, in words."""
    entries = [(one.stage, known[one.stage]) for one in chain if one.stage in known]
    named = [(f"{name} of {stage}", diff_id) for stage, entry in entries for name, diff_id in entry.layers.items()]
    for expected, got in zip_longest(named, diff_ids):
        name, diff_id = expected or ("one more than published", "none")
        if diff_id != got:
            return f"the first layer that differs is {name}: published {diff_id}, here {got or 'none'}"
    return "each layer is the same, the configuration is another"


def publish(paths: Paths, engine: Engine, name: str) -> int:
    """Write the file of a stack, of every stage: what is not built is. The number of images."""
    stack = manifests.load_stack(paths.project, name)
    lock = manifests.load_stack_lock(paths.project, stack)
    found: dict[str, PublishedImage] = {}
    for stage in names_in(paths.project / "stages"):
        below = 0
        for image in render_chain(paths.project, stack, lock, manifests.load_chain(paths.project, stage)):
            if image.stage not in found:
                fetch_for(paths, engine, image, stack, lock)
                build_image(paths, engine, image)
            record = read_record(record_file(paths, image))
            found.setdefault(image.stage, entry_of(record, below))
            below = len(record.diff_ids)
    write(paths.project, name, found)
    return len(found)


def stale(project: Path, name: str, images: dict[str, PublishedImage]) -> list[str]:
    """The stages whose entries are of other pins, stages or mods than today's."""
    stack = manifests.load_stack(project, name)
    lock = manifests.load_stack_lock(project, stack)
    today = dict[str, str]()
    for stage in images:
        if (project / f"stages/{stage}.yaml").is_file():
            today[stage] = render_chain(project, stack, lock, manifests.load_chain(project, stage))[-1].key
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
        if not self.builders:
            return f"nobody else has confirmed this image yet: {BUILDERS}/ has no signed statement of it"
        who = f"{count(len(self.builders), 'builder')} ({', '.join(self.builders)})"
        return f"{who} signed that these pins gave them this image"


def read_statement(path: Path, allowed: Path | None) -> tuple[dict[str, str], signing.Signer]:
    """Build key -> config digest of the release that a builder's statement is about, and who signed it.

    UntrustedError for a stranger, IntegrityError for any other that does not count.
    """
    try:
        data = path.read_bytes()
        signer = signing.verify(data, path.with_name(f"{path.name}.sig").read_bytes(), allowed)
        value = json.loads(data)
        definition = value["predicate"]["buildDefinition"]
        key = definition["internalParameters"]["buildKeys"][definition["externalParameters"]["stage"]]
        (image,) = [row["digest"]["sha256"] for row in value["subject"] if row.get("mediaType") == oci.CONFIG_TYPE]
        return {key: f"sha256:{image}"}, signer
    except FileNotFoundError:
        raise IntegrityError("it is not signed") from None
    except layout.MISFITS as error:
        raise IntegrityError(f"no statement of a release: {type(error).__name__}") from None


def confirmations(project: Path, key: str, image: str, allowed: Path | None) -> Confirmations:
    """key: build key; image: the config digest that came out here. Who has several statements counts once."""
    builders, others, uncounted = dict[str, None](), dict[str, None](), list[str]()
    for path in sorted((project / BUILDERS).glob("*.json")):
        try:
            images, signer = read_statement(path, allowed)
            if key not in images:
                continue
            if signer.principal is None:
                raise IntegrityError(f"nothing says whose key it is: no {signing.places(signing.ALLOWED_SIGNERS)}")
            (builders if images[key] == image else others)[signer.principal] = None
        except SparkpinError as error:
            uncounted.append(f"{path.name}: {error.message}")
    return Confirmations(tuple(builders), tuple(others), tuple(uncounted))
