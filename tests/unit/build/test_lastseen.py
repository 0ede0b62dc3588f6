"""A locked file that nobody offers any more: which release was made from it, and how that brings it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample
from test_fetch import locked as locked
from test_fetch import stack
from wheelhouse import Index, make_wheel

from sparkpin.build.lost_files import how_to_get
from sparkpin.build.origin import EXPORTS, IMPORTS
from sparkpin.build.record import BuildInput, record_file, write_record
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.fetch.stack import fetch_stack
from sparkpin.pins.schema import LockedFile, StackLock
from sparkpin.releases.record import Releases

UNKNOWN = LockedFile(name="x", version="1", file="x-1.whl", size=1, sha256="0" * 64)
LAST = "or `invoke lock` takes what is offered now"


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return make_sample(tmp_path)


@pytest.fixture
def paths(sample: Sample) -> Paths:
    return sample.paths


def a_wheel(sample: Sample) -> LockedFile:
    row = next(row for row in sample.records[0].context if row.what.startswith("wheel "))
    return LockedFile(name="w", version="1", file=Path(row.path).name, size=row.size, sha256=row.sha256)


def a_deb(sample: Sample) -> LockedFile:
    spec = sample.records[0].rootfs
    assert spec
    return spec.debs[0]


def note(sample: Sample, name: str, *rows: dict[str, Any]) -> None:
    write_json(sample.folder / name, list(rows))


def test_a_bundle_with_its_store_is_named(sample: Sample) -> None:
    old = {"file": "/mnt/old.tar", "with_store": True, "time": "2026-11-01T10:00:00Z"}
    new = {"file": "/mnt/usb/base.tar", "with_store": True, "time": "2026-11-02T10:00:00Z"}
    bare = {"file": "/mnt/bare.tar", "with_store": False, "time": "2026-11-03T10:00:00Z"}
    note(sample, EXPORTS, old, new, bare)
    assert how_to_get(sample.paths, [a_deb(sample)]) == (
        f"{sample.release.tag} was made from it: `invoke import /mnt/usb/base.tar` (exported 2026-11-02 with its "
        f"store) brings it back; {LAST}"
    )


def test_the_bundle_that_a_release_came_in_is_named(sample: Sample) -> None:
    note(sample, IMPORTS, {"file": "/mnt/b.tar", "checks": [], "time": "2026-11-02T10:00:00Z"})
    assert "`invoke import /mnt/b.tar` (as on 2026-11-02)" in how_to_get(sample.paths, [a_deb(sample)])


@pytest.mark.parametrize("rows", [None, "no list", [1, {"file": 3}], [{"with_store": True}]])
def test_without_a_bundle_the_release_is_named(sample: Sample, rows: object) -> None:
    if rows is not None:
        write_json(sample.folder / EXPORTS, rows)
    text = how_to_get(sample.paths, [a_wheel(sample)])
    assert f"`invoke export {sample.release.tag} --with-store --output FILE` on a machine that still has" in text


def test_what_no_release_was_made_from_is_told(sample: Sample) -> None:
    text = how_to_get(sample.paths, [UNKNOWN])
    assert text.startswith("no release on this machine was made from it: `invoke import` a bundle")
    assert text.endswith(LAST)
    deb = a_deb(sample)
    both = how_to_get(sample.paths, [UNKNOWN, a_deb(sample)])
    assert (
        f"was made from {a_deb(sample).file}: " in both and "no release on this machine was made from x-1.whl" in both
    )
    # A record that is gone explains nothing, and hides nothing else.
    record_file(sample.paths, sample.records[0].rendered).unlink()
    assert "no release on this machine" in how_to_get(sample.paths, [deb])


@pytest.mark.parametrize("text", ["{", "{}", '{"schema": 99}'])
def test_a_damaged_record_of_another_release_hides_nothing(sample: Sample, text: str) -> None:
    records = Releases(sample.paths)
    for path in (records.record_path(sample.release).with_name(f"base-{'0' * 12}.json"), records.pointer_path("other")):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    note(sample, EXPORTS, {"file": "/mnt/b.tar", "with_store": True, "time": "2026-11-02T10:00:00Z"})
    assert "invoke import /mnt/b.tar" in how_to_get(sample.paths, [a_deb(sample)])


@pytest.mark.parametrize("lost", ["file", "version", "project", "bytes"])
def test_fetch_says_where_a_vanished_wheel_is(
    sample: Sample, index: Index, locked: Callable[..., StackLock], lost: str
) -> None:
    """A real index, which loses a file, a version or all of a project, or has other bytes than before."""
    wheel = make_wheel(index.folder, "a", size=10)
    record = sample.records[0]
    row = BuildInput(path=f"wheels/all/{wheel.file}", sha256=wheel.sha256, size=wheel.size, what="wheel a 1.0")
    write_record(sample.paths, record.model_copy(update={"context": [*record.context, row]}))
    note(sample, EXPORTS, {"file": "/mnt/b.tar", "with_store": True, "time": "2026-11-02T10:00:00Z"})
    path = index.folder / wheel.file
    if lost == "file":
        index.gone.add(wheel.file)
    elif lost == "bytes":
        make_wheel(index.folder, "a", size=11)
    else:
        path.unlink()
    if lost == "version":
        make_wheel(index.folder, "a", "2.0")
    with pytest.raises(IntegrityError if lost == "bytes" else NetworkError) as caught:
        fetch_stack(sample.paths, stack(), locked(wheel), print)
    assert wheel.file in caught.value.message and wheel.sha256 in caught.value.message
    assert ("no longer offered by the index" in caught.value.message) == (lost in ("file", "version"))
    advice = f"{sample.release.tag} was made from it: `invoke import /mnt/b.tar` (exported 2026-11-02 with its store)"
    assert advice in caught.value.next_step
    assert ("pip config list" in caught.value.next_step) == (lost == "project"), "an index that is down says the same"
