"""Verifying: evidence as it was made holds; each thing that was tampered with is found, by the check that is for it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import LOCK, Sample, make_sample, small_project
from evidence_samples import sboms_made_once as sboms_made_once

from sparkpin.build import make
from sparkpin.build.pair import pair
from sparkpin.build.record import BuildInput
from sparkpin.bundle import export
from sparkpin.bundle.form import IMPORTS
from sparkpin.core.errors import HostError, IntegrityError, ManifestError
from sparkpin.core.files import sha256_file
from sparkpin.core.names import is_plain
from sparkpin.evidence import imagecheck
from sparkpin.evidence.attest import attest
from sparkpin.evidence.signing import ALLOWED_SIGNERS, Keys
from sparkpin.evidence.verify import NAMES, Check, Claimed, check_evidence, conclusion, demanded, require, same
from sparkpin.fetch.store import Store
from sparkpin.pins import manifests
from sparkpin.releases.record import SBOM, STATEMENT, Releases, release_key, tag_of


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    sample = make_sample(tmp_path_factory.mktemp("sample"))
    attest(sample.paths, sample.release, Keys())
    return sample


@pytest.fixture(scope="module")
def signed(sample: Sample, signing_key: Path, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    signed = sample.copied(tmp_path_factory.mktemp("signed"))
    attest(signed.paths, signed.release, Keys(signing_key))
    return signed


@pytest.fixture
def keys(signing_key: Path, tmp_path: Path) -> Keys:
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f"lead@example {signing_key.with_suffix('.pub').read_text()}")
    return Keys(signing_key, allowed)


def found(checks: list[Check], result: str) -> list[str]:
    return [check.what for check in checks if check.result == result]


def test_signed_release_holds(signed: Sample, keys: Keys) -> None:
    checks = check_evidence(signed.evidence(), keys)
    assert found(checks, "ok") == list(NAMES), [check.line for check in checks]
    require(checks, signed.release.tag)
    assert "lead@example" in checks[-1].line


def test_what_is_not_there_is_said(sample: Sample) -> None:
    checks = check_evidence(sample.evidence(read=None, config=None), Keys())
    assert found(checks, "open") == ["image", "kept inputs", "locks", "signature"]
    assert found(checks, "wrong") == []
    assert "37 of the model were not looked at" in next(check.detail for check in checks if check.what == "inputs")
    assert "not checked: image, kept inputs, locks, signature" in conclusion(checks)
    checks = check_evidence(sample.evidence(files={}), Keys())
    assert found(checks, "open") == ["statement", "signature"]


def test_a_statement_that_a_build_left_does_not_go_unnoticed(sample: Sample, tmp_path: Path) -> None:
    """Whoever removes all of the evidence has no better result than who removes a part of it."""
    sample = sample.copied(tmp_path)
    shutil.rmtree(sample.folder)
    checks = check_evidence(imagecheck.evidence_of(sample.paths, sample.release), Keys())
    assert found(checks, "wrong") == ["statement"]
    with pytest.raises(IntegrityError) as failed:
        require(checks, "it", next_step="something else")
    assert failed.value.next_step.startswith(f"invoke attest {sample.release.tag}")
    attest(sample.paths, sample.release, Keys())
    require(check_evidence(imagecheck.evidence_of(sample.paths, sample.release), Keys()), "it")


@pytest.mark.parametrize(
    ("rows", "result"),
    [
        ([{"with_statement": False}], "open"),
        ([{"with_statement": False}, {"with_statement": True}], "wrong"),
        ([{"file": "of an earlier sparkpin"}], "wrong"),
        (["damaged"], "wrong"),
    ],
)
def test_a_bundle_may_have_come_without_a_statement(
    sample: Sample, tmp_path: Path, rows: list[Any], result: str
) -> None:
    sample = sample.copied(tmp_path)
    shutil.rmtree(sample.folder)
    sample.folder.mkdir()
    (sample.folder / IMPORTS).write_text(json.dumps(rows))
    checks = check_evidence(imagecheck.evidence_of(sample.paths, sample.release), Keys())
    assert next(check.result for check in checks if check.what == "statement") == result


def test_what_nobody_came_to_is_said() -> None:
    """After a wrong image nothing else is looked at; without a statement there is nothing to hold inputs against."""
    for looked in (NAMES[:4], [name for name in NAMES if name not in ("inputs", "SBOM")], NAMES):
        said = conclusion([Check(name, "wrong", "") for name in looked])
        assert said.startswith(f"0 checks hold; WRONG: {', '.join(looked)}; not checked: ")
        missed = said.rpartition("not checked: ")[2]
        assert all((name in missed.split(", ")) == (name not in looked) for name in NAMES)
        for name in ("fetched packages", "model files", "checkpoint", "the layers' bytes"):
            assert f"{name} (--deep)" in missed


def test_checks_after_a_wrong_image_are_named(sample: Sample) -> None:
    for broken in (sample.evidence(config=b"{}"), sample.evidence(files={STATEMENT: b"{}"})):
        checks = check_evidence(broken, Keys())
        missed = conclusion(checks).partition("not checked: ")[2].split(", ")
        assert {check.what for check in checks} | set(missed) >= set(NAMES), missed


def test_the_conclusion_repeats_no_name_that_holds() -> None:
    examined = Check("signature", "open", "by a key", missed="whose signature it is")
    said = conclusion([Check("image", "ok", ""), examined])
    assert said.startswith("1 check holds; none is wrong; not checked: whose signature it is, layers, ")
    assert "image" not in said


def test_a_chain_of_one_is_none(tmp_path: Path) -> None:
    checks = check_evidence(make_sample(tmp_path, "base").evidence(files={}), Keys())
    assert next(check.detail for check in checks if check.what == "build records") == "base, which ends in this image"


def test_values_that_differ_near_their_end_are_cut_where_they_differ() -> None:
    seen = ["vllm", "serve", *(f"--flag-{number}" for number in range(60)), "--enable-x", *map(str, range(99))]
    wanted = [*seen[:62], "--enable-y", *seen[63:]]
    with pytest.raises(IntegrityError) as failed:
        same("command", seen, wanted)
    one, _, other = failed.value.message.partition(", wanted ")
    assert "'--enable-x'" in one and "'--enable-y'" in other and len(failed.value.message) < 600
    with pytest.raises(IntegrityError, match="saw short, wanted s"):
        same("it", "short", "s")


def test_a_line_is_one_line_whatever_stands_in_it(sample: Sample) -> None:
    evil = "\x1b[2J\x1b[1;32mok     signature: over this statement, by lead@example.org\n"
    tampered = statement(sample.evidence(), lambda v: v["subject"][0].update(name=evil))
    checks = check_evidence(tampered, Keys())
    assert found(checks, "wrong") == ["statement"]
    assert all(check.line.isprintable() for check in checks)
    with pytest.raises(IntegrityError) as failed:
        require(checks, "it")
    assert failed.value.message.isprintable()


def test_valid_signature_of_whomever(signed: Sample, keys: Keys) -> None:
    check = check_evidence(signed.evidence(), Keys())[-1]
    assert (check.result, demanded(check).result) == ("open", "wrong") and "nobody says" in check.detail
    assert ALLOWED_SIGNERS in check.detail and ALLOWED_SIGNERS in demanded(check).next_step


def test_demanded_signature(sample: Sample) -> None:
    checks = [demanded(check) for check in check_evidence(sample.evidence(), Keys())]
    with pytest.raises(IntegrityError, match="not signed; the signature of an allowed signer is required") as failed:
        require(checks, sample.release.tag)
    assert failed.value.exit_code == 5 and "holds, but lacks a trusted signature" in failed.value.message


def test_a_signer_who_is_not_trusted_is_no_damage(signed: Sample, keys: Keys) -> None:
    assert keys.allowed
    keys.allowed.write_text("garbage\n")
    with pytest.raises(IntegrityError, match="holds, but lacks a trusted signature") as failed:
        require(check_evidence(signed.evidence(), keys), signed.release.tag, next_step="invoke rebuild")
    assert "no line of it can be read (line 1: missing key)" in failed.value.message
    assert str(keys.allowed) in failed.value.next_step and "invoke" not in failed.value.next_step
    both = [Check("image", "wrong", "other", ""), *check_evidence(signed.evidence(), keys)]
    with pytest.raises(IntegrityError, match="is not what its evidence says") as failed:
        require(both, signed.release.tag, next_step="invoke rebuild")
    assert failed.value.next_step.startswith("invoke rebuild; ")


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("other statement", "not over this statement"),
        ("unknown signer", "does not allow"),
        ("no statement", "no statement"),
    ],
)
def test_bad_signature_is_wrong(signed: Sample, keys: Keys, what: str, wrong: str) -> None:
    evidence = signed.evidence()
    files = dict(evidence.files)
    if what == "other statement":
        files[STATEMENT] += b"\n"
    elif what == "no statement":
        del files[STATEMENT]
    else:
        assert keys.allowed
        keys.allowed.write_text("")
    check = check_evidence(dataclasses.replace(evidence, files=files), keys)[-1]
    assert (check.what, check.result) == ("signature", "wrong") and wrong in check.detail


def test_without_ssh_keygen_a_signature_is_not_looked_at(
    signed: Sample, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = check_evidence(signed.evidence(), keys)[-1]
    assert check.result == "open" and "ssh-keygen" in check.detail
    with pytest.raises(HostError):
        attest(signed.paths, signed.release, keys)


def release(evidence: Claimed, **changes: Any) -> Claimed:
    return dataclasses.replace(evidence, release=dataclasses.replace(evidence.release, **changes))


def rekeyed(evidence: Claimed, **changes: Any) -> Claimed:
    """Consistent in itself: key and tag follow from what was changed."""
    made = dataclasses.replace(evidence.release, **changes)
    key = release_key(made.build_key, made.checkpoint_key, made.argv, made.env)
    return release(evidence, **changes, key=key, tag=tag_of(made.recipe, made.stage, key))


def record(evidence: Claimed, number: int, **changes: Any) -> Claimed:
    records = list(evidence.records)
    records[number] = records[number].model_copy(update=changes)
    return dataclasses.replace(evidence, records=tuple(records))


def context(evidence: Claimed, number: int, what: str, /, **changes: Any) -> Claimed:
    rows = [
        row.model_copy(update=changes) if row.what.startswith(what) else row for row in evidence.records[number].context
    ]
    return record(evidence, number, context=rows)


def statement(evidence: Claimed, change: Callable[[dict[str, Any]], object]) -> Claimed:
    value = json.loads(evidence.files[STATEMENT])
    change(value)
    return dataclasses.replace(evidence, files={**evidence.files, STATEMENT: json.dumps(value).encode()})


def definition(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["predicate"]["buildDefinition"]
    return found


def sbom(evidence: Claimed, old: bytes, new: bytes, *, named: bool) -> Claimed:
    """named: the statement names the changed one."""
    data = evidence.files[SBOM]
    assert old in data
    return with_sbom(evidence, data.replace(old, new, 1), named=named)


def bill(evidence: Claimed, change: Callable[[dict[str, Any]], object]) -> Claimed:
    """An SBOM with other content, which the statement names."""
    value = json.loads(evidence.files[SBOM])
    change(value)
    return with_sbom(evidence, json.dumps(value).encode(), named=True)


def with_sbom(evidence: Claimed, data: bytes, *, named: bool) -> Claimed:
    evidence = dataclasses.replace(evidence, files={**evidence.files, SBOM: data})
    row = {"sha256": hashlib.sha256(data).hexdigest()}
    if not named:
        return evidence
    return statement(evidence, lambda v: v["predicate"]["runDetails"]["byproducts"][0].update(digest=row))


def component(value: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in value["components"] if row["name"] == name)
    return found


def inputs(value: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = definition(value)["resolvedDependencies"]
    return found


def dependency(value: dict[str, Any], start: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in inputs(value) if row["name"].startswith(start))
    return found


def builder(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["predicate"]["runDetails"]["builder"]
    return found


def without_repository(evidence: Claimed) -> Claimed:
    """Statement and SBOM agree with each other: one of the model's repositories is in neither."""
    gone = "model sparkpin/scripted-tiny-FP8@"

    def less(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
        return [row for row in rows if not row[key].startswith(gone)]

    evidence = statement(
        evidence,
        lambda v: definition(v).update(resolvedDependencies=less(inputs(v), "name")),
    )

    def change(value: dict[str, Any]) -> None:
        value["components"] = less(value["components"], "bom-ref")
        value["dependencies"] = less(value["dependencies"], "ref")
        for row in value["dependencies"]:
            if "dependsOn" in row:
                row["dependsOn"] = [name for name in row["dependsOn"] if not name.startswith(gone)]

    return bill(evidence, change)


def model_lock(evidence: Claimed, change: Callable[[dict[str, Any]], object]) -> Claimed:
    assert evidence.read
    value = json.loads(evidence.read(evidence.release.inputs[MODEL]) or b"")
    change(value)
    return kept(evidence, MODEL, json.dumps(value).encode())


def package(evidence: Claimed, **changes: Any) -> Claimed:
    """Another first Debian package."""
    spec = evidence.records[0].rootfs
    assert spec
    debs = [spec.debs[0].model_copy(update=changes), *spec.debs[1:]]
    return record(evidence, 0, rootfs=spec.model_copy(update={"debs": debs}))


def kept(evidence: Claimed, path: str, data: bytes | None) -> Claimed:
    """The release's record names other bytes for a project file, which are kept, too (or nothing is kept at all)."""
    read, wanted = evidence.read, evidence.release.inputs[path]
    assert read
    if data is None:
        return dataclasses.replace(evidence, read=lambda sha256: None if sha256 == wanted else read(sha256))
    sha256 = hashlib.sha256(data).hexdigest()
    changed = release(evidence, inputs={**evidence.release.inputs, path: sha256})
    return dataclasses.replace(changed, read=lambda name: data if name == sha256 else read(name))


ZERO = "0" * 64
MODEL = "pins/models/scripted-tiny.lock"
STATEMENTS: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "statement of other image": ("statement", lambda v: v["subject"][0].update(digest={"sha256": ZERO})),
    "subject more": ("statement", lambda v: v["subject"].append({"name": "more", "digest": {"sha256": ZERO}})),
    "other build type": ("statement", lambda v: definition(v).update(buildType="other")),
    "input less": ("inputs", lambda v: inputs(v).pop(0)),
    "model file less": ("inputs", lambda v: drop(definition(v), "/config.json")),
    "input more": (
        "inputs",
        lambda v: inputs(v).append({"name": "deb evil 1", "digest": {"sha256": ZERO}}),
    ),
    "other hash": ("inputs", lambda v: inputs(v)[0].update(digest={"sha256": ZERO})),
    "other builder": ("statement", lambda v: builder(v).update(id="https://github.com/x")),
    "no builder": ("statement", lambda v: builder(v).clear()),
    "other package URL": ("inputs", lambda v: dependency(v, "wheel torch ").update(uri="pkg:pypi/evil@1")),
    "a model with a package URL": ("inputs", lambda v: dependency(v, "model ").update(uri="pkg:huggingface/x/y@1")),
    "other size": ("inputs", lambda v: dependency(v, "wheel torch ")["annotations"].update(size=1)),
    "other media type": ("statement", lambda v: v["subject"][0].update(mediaType="text/plain")),
    "statement in another spelling": ("statement", lambda v: v.update(predicate_type=v.pop("predicateType"))),
    "infinite size": ("statement", lambda v: dependency(v, "model ")["annotations"].update(size=float("inf"))),
}
TAMPERED: dict[str, tuple[str, Callable[[Claimed], Claimed]]] = {
    "other image": ("image", lambda e: release(e, image=f"sha256:{ZERO}")),
    "other config": ("image", lambda e: dataclasses.replace(e, config=b"{}")),
    "config is no JSON": ("image", lambda e: dataclasses.replace(e, config=b"[" * 100_000)),
    "other layer order": ("image", lambda e: release(e, diff_ids=e.release.diff_ids[::-1])),
    "a layer less, image unseen": (
        "layers",
        lambda e: dataclasses.replace(release(e, diff_ids=e.release.diff_ids[:-1]), config=None),
    ),
    "no records": ("layers", lambda e: dataclasses.replace(e, records=())),
    "other command": ("release key", lambda e: release(e, argv=("sh",))),
    "other environment": ("release key", lambda e: release(e, env={"A": "b"})),
    "other tag": ("release key", lambda e: release(e, tag="sparkpin/other:base-000000000000")),
    "path above the project": ("release key", lambda e: release(e, inputs={"pins/../../evil": ZERO})),
    "absolute path": ("release key", lambda e: release(e, executable=("/bin/evil",))),
    "other build key": ("image", lambda e: rekeyed(e, build_key=ZERO)),
    "other build key, image unseen": (
        "build records",
        lambda e: dataclasses.replace(rekeyed(e, build_key=ZERO), config=None),
    ),
    "other parent": ("build records", lambda e: record(e, 1, parent_key=ZERO)),
    "chain without its start": ("build records", lambda e: dataclasses.replace(e, records=e.records[1:])),
    "config of a record": ("build records", lambda e: record(e, 0, config="{}")),
    "layer that is not in the image": (
        "build records",
        lambda e: record(
            e, 1, layers=[layer.model_copy(update={"diff_id": f"sha256:{ZERO}"}) for layer in e.records[1].layers]
        ),
    ),
    "kept input lost": ("kept inputs", lambda e: kept(e, "stages/base.yaml", None)),
    "kept input of other bytes": ("kept inputs", lambda e: dataclasses.replace(e, read=lambda sha256: b"other")),
    "wheel that no lock names": ("locks", lambda e: context(e, 0, "wheel torch", sha256=ZERO)),
    "lock of another time": ("locks", lambda e: kept(e, LOCK, b"{}")),
    "other mod": ("statement", lambda e: dataclasses.replace(context(e, 1, "mod ", sha256=ZERO), read=None)),
    "other project file": ("inputs", lambda e: kept(e, "recipes/scripted-tiny.yaml", b"other")),
    "stage that is none": ("statement", lambda e: kept(e, "stages/base.yaml", b"other")),
    "stage with a mapping as key": ("statement", lambda e: kept(e, "stages/base.yaml", b"? {a: b}\n: c\n")),
    "stage that is no text": ("statement", lambda e: kept(e, "stages/base.yaml", b"\xff")),
    "deep stage": ("statement", lambda e: kept(e, "stages/base.yaml", b"[" * 100_000)),
    "other model lock": ("statement", lambda e: kept(e, MODEL, b"{}")),
    "model lock without a repository": (
        "statement",
        lambda e: model_lock(e, lambda v: v["repositories"].pop("fp8")),
    ),
    "model lock with a nameless repository": (
        "statement",
        lambda e: model_lock(e, lambda v: v["repositories"]["fp8"].update(repo="")),
    ),
    "model lock with a huge file": (
        "statement",
        lambda e: model_lock(e, lambda v: v["repositories"]["fp8"]["files"][0].update(size=10**400)),
    ),
    "tool without a version": ("locks", lambda e: context(e, 0, "uv ", what="x")),
    "wheel without a name": ("locks", lambda e: context(e, 0, "wheel torch ", what="wheel ")),
    "wheel without a version": ("locks", lambda e: context(e, 0, "wheel torch ", what="wheel torch ")),
    "mod without a version": ("locks", lambda e: context(e, 1, "mod ", what="mod x")),
    "package without a name": ("locks", lambda e: package(e, name="")),
    "a number beyond all numbers": ("statement", lambda e: record(e, 0, epoch=10**400, seal=10**400)),
    "other Dockerfile": ("statement", lambda e: record(e, 0, dockerfile="FROM scratch\n")),
    "other checkpoint": ("statement", lambda e: rekeyed(e, checkpoint_key=ZERO)),
    "other recipe": ("statement", lambda e: rekeyed(e, recipe="other")),
    "other time": ("statement", lambda e: release(e, created="2020-01-01T00:00:00Z")),
    "statement is no statement": (
        "statement",
        lambda e: dataclasses.replace(e, files={**e.files, STATEMENT: b"no"}),
    ),
    "SBOM gone": ("SBOM", lambda e: dataclasses.replace(e, files={STATEMENT: e.files[STATEMENT]})),
    "SBOM changed": ("SBOM", lambda e: sbom(e, b'"library"', b'"library" ', named=False)),
    "SBOM of other image": (
        "SBOM",
        lambda e: sbom(e, e.release.image.removeprefix("sha256:").encode(), ZERO.encode(), named=True),
    ),
    "SBOM with other hash": (
        "SBOM",
        lambda e: sbom(e, e.records[0].rootfs.debs[0].sha256.encode(), ZERO.encode(), named=True),  # type: ignore[union-attr]
    ),
    **{
        f"SBOM {name}": ("SBOM", functools.partial(bill, change=change))
        for name, change in {
            "with a reference that is no text": lambda v: v["components"][0].update({"bom-ref": 5}),
            "with another name": lambda v: component(v, "torch").update(name="numpy"),
            "with another version": lambda v: component(v, "torch").update(version="9"),
            "with another package URL": lambda v: component(v, "torch").update(purl="pkg:pypi/evil@1"),
            "with another type": lambda v: component(v, "torch").update(type="file"),
            "with a component more": lambda v: v["components"].append(
                {"bom-ref": "evil", "name": "openssl", "type": "library", "version": "0.9.8"}
            ),
            "with a component twice": lambda v: v["components"].append(v["components"][0]),
            "with a field more": lambda v: v.update(vulnerabilities=[]),
            "in another order": lambda v: v["components"].reverse(),
            "of another tool": lambda v: v["metadata"].update(tools=[]),
            "that is a list": lambda v: v.update(metadata=[]),
        }.items()
    },
    "model repository less": ("inputs", without_repository),
    "SBOM is no SBOM": ("SBOM", lambda e: sbom(e, b'"components"', b'"other"', named=True)),
    **{name: (check, functools.partial(statement, change=change)) for name, (check, change) in STATEMENTS.items()},
}


