"""A locked file that nobody offers any more: which release was made from it, and how that brings it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, make_sample

from sparkpin.build.lost_files import how_to_get
from sparkpin.build.origin import EXPORTS, IMPORTS
from sparkpin.build.record import record_file
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.record import Releases

UNKNOWN = LockedFile(name="x", version="1", file="x-1.whl", size=1, sha256="0" * 64)
LAST = (
    "images that were published need no such file: `invoke up --from oci://HOST/NAME`, or `invoke import "
    "oci://HOST/NAME:TAG`; "
    "or `invoke lock` takes what is offered now"
)


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
    assert f"`invoke export {sample.release.tag} FILE --with-store` on a machine that still has" in text


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
