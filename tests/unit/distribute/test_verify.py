"""Verifying: evidence as it was made holds; each thing that was tampered with is found, by the check that is for it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import LOCK, Sample

from sparkpin.build.consistent import IMPORTS
from sparkpin.build.pair import pair
from sparkpin.build.record import LayerRecord
from sparkpin.cli.evidence import step_of
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.names import is_plain
from sparkpin.distribute import layout
from sparkpin.distribute import verify as verifying
from sparkpin.distribute.layout import INPUTS, slice_of
from sparkpin.distribute.signing import Keys, UntrustedError, attest
from sparkpin.distribute.verify import (
    NAMES,
    Check,
    Claimed,
    check_evidence,
    demanded,
    require,
)
from sparkpin.image.oci import digest_of
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT


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


def without(evidence: Claimed, *titles: str) -> Claimed:
    return dataclasses.replace(evidence, data={name: one for name, one in evidence.data.items() if name not in titles})


def with_file(evidence: Claimed, title: str, data: bytes) -> Claimed:
    return dataclasses.replace(evidence, data={**evidence.data, title: slice_of(data)})


def text(evidence: Claimed, title: str) -> bytes:
    found = evidence.file(title)
    assert found is not None
    return found


def found(checks: list[Check], result: str) -> list[str]:
    return [check.what for check in checks if check.result == result]


def test_a_signed_release_holds(signed: Sample, keys: Keys) -> None:
    for evidence in (signed.evidence(), statement(bill(signed.evidence(), lambda v: None), lambda v: None)):
        checks = check_evidence(evidence, keys)  # the second: as the trials below write what they change
        assert found(checks, "ok") == list(NAMES), [check.line for check in checks]
        require(checks, signed.release.tag)
    assert "lead@example" in checks[-1].line


def test_what_is_not_there_is_said(sample: Sample) -> None:
    checks = check_evidence(without(sample.evidence(), *layout.EVIDENCE), Keys())
    assert (found(checks, "open"), found(checks, "wrong")) == (["statement", "signature"], [])


ROW = {"file": "x.tar", "with_statement": False, "with_store": False, "checks": [], "time": "now"}


@pytest.mark.parametrize(
    ("rows", "result"),
    [
        (None, "wrong"),  # a build left one
        ([ROW], "open"),
        ([ROW, ROW | {"with_statement": True}], "wrong"),
    ],
)
def test_only_a_bundle_may_have_come_without_a_statement(
    sample: Sample, tmp_path: Path, rows: list[Any] | None, result: str
) -> None:
    """Whoever removes all of the evidence has no better result than who removes a part of it."""
    sample = sample.copied(tmp_path)
    shutil.rmtree(sample.folder)
    if rows is not None:
        write_json(sample.folder / IMPORTS, rows)
    checks = check_evidence(verifying.evidence_of(sample.paths, sample.release), Keys())
    assert found(checks, result)[0] == "statement" and "statement" not in found(checks, "ok")
    if result == "wrong":
        with pytest.raises(IntegrityError) as failed:
            require(checks, "it", next_step="something else")
        assert "--sign" in failed.value.next_step
        attest(sample.paths, sample.release, Keys())
        require(check_evidence(verifying.evidence_of(sample.paths, sample.release), Keys()), "it")


@pytest.mark.parametrize(
    ("case", "result", "error"),
    [
        ("trusted", "ok", None),
        ("nobody is configured", "open", UntrustedError),
        ("unsigned", "open", UntrustedError),
        ("a stranger", "wrong", UntrustedError),
        ("of another statement", "wrong", IntegrityError),
        ("no statement", "wrong", IntegrityError),
    ],
)
def test_signatures(signed: Sample, keys: Keys, case: str, result: str, error: type[IntegrityError] | None) -> None:
    """result: of the check; error: where a signature is required. What lacks trust alone is no damage."""
    assert keys.allowed
    evidence = signed.evidence()
    if case == "a stranger":
        keys.allowed.write_text("")
    elif case == "of another statement":
        evidence = with_file(evidence, STATEMENT, text(evidence, STATEMENT) + b"\n")
    elif case in ("no statement", "unsigned"):
        evidence = without(evidence, STATEMENT if case == "no statement" else SIGNATURE)
    checks = check_evidence(evidence, Keys() if case == "nobody is configured" else keys)
    assert (checks[-1].what, checks[-1].result) == ("signature", result)
    if error is None:
        require([demanded(check) for check in checks], "it")
        return
    with pytest.raises(IntegrityError) as failed:
        require([demanded(check) for check in checks], "it")
    assert type(failed.value) is error and failed.value.exit_code == 5 and failed.value.next_step


def release(evidence: Claimed, **changes: Any) -> Claimed:
    return dataclasses.replace(evidence, release=dataclasses.replace(evidence.release, **changes))


def record(evidence: Claimed, number: int, **changes: Any) -> Claimed:
    records = list(evidence.records)
    records[number] = records[number].model_copy(update=changes)
    return dataclasses.replace(evidence, records=tuple(records))


def context(evidence: Claimed, number: int, start: str, **changes: Any) -> Claimed:
    old = evidence.records[number].context
    rows = [row.model_copy(update=changes) if row.what.startswith(start) else row for row in old]
    return record(evidence, number, context=rows)


def written(value: object, *, sort_keys: bool = False) -> bytes:
    """In the form that sparkpin writes, so that nothing but the change makes other bytes."""
    return (json.dumps(value, indent=1, sort_keys=sort_keys, ensure_ascii=False) + "\n").encode()


def statement(evidence: Claimed, change: Callable[[dict[str, Any]], object]) -> Claimed:
    value = json.loads(text(evidence, STATEMENT))
    change(value)
    return with_file(evidence, STATEMENT, written(value, sort_keys=True))


def bill(evidence: Claimed, change: Callable[[dict[str, Any]], object]) -> Claimed:
    """An SBOM with other content, which the statement names."""
    value = json.loads(text(evidence, SBOM))
    change(value)
    data = written(value)
    row = {"sha256": hashlib.sha256(data).hexdigest()}
    return statement(
        with_file(evidence, SBOM, data), lambda v: v["predicate"]["runDetails"]["byproducts"][0].update(digest=row)
    )


def kept(evidence: Claimed, path: str, data: bytes | None) -> Claimed:
    """The release's record names other bytes for a project file, which are kept, too (or nothing is kept at all)."""
    if data is None:
        return without(evidence, f"{INPUTS}{evidence.release.inputs[path]}")
    sha256 = hashlib.sha256(data).hexdigest()
    changed = release(evidence, inputs={**evidence.release.inputs, path: sha256})
    return with_file(changed, f"{INPUTS}{sha256}", data)


