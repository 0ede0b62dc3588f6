"""The bill of materials: valid CycloneDX, whole, and the same bytes for the same release."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from evidence_samples import Sample, make_sample

from sparkpin.distribute.materials import Material, materials_of, model_inputs
from sparkpin.distribute.statement import make_sbom
from sparkpin.releases.kept_inputs import project_of


def materials(sample: Sample) -> tuple[Material, ...]:
    with project_of(sample.paths, sample.release) as project:
        return materials_of(sample.release, sample.records, model_inputs(project, sample.release))


@pytest.fixture(scope="module")
def sbom(sample: Sample) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(make_sbom(sample.release, materials(sample)))
    return value


def test_root_is_the_image(sample: Sample, sbom: dict[str, Any]) -> None:
    root = sbom["metadata"]["component"]
    assert (root["type"], root["name"], root["version"]) == ("container", sample.release.tag, sample.release.key[:12])
    assert root["hashes"] == [{"alg": "SHA-256", "content": sample.release.image.removeprefix("sha256:")}]
    assert [row["value"] for row in root["properties"]] == list(sample.release.diff_ids)


def test_every_package_is_in_it_with_its_hash(sample: Sample, sbom: dict[str, Any]) -> None:
    found = {(row["name"], row.get("version", ""), row.get("hashes", [{}])[0].get("content")) for row in flat(sbom)}
    for record in sample.records:
        for deb in record.rootfs.debs if record.rootfs else ():
            assert (deb.name, deb.version, deb.sha256) in found
        for row in record.context:
            if row.what.startswith(("wheel ", "mod ")):
                _, name, version = row.what.split()
                assert (name, version, row.sha256) in found


def flat(sbom: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for row in sbom["components"] for part in [row, *row.get("components", [])]]


def one(sbom: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [row for row in flat(sbom) if row["name"] == name]
    return found


def test_names_that_others_know_them_by(sbom: dict[str, Any]) -> None:
    bash, torch = one(sbom, "bash"), one(sbom, "torch")
    version = bash["version"].replace("+", "%2B")
    assert bash["purl"] == f"pkg:deb/debian/bash@{version}?arch=amd64&distro=bookworm"
    assert torch["purl"] == f"pkg:pypi/torch@{torch['version'].replace('+', '%2B')}"
    assert "purl" not in one(sbom, "hybrid-int4-fp8"), "nobody else offers the wheel of a mod"
    model = one(sbom, "sparkpin/scripted-tiny-int4-AutoRound")
    assert (model["type"], len(model["version"]), model.get("purl")) == ("machine-learning-model", 40, None)
    assert {"config.json": "SHA-256"}.items() <= {r["name"]: r["hashes"][0]["alg"] for r in model["components"]}.items()
    assert (one(sbom, "uv")["scope"], torch["scope"]) == ("excluded", "required"), "a tool made it and is not in it"


def test_form_is_the_one_that_others_have_kept(sample: Sample) -> None:
    """`verify` wants it exactly so: a library that writes another form needs another BUILD_TYPE, too."""
    release = dataclasses.replace(sample.release, key="1" * 64, image=f"sha256:{'2' * 64}", diff_ids=(), tag="a:b-c")
    made = make_sbom(
        release,
        [
            Material("deb", "bash", "5", "3" * 64, 1, "", "pkg:deb/debian/bash@5?arch=amd64"),
            Material("model", "config.json", "4" * 40, "5" * 64, 2, f"x/y@{'4' * 40}", ""),
            Material("tool", "uv", "6", "7" * 64, 3, "base", ""),
            Material("wheel", "torch", "8", "9" * 64, 4, "base", "pkg:pypi/torch@8"),
        ],
    )
    assert hashlib.sha256(made).hexdigest() == "6a79034790c3baaf10db2b5e764783c89f79063ecedb178c3ff4601b6b2cd539"


def test_same_release_same_bytes(sample: Sample, tmp_path: Path) -> None:
    again = make_sample(tmp_path)
    data = make_sbom(sample.release, materials(sample))
    assert make_sbom(again.release, materials(again)) == data
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(data.decode()) is None
    base = make_sample(tmp_path / "other", "base")  # whose checkpoint needs one repository alone
    names = {row["name"] for row in json.loads(make_sbom(base.release, materials(base)))["components"]}
    assert "sparkpin/scripted-tiny-int4-AutoRound" in names and "sparkpin/scripted-tiny-FP8" not in names