SOURCES = {  # where a build from source sees them -> part of the lock, name
    "source/archives/vllm.tar": ("archives", "vllm"),
    "source/debs/g++.deb": ("debs", "g++"),
    "wheels/source-wheels/setuptools-scm.whl": ("wheels", "setuptools-scm"),
}


def compiled(evidence: Claimed, **other: str) -> Claimed:
    """As if a distribution had been built from source. other: SHA-256 (hex) of the record, in place of the lock's."""
    lock = json.loads((small_project() / LOCK).read_text())
    lock["source"] = {"archives": [], "debs": [], "wheels": []}
    rows = list(evidence.records[0].context)
    for path, (part, name) in SOURCES.items():
        file = {"name": name, "version": "1.0", "file": path.rpartition("/")[2], "size": 1, "sha256": "1" * 64}
        lock["source"][part].append(file)
        seen = other.get(name, file["sha256"])
        rows.append(BuildInput(path=path, sha256=seen, size=1, what=f"source {name} 1.0"))
    return kept(record(evidence, 0, context=rows), LOCK, json.dumps(lock).encode())


def test_all_that_a_build_from_source_saw_is_held_against_the_lock(sample: Sample) -> None:
    checks = {check.what: check for check in check_evidence(compiled(sample.evidence()), Keys())}
    assert checks["locks"].result == "ok", checks["locks"].line
    for name in ("vllm", "g++", "setuptools-scm"):
        checks = {check.what: check for check in check_evidence(compiled(sample.evidence(), **{name: ZERO}), Keys())}
        assert checks["locks"].result == "wrong"
        assert f"does not name {'source' if name == 'vllm' else 'tool'} {name} 1.0 {ZERO}" in checks["locks"].detail