ZERO, NESTED = "0" * 64, "[" * 100_000
MODEL = "pins/models/scripted-tiny.lock"
STAGE = "stages/base.yaml"
TAMPERED: dict[str, tuple[str, Callable[[Claimed], Claimed]]] = {
    "config is no JSON": ("image", lambda e: release(record(e, -1, config=NESTED), image=digest_of(NESTED.encode()))),
    "other layer order": ("image", lambda e: release(e, diff_ids=e.release.diff_ids[::-1])),
    "other tag": ("release key", lambda e: release(e, tag="sparkpin/other:base-000000000000")),
    "path above the project": ("release key", lambda e: release(e, inputs={"pins/../../evil": ZERO})),
    "chain without its start": ("build records", lambda e: dataclasses.replace(e, records=e.records[1:])),
    "layer that is not in the image": (
        "build records",
        lambda e: record(e, 1, layers=[LayerRecord(name="x", key=ZERO, diff_id=f"sha256:{ZERO}")]),
    ),
    "kept input lost": ("kept inputs", lambda e: kept(e, STAGE, None)),
    "kept input of other bytes": (
        "kept inputs",
        lambda e: with_file(e, f"{INPUTS}{e.release.inputs[STAGE]}", b"other"),
    ),
    "wheel that no lock names": ("locks", lambda e: context(e, 0, "wheel torch", sha256=ZERO)),
    "lock of another time": ("locks", lambda e: kept(e, LOCK, b"{}")),
    "other project file": ("statement", lambda e: kept(e, "recipes/scripted-tiny.yaml", b"other")),
    "stage that no reader survives": ("statement", lambda e: kept(e, STAGE, b"[" * 100_000)),
    "other model lock": ("statement", lambda e: kept(e, MODEL, b"{}")),
    "mod without a version": ("locks", lambda e: context(e, 1, "mod ", what="mod x")),
    "a number beyond all numbers": ("statement", lambda e: record(e, 0, epoch=10**400, seal=10**400)),
    "other Dockerfile": ("statement", lambda e: record(e, 0, dockerfile="FROM scratch\n")),
    "SBOM gone": ("SBOM", lambda e: without(e, SBOM)),
    "SBOM that the statement does not name": (
        "SBOM",
        lambda e: with_file(e, SBOM, text(e, SBOM) + b" "),
    ),
    # Both files are compared byte for byte, so one change is as good as ten.
    "SBOM of another version": ("SBOM", lambda e: bill(e, lambda v: v["components"][0].update(version="9"))),
    "a key more": ("statement", lambda e: statement(e, lambda v: v.update(evil="nothing"))),
}


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_found(sample: Sample, case: str) -> None:
    name, tamper = TAMPERED[case]
    checks = check_evidence(tamper(sample.evidence()), Keys())
    assert name in found(checks, "wrong"), [check.line for check in checks]
    with pytest.raises(IntegrityError):
        require(checks, "it")


