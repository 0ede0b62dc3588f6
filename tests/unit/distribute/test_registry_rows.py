"""What a registry says of an image's artifacts, by a stand-in: real ones keep no list that is as odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkpin.core.errors import IntegrityError
from sparkpin.distribute import registry
from sparkpin.image import oci
from sparkpin.image.oci import digest_of

IMAGE = b'{"layers": []}'
GONE = oci.described("", b"deleted there")


class Said:
    """A place of which only manifests are asked."""

    def __init__(self, rows: list[dict[str, Any]], *manifests: bytes) -> None:
        self.known = {f"@{digest_of(one)}": one for one in manifests}
        self.known[registry.referrers_tag(IMAGE)] = oci.index_of(rows)

    def manifest(self, reference: str) -> bytes | None:
        return self.known.get(reference)


def listed(place: Any) -> list[tuple[dict[str, Any], str]]:
    return registry.referrers(place, IMAGE)


def test_rows_of_others_stay_deleted_ones_and_those_beyond_what_is_read_too() -> None:
    own = registry.artifact(IMAGE, "sparkpin/a:base-0", [])
    rows = [GONE, oci.described("", own), *({"digest": f"row {number}"} for number in range(60))]
    rows[2:] = [GONE] * 48 + rows[2:]  # of rows that are read, each has a digest
    found = listed(Said(rows, own))
    assert [row for row, _ in found] == rows
    assert [about for _, about in found if about] == ["sparkpin/a:base-0"]


@pytest.mark.parametrize("digest", ["zz", "a" * 200_000, f"sha256:../../{'0' * 58}", 7, None])
def test_a_row_without_a_digest_is_refused_before_anything_is_asked(digest: object) -> None:
    with pytest.raises(IntegrityError) as refused:
        listed(Said([{"digest": digest}]))
    assert len(refused.value.message) < 1000


@pytest.mark.parametrize("rows", [[], ["sha256:../../../../etc/passwd"], ["sha256:" + "0" * 64] * 2])
def test_an_artifact_has_one_bundle(rows: list[str], tmp_path: Path) -> None:
    made = json.dumps({"layers": [{"mediaType": registry.BUNDLE, "digest": digest} for digest in rows]}).encode()
    place: Any = Said([])
    with (
        pytest.raises(IntegrityError, match="its artifact"),
        registry.opened(place, IMAGE, made, registry.Layout(tmp_path), print),
    ):
        pass


def test_a_blob_that_a_killed_run_left_in_part_is_dropped(tmp_path: Path) -> None:
    layout = registry.Layout(tmp_path)
    layout.add(b"whole")
    broken = layout.blob(digest_of(b"more than that"))
    broken.write_bytes(b"more")
    layout.drop_damaged()
    assert layout.blob(digest_of(b"whole")).is_file() and not broken.exists()