def drop(value: dict[str, Any], end: str) -> None:
    rows = value["resolvedDependencies"]
    rows.remove(next(row for row in rows if row["name"].endswith(end)))


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_found(sample: Sample, case: str) -> None:
    name, tamper = TAMPERED[case]
    checks = check_evidence(tamper(sample.evidence()), Keys())
    wrong = found(checks, "wrong")
    assert wrong and wrong[0] == name, [check.line for check in checks]
    with pytest.raises(IntegrityError):
        require(checks, "it")


LOCKS_UNSEEN = {
    "SBOM with another name",
    "SBOM with another package URL",
    "SBOM with a component more",
    "SBOM with a reference that is no text",
    "other builder",
    "other package URL",
    "a model with a package URL",
    "other size",
    "other media type",
    "infinite size",
    "input less",
    "input more",
}


@pytest.mark.parametrize("case", sorted(LOCKS_UNSEEN))
def test_tampering_is_found_without_the_locks(sample: Sample, case: str) -> None:
    """Only the hashes of the model's files have to be taken from the statement then."""
    name, tamper = TAMPERED[case]
    checks = check_evidence(tamper(sample.evidence(read=None)), Keys())
    assert name in found(checks, "wrong"), [check.line for check in checks]


@pytest.mark.parametrize("change", [{"where": ""}, {"where": 5}, {"size": "x"}, {"size": -1}, {"where": "a@b"}])
def test_model_files_of_another_form(sample: Sample, change: dict[str, Any]) -> None:
    tampered = statement(
        sample.evidence(read=None), lambda v: dependency(v, "model ")["annotations"].update(copy.deepcopy(change))
    )
    assert found(check_evidence(tampered, Keys()), "wrong")


