"""Builders' statements, signed by real ssh keys: who counts for a release, who does not, and who contradicts."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
from evidence_samples import Sample, make_sample
from test_signing import keygen

from sparkpin.build.consistent import IMPORTS
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.distribute import digests
from sparkpin.distribute.digests import BUILDERS, confirm, confirmations
from sparkpin.distribute.imagecheck import check_published
from sparkpin.distribute.signing import sign

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="apt-get install openssh-client")


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    made = make_sample(tmp_path)
    return dataclasses.replace(made, paths=dataclasses.replace(made.paths, project=tmp_path / "project"))


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Of three people, of whom the list of signers does not name the stranger."""
    made = {name: keygen(tmp_path / name) for name in ("ann", "bob", "stranger")}
    lines = [
        f'{name} namespaces="{digests.NAMESPACE}" {key.with_suffix(".pub").read_text()}'
        for name, key in made.items()
        if name != "stranger"
    ]
    (tmp_path / "allowed").write_text("".join(lines))
    return made


def test_who_is_counted(sample: Sample, keys: dict[str, Path], tmp_path: Path) -> None:
    """Two; not a changed statement, one under another name or for another purpose, one by a stranger."""
    project, release, allowed = sample.paths.project, sample.release, tmp_path / "allowed"
    for name, key in keys.items():
        confirm(sample.paths, release, name, key)
    folder = project / BUILDERS
    for name, made in (
        ("cat", lambda data: data.replace(release.diff_ids[0].encode(), b"sha256:" + b"1" * 64)),
        ("dan", lambda data: data),
        ("eve", lambda data: data.replace(b'"bob"', b'"eve"')),
    ):
        (folder / f"{name}.json").write_bytes(made((folder / "bob.json").read_bytes()))
        (folder / f"{name}.json.sig").write_bytes((folder / "bob.json.sig").read_bytes())
    (folder / "eve.json.sig").write_bytes(sign((folder / "eve.json").read_bytes(), keys["ann"]))  # as a release is

    check = check_published(project, release, sample.records, allowed)
    assert check.result == "ok" and "2 builders (ann, bob)" in check.detail
    assert re.findall(r"not counted: (\w+)\.json", check.detail) == ["cat", "dan", "eve", "stranger"]

    for name in ("cat", "dan", "eve", "stranger"):
        (folder / f"{name}.json").unlink()
    other = confirmations(project, release.build_key, f"sha256:{'2' * 64}", allowed)
    assert other.builders == () and other.others == ("ann", "bob")
    (folder / "bob.json").unlink()
    assert confirmations(project, "0" * 64, release.image, allowed) == digests.Confirmations()
    untrusted = confirmations(project, release.build_key, release.image, None)
    assert untrusted.builders == () and len(untrusted.uncounted) == 1
    wrong = dataclasses.replace(release, image=f"sha256:{'2' * 64}")
    assert check_published(project, wrong, sample.records, allowed).result == "wrong"


def test_a_statement_covers_the_chain_and_grows(sample: Sample, keys: dict[str, Path]) -> None:
    path = confirm(sample.paths, sample.release, "ann", keys["ann"])
    statement, _ = digests.read_statement(path)
    assert [came.stage for came in statement.images.values()].count("base") == 1 and len(statement.images) == 2
    more = statement.model_copy(update={"images": {"0" * 64: statement.images[sample.release.build_key]}})
    path.write_text(more.model_dump_json())
    digests.signature_of(path).write_bytes(sign(path.read_bytes(), keys["ann"], digests.NAMESPACE))
    confirm(sample.paths, sample.release, "ann", keys["ann"])
    assert len(digests.read_statement(path)[0].images) == 3, "of an older release it is kept"

    before = path.read_bytes()
    with pytest.raises(InputError, match="another key"):
        confirm(sample.paths, sample.release, "ann", keys["bob"])
    digests.signature_of(path).unlink()
    with pytest.raises(IntegrityError, match="not signed"):
        confirm(sample.paths, sample.release, "ann", keys["ann"])
    assert path.read_bytes() == before


def test_only_who_built_it_and_has_a_key_states_it(sample: Sample, keys: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="--builder"):
        confirm(sample.paths, sample.release, "../ann", keys["ann"])
    with pytest.raises(InputError, match="no key"):
        confirm(sample.paths, sample.release, "ann", None)
    sample.folder.mkdir(parents=True, exist_ok=True)
    (sample.folder / IMPORTS).write_text("[]")
    with pytest.raises(InputError, match="bundle"):
        confirm(sample.paths, sample.release, "ann", keys["ann"])
    assert not (sample.paths.project / BUILDERS).exists()
