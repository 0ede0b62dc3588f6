"""Layers of an image in containerd's store: one image has one manifest, whatever another program called its layers."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

from sparkpin.host.content_store import Sizes, stored_layers
from sparkpin.host.images import ImageInfo
from sparkpin.image.oci import OciLayer


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_plain_tar_has_one_media_type_and_a_compressed_one_its_own(tmp_path: Path) -> None:
    """BuildKit gives a parent's tars Docker's type."""
    docker, plain, packed = "application/vnd.docker.image.rootfs.diff.tar", digest(b"plain"), digest(b"packed")
    rows = [(plain, 5, docker), (packed, 6, f"{docker}.gzip")]
    names = ("digest", "size", "mediaType")
    manifest = json.dumps({"layers": [dict(zip(names, row, strict=True)) for row in rows]}).encode()
    index = json.dumps({"manifests": [{"digest": digest(manifest)}]}).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in (("index.json", index), (f"blobs/sha256/{digest(manifest)[7:]}", manifest)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    found = {
        "Id": "sha256:0",
        "RootFS": {"Layers": [plain, digest(b"unpacked")]},
        "Size": 1,
        "Os": "",
        "Architecture": "",
    }
    image = ImageInfo.of(found, [], keeps_layers=False)
    expected = [OciLayer(plain, 5), OciLayer(packed, 6, f"{docker}.gzip")]
    assert stored_layers(image, Sizes(tmp_path), lambda _: [buffer.getvalue()]) == expected
    assert [Sizes(tmp_path).get(one) for one in image.diff_ids] == [5, None]