def test_what_is_no_statement_at_all(sample: Sample) -> None:
    checks = check_evidence(with_file(sample.evidence(), STATEMENT, b"[" * 100_000), Keys())
    assert found(checks, "wrong") == ["statement"]


PLAIN = ["a/b.py", "mods/x/a note (1).txt", "é", "..a", ".github/x"]


@pytest.mark.parametrize(
    "name", [*PLAIN, "", "/a", "a//b", "a/../b", "a/.git", "a\\b", "a\nb", "\udcff", "\u202e", "a" * 256]
)
def test_names_of_project_files(sample: Sample, name: str) -> None:
    evidence = release(without(sample.evidence(), STATEMENT), inputs={**sample.release.inputs, name: ZERO})
    assert is_plain(name) == (name in PLAIN)
    assert "release key" in found(check_evidence(evidence, Keys()), "ok" if name in PLAIN else "wrong")


def test_builds_and_checks_have_one_rule_for_names(project: Path) -> None:
    package = next((project / "mods/int8-lm-head").glob("sparkpin_*"))
    (package / "a\nb.txt").write_text("x")
    with pytest.raises(ManifestError, match="file name"):
        pair(project, "scripted-tiny")


@pytest.mark.parametrize(
    ("wrong", "command"),
    [
        (["SBOM", "signature"], "--sign"),
        (["signature", "engine"], "invoke reproduce"),
        (["statement", "kept inputs", "engine"], "invoke import"),
    ],
)
def test_the_next_step_is_none_that_goes_by_what_is_wrong(sample: Sample, wrong: list[str], command: str) -> None:
    step = step_of(wrong, sample.paths, sample.release)
    assert [one for one in ("--sign", "invoke reproduce", "invoke import") if one in step] == [command]


def test_a_line_is_one_line_whatever_stands_in_it() -> None:
    assert Check("signature", "open", "by x\x1b[2J\x1b[1;32mok     signature: by lead\n").line.isprintable()