def test_no_model_at_all(sample: Sample) -> None:
    def change(value: dict[str, Any]) -> None:
        inputs(value)[:] = [row for row in inputs(value) if not row["name"].startswith("model ")]

    checks = check_evidence(statement(sample.evidence(read=None), change), Keys())
    assert "names no file of a model" in next(check.detail for check in checks if check.result == "wrong")


@pytest.mark.parametrize("moment", ["2026-99-99T99:99:99Z", "2026-01-01T24:00:00Z", "2026-01-01T00:00:00.0000000001Z"])
def test_a_moment_that_is_none(sample: Sample, tmp_path: Path, moment: str) -> None:
    sample = sample.copied(tmp_path)
    path = Releases(sample.paths).record_path(sample.release)
    path.write_text(path.read_text().replace(sample.release.created, moment))
    with pytest.raises(ManifestError, match="created"):
        Releases(sample.paths).get(sample.release.tag)


@pytest.mark.parametrize("name", ["a", "a/b.py", "mods/x/a note (1).txt", "mods/x/[b]", "é", "..a", ".github/x"])
def test_names_of_project_files(sample: Sample, name: str) -> None:
    evidence = release(sample.evidence(files={}), inputs={**sample.release.inputs, name: ZERO})
    assert is_plain(name) and "release key" in found(check_evidence(evidence, Keys()), "ok")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "a/../b",
        "..",
        ".git/x",
        "a/.git",
        "a\\b",
        "a\nb",
        "\x1b",
        "\udcff",
        "\u202e",
        "a" * 256,
    ],
)
def test_names_that_lead_elsewhere(sample: Sample, name: str) -> None:
    evidence = release(sample.evidence(files={}), inputs={**sample.release.inputs, name: ZERO})
    assert not is_plain(name) and "release key" in found(check_evidence(evidence, Keys()), "wrong")


