"""The bill of materials of a release: CycloneDX 1.6, JSON, the same bytes for the same release."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from sparkpin.distribute.materials import LISTED, Material
from sparkpin.distribute.provenance import bare
from sparkpin.releases.record import Release

SERIALS = uuid.uuid5(uuid.NAMESPACE_URL, "tag:sparkpin,2026:sbom")


def make_sbom(release: Release, materials: Sequence[Material]) -> bytes:
    bom = Bom(serial_number=serial_number(release))
    bom.metadata.timestamp = datetime.fromisoformat(release.created)
    root = Component(
        type=ComponentType.CONTAINER,
        name=release.tag,
        version=release.key[:12],
        bom_ref=release.tag,
        hashes=[sha256(bare(release.image))],
        properties=[
            Property(name=f"sparkpin:layer:{number:03}", value=diff_id)
            for number, diff_id in enumerate(release.diff_ids)
        ],
    )
    bom.metadata.component = root
    components = [package(material) for material in materials if material.kind in LISTED and material.kind != "model"]
    components += models([material for material in materials if material.kind == "model"])
    for component in components:
        bom.components.add(component)
    bom.register_dependency(root, components)
    for component in components:
        bom.register_dependency(component)
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def serial_number(release: Release) -> uuid.UUID:
    return uuid.uuid5(SERIALS, f"{release.key} {release.image} {release.created}")


def package(material: Material) -> Component:
    """A tool made the image and is not in it, and so the wheel of a model; what a layer above hides is there and cannot
    be reached."""
    is_tool, outside = material.kind == "tool", material.kind in ("tool", "gguf")
    return Component(
        type=ComponentType.APPLICATION if is_tool else ComponentType.LIBRARY,
        name=material.name,
        version=material.version or None,
        bom_ref=material.label,
        scope=ComponentScope.EXCLUDED if outside else ComponentScope.REQUIRED,
        hashes=[sha256(material.sha256)],
        purl=PackageURL.from_string(material.purl) if material.purl else None,
        properties=properties(kind=material.kind, stage=material.where),
    )


def models(files: Sequence[Material]) -> Iterator[Component]:
    """One component a repository, which holds one for each of its files."""
    for where, group in itertools.groupby(files, key=lambda file: file.where):
        own = list(group)
        repository, _, revision = where.rpartition("@")
        purl = PackageURL.from_string(own[0].purl) if own[0].purl else None
        yield Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=repository,
            version=revision,
            bom_ref=f"model {where}",
            purl=purl and PackageURL(purl.type, purl.namespace, purl.name, purl.version),
            properties=properties(kind="model"),
            components=[
                Component(
                    type=ComponentType.FILE,
                    name=file.name,
                    bom_ref=file.label,
                    hashes=[sha256(file.sha256)],
                    properties=properties(size=str(file.size)),
                )
                for file in own
            ],
        )


def properties(**values: str) -> list[Property]:
    return [Property(name=f"sparkpin:{name}", value=value) for name, value in values.items() if value]


def sha256(value: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=value)
