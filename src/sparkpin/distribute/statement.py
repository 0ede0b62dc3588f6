"""The statement about a release, and its bill of materials.

In-toto Statement v1 with SLSA Provenance v1, which names every input with its hash, and CycloneDX 1.6. Both depend on
nothing but the release's record and the records of its builds: made again they are the same to the byte. Smoke tests
come later and are no part of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from google.protobuf.json_format import MessageToDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance  # type: ignore[import-untyped]
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor  # type: ignore[import-untyped]
from in_toto_attestation.v1.statement import Statement  # type: ignore[import-untyped]
from packageurl import PackageURL

from sparkpin.build.record import BuildRecord
from sparkpin.distribute.materials import LISTED, Material, ModelInputs, materials_of
from sparkpin.image import oci
from sparkpin.releases.record import SBOM, Release

PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "tag:sparkpin,2026:build/v1"  # of the form of statement and SBOM: `verify` wants both exactly as made here
PASSING = {"seconds", "size", "layers"}  # of a build record: another build of the same image may say otherwise
BUILDER = "tag:sparkpin,2026:builder/local"  # the machine of whoever signs
SERIALS = uuid.uuid5(uuid.NAMESPACE_URL, "tag:sparkpin,2026:sbom")


@dataclass(frozen=True)
class Attested:
    """What is said of a release."""

    sbom: bytes
    statement: bytes

    @classmethod
    def of(cls, release: Release, records: Sequence[BuildRecord], models: ModelInputs) -> Attested:
        """IntegrityError, ValueError, OverflowError where nothing can be made of what a stranger says."""
        materials = materials_of(release, records, models)
        sbom = make_sbom(release, materials)
        return cls(sbom, make_statement(release, records, materials, sbom))


def make_statement(
    release: Release, records: Sequence[BuildRecord], materials: Sequence[Material], sbom: bytes
) -> bytes:
    """As JSON."""
    predicate = Provenance()
    definition, details = predicate.build_definition, predicate.run_details
    definition.build_type = BUILD_TYPE
    served = {name: getattr(release, name) for name in ("recipe", "stage", "stack", "model", "env")}
    definition.external_parameters.update(served | {"argv": list(release.argv)})
    built = {name: getattr(records[-1], name) for name in ("platform", "epoch", "seal")}
    keys = {"releaseKey": release.key, "checkpointKey": release.checkpoint_key}
    definition.internal_parameters.update(built | keys | {"buildKeys": {one.stage: one.key for one in records}})
    definition.resolved_dependencies.extend(dependency(material) for material in materials)
    details.builder.id = BUILDER
    details.metadata.finished_on.FromJsonString(release.created)
    details.byproducts.append(resource(SBOM, hashlib.sha256(sbom).hexdigest(), "application/vnd.cyclonedx+json"))
    for record in records:
        fields = record.model_dump(
            mode="json", by_alias=True, exclude_unset=True, exclude=PASSING
        )  # as its file has it
        data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        details.byproducts.append(resource(f"build record {record.stage}", hashlib.sha256(data).hexdigest()))
    statement = Statement(list(subjects(release, records)), PREDICATE, MessageToDict(predicate))
    statement.validate()
    value = MessageToDict(statement.pb)
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def subjects(release: Release, records: Sequence[BuildRecord]) -> Iterator[Any]:
    """The image, then its layers, lowest first."""
    names = {layer.diff_id: layer.name for record in records for layer in record.layers}
    names[release.diff_ids[0]] = "rootfs"
    yield resource(release.tag, bare(release.image), oci.CONFIG_TYPE)
    for number, diff_id in enumerate(release.diff_ids):
        yield resource(f"layer {number} {names.get(diff_id, '')}".rstrip(), bare(diff_id), oci.LAYER_TYPE)


def bare(digest: str) -> str:
    return digest.removeprefix("sha256:")


def dependency(material: Material) -> Any:
    notes = {"kind": material.kind, "size": material.size, "where": material.where}
    known = {name: value for name, value in notes.items() if value not in (None, "")}
    return resource(material.label, material.sha256, uri=material.purl, annotations=known)


def resource(name: str, sha256: str, media_type: str = "", **more: Any) -> Any:
    return ResourceDescriptor(name=name, digest={"sha256": sha256}, media_type=media_type, **more).pb


def make_sbom(release: Release, materials: Sequence[Material]) -> bytes:
    bom = Bom(serial_number=uuid.uuid5(SERIALS, f"{release.key} {release.image} {release.created}"))
    bom.metadata.timestamp = datetime.fromisoformat(release.created)
    layers = {f"layer:{number:03}": diff_id for number, diff_id in enumerate(release.diff_ids)}
    root = Component(
        type=ComponentType.CONTAINER,
        name=release.tag,
        version=release.key[:12],
        bom_ref=release.tag,
        hashes=[hashed(bare(release.image))],
        properties=properties(**layers),
    )
    bom.metadata.component = root
    components = [package(material) for material in materials if material.kind in LISTED and material.kind != "model"]
    components += models([material for material in materials if material.kind == "model"])
    bom.components = components
    brought = [Dependency(component.bom_ref) for component in components]
    bom.dependencies = [Dependency(root.bom_ref, brought), *brought]
    return (JsonV1Dot6(bom).output_as_string(indent=1) + "\n").encode()


def package(material: Material) -> Component:
    """A tool made the image and is not in it, and so the wheel of a model; what a layer above hides is there and cannot
    be reached."""
    return Component(
        type=ComponentType.APPLICATION if material.kind == "tool" else ComponentType.LIBRARY,
        name=material.name,
        version=material.version or None,
        bom_ref=material.label,
        scope=ComponentScope.EXCLUDED if material.kind in ("tool", "gguf") else ComponentScope.REQUIRED,
        hashes=[hashed(material.sha256)],
        purl=PackageURL.from_string(material.purl) if material.purl else None,
        properties=properties(kind=material.kind, stage=material.where),
    )


def models(files: Sequence[Material]) -> Iterator[Component]:
    """One component a repository, which holds one for each of its files."""
    for where, group in itertools.groupby(files, key=lambda file: file.where):
        members = list(group)
        repository, _, revision = where.rpartition("@")
        purl = PackageURL.from_string(members[0].purl) if members[0].purl else None
        yield Component(
            type=ComponentType.MACHINE_LEARNING_MODEL,
            name=repository,
            version=revision,
            bom_ref=f"model {where}",
            purl=purl and PackageURL(purl.type, purl.namespace, purl.name, purl.version),
            properties=properties(kind="model"),
            components=[model_file(file) for file in members],
        )


def model_file(file: Material) -> Component:
    return Component(
        type=ComponentType.FILE,
        name=file.name,
        bom_ref=file.label,
        hashes=[hashed(file.sha256)],
        properties=properties(size=str(file.size)),
    )


def properties(**values: str) -> list[Property]:
    return [Property(name=f"sparkpin:{name}", value=value) for name, value in values.items() if value]


def hashed(sha256: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=sha256)
