"""Other builders' statements, signed by real ssh keys: who counts for a release, who does not, who contradicts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from evidence_samples import Sample
from test_signing import keygen

from sparkpin.distribute.digests import BUILDERS, Confirmations, confirmations
from sparkpin.distribute.signing import sign
from sparkpin.distribute.verify import check_published
from sparkpin.releases.record import STATEMENT

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="apt-get install openssh-client")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Path]:
    """Of three people, of whom the list of signers does not name the stranger."""
    made = {name: keygen(tmp_path / name) for name in ("ann", "bob", "stranger")}
    lines = [f"{name} {made[name].with_suffix('.pub').read_text()}" for name in ("ann", "bob")]
    (tmp_path / "allowed").write_text("".join(lines))
    return made


def test_who_is_counted(sample: Sample, keys: dict[str, Path], tmp_path: Path) -> None:
    """Two; not a stranger, a changed statement, one for another purpose, one that is none, one without a signature."""
    release, allowed, folder = sample.release, tmp_path / "allowed", tmp_path / BUILDERS
    folder.mkdir(parents=True)
    made, image = (sample.folder / STATEMENT).read_bytes(), release.image.removeprefix("sha256:").encode()

    def state(name: str, key: Path, data: bytes = made, after: Callable[[bytes], bytes] = lambda data: data) -> None:
        (folder / f"{name}.json").write_bytes(after(data))
        (folder / f"{name}.json.sig").write_bytes(sign(data, key, "git" if name == "git" else "sparkpin"))

    for name, key in keys.items():
        state(name, key)
    state("again", keys["ann"])
    state("changed", keys["bob"], after=lambda data: data.replace(image, b"1" * 64))
    state("git", keys["bob"])
    state("none", keys["bob"], b'{"predicate": 1}')
    (folder / "unsigned.json").write_bytes(made)
    check = check_published(tmp_path, release, sample.records, allowed)
    assert check.result == "ok" and "2 builders (ann, bob)" in check.detail
    uncounted = re.findall(r"not counted: (\w+)\.json", check.detail)
    assert uncounted == ["changed", "git", "none", "stranger", "unsigned"]
    assert confirmations(tmp_path, release.build_key, release.image, None).builders == ()

    state("bob", keys["bob"], made.replace(image, b"1" * 64))  # who got another image of the same pins
    found = confirmations(tmp_path, release.build_key, release.image, allowed)
    assert (found.builders, found.others) == (("ann",), ("bob",))
    assert check_published(tmp_path, release, sample.records, allowed).result == "wrong"
    for path in folder.iterdir():
        path.unlink() if path.name.partition(".")[0] not in ("ann", "bob") else None
    nobody = confirmations(tmp_path, "0" * 64, release.image, allowed)
    assert nobody == Confirmations(), "of other pins"
    assert BUILDERS in nobody.line, "where a statement would lie"
