"""The form of images as files: literal bytes, since other tools and older bundles depend on them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.image.oci import digest_of
from sparkpin.image.seal import image_config

DIFF_IDS = ("sha256:" + "1" * 64, "sha256:" + "2" * 64)
CONFIG = image_config({"Cmd": ["a"]}, os="linux", architecture="arm64", diff_ids=DIFF_IDS)
LAYERS = [oci.OciLayer(DIFF_IDS[0], 1024), oci.OciLayer(DIFF_IDS[1], 2048)]
TAG = "sparkpin/tiny:base-0123456789ab"
CONFIG_DIGEST = "sha256:8abaa7fa3b24dfb13d54c6e8f9c1349f9a711295b23208b47d7b502830c167ce"
MANIFEST_DIGEST = "sha256:3e92fdf5783db6d1f215e7525d5aafabaca38fc5f1f46d007ea3ff0f5d3f3ec5"
INDEX_SHA256 = "0ae1e7d2d0b774eba0e343a635e4af56579ef2dc9d04626d80466e813c52b31b"


def test_layout_is_literal() -> None:
    files = oci.layout(CONFIG, LAYERS, TAG)
    manifest = oci.manifest(CONFIG, LAYERS)
    assert list(files) == [
        "oci-layout",
        "index.json",
        "manifest.json",
        oci.blob(digest_of(manifest)),
        oci.blob(digest_of(CONFIG)),
    ]
    assert files["oci-layout"] == b'{"imageLayoutVersion":"1.0.0"}'
    assert digest_of(CONFIG) == CONFIG_DIGEST
    assert digest_of(manifest) == MANIFEST_DIGEST
    assert hashlib.sha256(files["index.json"]).hexdigest() == INDEX_SHA256
    (row,) = json.loads(files["index.json"])["manifests"]
    assert row["annotations"] == {"org.opencontainers.image.ref.name": TAG}
    assert row["platform"] == {"architecture": "arm64", "os": "linux"}
    assert json.loads(files["manifest.json"])[0]["RepoTags"] == [TAG]


def test_load_archive_holds_the_layers_that_are_given() -> None:
    images = [oci.OciImage(CONFIG, DIFF_IDS, (TAG, "sparkpin/stack-tiny:base-0123456789ab"))]
    tar = Slice(io.BytesIO(b"--tar--"), 2, 3)
    data = b"".join(oci.load_archive(images, {DIFF_IDS[1]: tar}))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    config = f"{digest_of(CONFIG).removeprefix('sha256:')}.json"
    assert list(found) == [oci.blob(DIFF_IDS[1]), config, "manifest.json"]
    assert found[oci.blob(DIFF_IDS[1])] == b"tar" and found[config] == CONFIG
    (row,) = json.loads(found["manifest.json"])
    assert row == {"Config": config, "Layers": [oci.blob(d) for d in DIFF_IDS], "RepoTags": list(images[0].tags)}