def test_builds_and_checks_have_one_rule_for_names(project: Path) -> None:
    package = next((project / "mods/int8-lm-head").glob("sparkpin_*"))
    (package / "a note (1).txt").write_text("x")
    inputs = pair(project, "scripted-tiny")[-1].inputs
    assert any(path.endswith("a note (1).txt") for path in inputs) and all(map(is_plain, inputs))
    (package / "a\nb.txt").write_text("x")
    with pytest.raises(ManifestError, match="file name"):
        pair(project, "scripted-tiny")


@pytest.fixture(scope="module")
def with_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The model is made and fetched from 127.0.0.1, the checkpoint made of it."""
    sample = make_sample(tmp_path_factory.mktemp("checkpoint"))
    make.checkpoint_of(sample.paths, sample.release)
    return sample


def quiet(line: str) -> None:
    pass


def deep(sample: Sample) -> list[tuple[str, str]]:
    checks = imagecheck.check_model(sample.paths, sample.release, quiet)
    assert [check.what for check in checks] == ["model files", "checkpoint"]
    return [(check.result, check.detail) for check in checks]


def replace(path: Path, data: bytes) -> None:
    """Not in place: a checkpoint's files are links to those of the model."""
    path.unlink()
    path.write_bytes(data)


def test_model_and_checkpoint_are_read(with_checkpoint: Sample, tmp_path: Path) -> None:
    sample = Sample(
        dataclasses.replace(with_checkpoint.paths, home=tmp_path / "h", cache=tmp_path / "c"), with_checkpoint.release
    )
    shutil.copytree(with_checkpoint.paths.home, sample.paths.home)
    shutil.copytree(with_checkpoint.paths.cache, sample.paths.cache)
    (models, checkpoint) = deep(sample)
    assert models == ("ok", "29 of 29 are in the cache, each with its hash") and checkpoint[0] == "ok", checkpoint
    assert "every tensor" in checkpoint[1]

    folder = Releases(sample.paths).checkpoint(sample.release)
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = shard.read_bytes()
    replace(shard, data[:-1] + bytes([data[-1] ^ 1]))
    (models, checkpoint) = deep(sample)
    assert (models[0], checkpoint[0]) == ("ok", "wrong") and shard.name in checkpoint[1]

    gone = next(sample.paths.models.rglob("config.json"))
    gone.unlink()
    (models, checkpoint) = deep(sample)
    assert models == ("ok", "28 of 29 are in the cache, each with its hash")
    assert checkpoint[0] == "wrong" and f"{shard}: sha256" in checkpoint[1]
    replace(shard, data)
    assert deep(sample)[1][0] == "ok" and "its own record" in deep(sample)[1][1]

    damaged = next(sample.paths.models.rglob("tokenizer.json"))
    replace(damaged, b"damaged")
    assert deep(sample)[0][0] == "wrong" and str(damaged) in deep(sample)[0][1]

    lock = json.loads((sample.paths.project / "pins/models/scripted-tiny.lock").read_text())
    header = Store(sample.paths.store).path(lock["repositories"]["int4"]["headers"][0]["sha256"])
    replace(damaged, (with_checkpoint.paths.cache / damaged.relative_to(sample.paths.cache)).read_bytes())
    replace(header, header.read_bytes().replace(b'"F16"', b'"F61"'))
    assert deep(sample)[0][0] == "wrong" and str(header) in deep(sample)[0][1]

    shutil.rmtree(sample.paths.models)
    shutil.rmtree(sample.paths.store)
    shard.unlink()
    assert [result for result, _ in deep(sample)] == ["open", "wrong"]
    shutil.rmtree(folder)
    assert [result for result, _ in deep(sample)] == ["open", "open"]


def test_an_export_with_the_store_has_all_that_the_checkpoint_is_made_of(with_checkpoint: Sample) -> None:
    pieces = export.store_pieces(with_checkpoint.paths, with_checkpoint.release, [])
    project = with_checkpoint.paths.project
    lock = manifests.load_model_lock(project, manifests.load_model(project, with_checkpoint.release.model))
    base, donor = lock.repositories["int4"], lock.repositories["fp8"]
    texts = [file for file in donor.files if file.file in ("config.json", "model.safetensors.index.json")]
    wanted = {file.sha256 for file in (*base.files, *texts, *donor.headers, *donor.tensors)}
    assert {piece.sha256 for piece in pieces} == wanted
    assert all(piece.sha256 == sha256_file(Path(piece.what))[0] for piece in pieces)
