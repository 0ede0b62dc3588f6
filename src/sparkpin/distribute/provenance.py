"""The statement about a release: in-toto Statement v1 with SLSA Provenance v1, which names every input with its hash.

It depends on nothing but the release's record and the records of its builds: made again it is the same to the byte.
Smoke tests come later and are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance  # type: ignore[import-untyped]
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor  # type: ignore[import-untyped]
from in_toto_attestation.v1.statement import Statement  # type: ignore[import-untyped]

from sparkpin.build.record import BuildRecord
from sparkpin.distribute.materials import Material, raw_sha256
from sparkpin.releases.record import SBOM, Release

PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "tag:sparkpin,2026:build/v1"  # of the form of statement and SBOM: `verify` wants both exactly as made here
BUILDER = "tag:sparkpin,2026:builder/local"  # the machine of whoever signs
CONFIG_TYPE, LAYER_TYPE = "application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"
SBOM_TYPE = "application/vnd.cyclonedx+json"


def subjects_of(release: Release, records: Sequence[BuildRecord]) -> dict[str, str]:
    names = {layer.diff_id: layer.name for record in records for layer in record.layers}
    names[release.diff_ids[0]] = "rootfs"
    layers = {
        f"layer {number} {names.get(diff_id, '')}".rstrip(): bare(diff_id)
        for number, diff_id in enumerate(release.diff_ids)
    }
    return {release.tag: bare(release.image), **layers}


def bare(digest: str) -> str:
    return digest.removeprefix("sha256:")


def make_statement(
    release: Release, records: Sequence[BuildRecord], materials: Sequence[Material], sbom: bytes
) -> bytes:
    """As JSON. OverflowError for a number of a stranger that none can hold."""
    predicate = Provenance()
    definition, details = predicate.build_definition, predicate.run_details
    definition.build_type = BUILD_TYPE
    definition.external_parameters.update(
        {
            "recipe": release.recipe,
            "stage": release.stage,
            "stack": release.stack,
            "model": release.model,
            "argv": list(release.argv),
            "env": release.env,
        }
    )
    definition.internal_parameters.update(
        {
            "releaseKey": release.key,
            "checkpointKey": release.checkpoint_key,
            "buildKeys": {record.stage: record.key for record in records},
            "platform": records[-1].platform,
            "epoch": records[-1].epoch,
            "seal": records[-1].seal,
        }
    )
    definition.resolved_dependencies.extend(dependency(material) for material in materials)
    details.builder.id = BUILDER
    details.metadata.finished_on.FromJsonString(release.created)
    details.byproducts.append(resource(SBOM, hashlib.sha256(sbom).hexdigest(), SBOM_TYPE))
    for record in records:
        said = record.model_dump(mode="json", by_alias=True, exclude_unset=True)  # as it was read from its file
        details.byproducts.append(resource(f"build record {record.stage}", raw_sha256(said)))
    subjects = [
        resource(name, sha256, CONFIG_TYPE if name == release.tag else LAYER_TYPE)
        for name, sha256 in subjects_of(release, records).items()
    ]
    statement = Statement(subjects, PREDICATE, MessageToDict(predicate))
    statement.validate()
    value = MessageToDict(statement.pb)
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def dependency(material: Material) -> Any:
    notes: dict[str, Any] = {"kind": material.kind}
    if material.size is not None:
        notes["size"] = material.size
    if material.where:
        notes["where"] = material.where
    return resource(material.label, material.sha256, uri=material.purl, annotations=notes)


def resource(name: str, sha256: str, media_type: str = "", **more: Any) -> Any:
    return ResourceDescriptor(name=name, digest={"sha256": sha256}, media_type=media_type, **more).pb
