"""Bundles for tests: of a release whose layers are made up, and taken apart and packed again as an attacker would."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence_samples import Sample, layer_tar, make_sample

from sparkpin.build.record import layer_file
from sparkpin.distribute import layout, signing, transfer
from sparkpin.distribute.layout import Row
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import evidence_of
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import contents_of, write_contents
from sparkpin.image.oci import digest_of
from sparkpin.image.seal import image_config


def sample_of(folder: Path, keys: Keys | None = None) -> Sample:
    """With its statement. keys: that sign it, if any."""
    sample = make_sample(folder)
    signing.attest(sample.paths, sample.release, keys or Keys())
    return sample


def listed(sample: Sample) -> Sample:
    """With the listings of its layers, which a build writes."""
    for diff_id, tar in layers_of(sample).items():
        write_contents(layer_file(sample.paths, diff_id), contents_of(read_layer(io.BytesIO(tar), everything=True)))
    return sample


def layers_of(sample: Sample) -> dict[str, bytes]:
    """Diff ID -> tar."""
    names = ["rootfs", *(f"{record.stage} {layer.name}" for record in sample.records for layer in record.layers)]
    layers = {digest_of(tar): tar for tar in map(layer_tar, names)}
    assert tuple(layers) == sample.release.diff_ids
    return layers


def write_sample(sample: Sample, target: Path) -> Path:
    """A bundle, as `export` writes it from the layers that an engine gave it."""
    claimed = evidence_of(sample.paths, sample.release)
    layers = {diff_id: layout.slice_of(tar) for diff_id, tar in layers_of(sample).items()}
    layout.write(target, transfer.layout_of(claimed, layers))
    return target


@dataclass
class Parts:
    """A bundle in pieces: what the artifact names, by title, and the image as its manifest has it.

    edit_artifact, edit_image: change the manifests that follow from these before they are packed.
    """

    members: dict[str, bytes]
    tag: str
    config: bytes
    layers: dict[str, bytes]
    edit_artifact: Callable[[dict[str, Any]], object] = lambda value: None
    edit_image: Callable[[dict[str, Any]], object] = lambda value: None

    @classmethod
    def of(cls, path: Path) -> Parts:
        files = members_of(path.read_bytes())
        (row,) = json.loads(files[oci.INDEX])["manifests"]
        made, image = (json.loads(files[oci.blob(d)]) for d in (row["annotations"][layout.ARTIFACT], row["digest"]))
        titles = {one["annotations"][layout.TITLE]: files[oci.blob(one["digest"])] for one in made["layers"]}
        layers = {one["digest"]: files[oci.blob(one["digest"])] for one in image["layers"]}
        return cls(titles, row["annotations"][oci.REF_NAME], files[oci.blob(image["config"]["digest"])], layers)

    def copy(self, **changes: Any) -> Parts:
        return dataclasses.replace(self, members=dict(self.members), layers=dict(self.layers), **changes)

    def edit(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change a JSON member."""
        value = json.loads(self.members[name])
        self.members[name] = layout.as_json(change(value) or value)

    def files(self) -> dict[str, bytes]:
        """With manifests that fit: whoever rewrites a bundle rewrites them, too."""
        sizes = [oci.OciLayer(diff_id, len(tar)) for diff_id, tar in self.layers.items()]
        honest = oci.manifest(self.config, sizes)
        image = changed(honest, self.edit_image)
        rows = [Row(title=title, digest=digest_of(data), size=len(data)) for title, data in self.members.items()]
        made = changed(layout.artifact(self.tag, rows, image), self.edit_artifact)
        files = layout.layout_files(self.tag, self.config, sizes, made)
        del files[oci.blob(digest_of(honest))]
        index = json.loads(files[oci.INDEX])
        index["manifests"][0] |= oci.described(oci.MANIFEST_TYPE, image)
        files |= {oci.INDEX: oci.text(index), oci.blob(digest_of(image)): image}
        files |= {oci.blob(digest_of(data)): data for data in self.members.values()}
        return files | {oci.blob(diff_id): tar for diff_id, tar in self.layers.items()}

    def pack(self) -> bytes:
        return tar_of(self.files())


def changed(manifest: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(manifest)
    change(value)
    return oci.text(value)


def members_of(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def without_evidence(parts: Parts) -> Parts:
    """What whoever changes the records has to leave out."""
    other = parts.copy()
    for name in layout.EVIDENCE:
        other.members.pop(name, None)
    return other


def with_input(parts: Parts, path: str, data: bytes) -> Parts:
    """Another project file, by a sender who leaves the statement out."""
    other = without_evidence(parts)
    release = json.loads(other.members[layout.RELEASE])
    old = release["inputs"].get(path)
    release["inputs"][path] = sha256(data)
    if old is not None and old not in release["inputs"].values():
        del other.members[f"{layout.INPUTS}{old}"]
    other.members[layout.RELEASE] = layout.as_json(release)
    other.members[f"{layout.INPUTS}{sha256(data)}"] = data
    return other


DEB, WHEEL = b"a package", b"a wheel"  # what lies in the store of `with_store`
FILES = {"int4": b"a file of the model", "fp8": b"a file of its other repository"}
HEADER, TENSOR = b"a header of it", b"a tensor of it"
MODELS = (*FILES.values(), HEADER, TENSOR)


def with_store(parts: Parts, sample: Sample) -> Parts:
    """With all that was fetched: one package, one wheel, one file in each repository of the model, of that which is not
    its base a header and a tensor; records and locks say so.
    """
    release = sample.release
    deb = {**row("made", "made_1.0_amd64.deb", DEB), "version": "1.0"}
    wheel = {**row("made", "made-1.0.whl", WHEEL), "version": "1.0"}
    used = {"path": "made-1.0.whl", "size": len(WHEEL), "sha256": sha256(WHEEL), "what": "wheel made 1.0"}
    path, pins = f"pins/stacks/{release.stack}.lock", f"pins/models/{release.model}.lock"
    lock = json.loads(parts.members[layout.INPUTS + release.inputs[path]])
    models = json.loads(parts.members[layout.INPUTS + release.inputs[pins]])
    for name, data in FILES.items():
        files = [row("config.json", "config.json", data)]
        models["repositories"][name] |= {"files": files, "headers": [], "tensors": []}
    models["repositories"]["fp8"]["headers"] = [row("a.safetensors", "a.safetensors", HEADER)]
    models["repositories"]["fp8"]["tensors"] = [row("x.weight", "a.safetensors", TENSOR)]
    other = with_input(parts, path, json.dumps(lock | {"debs": [deb], "wheels": [wheel]}).encode())
    other = with_input(other, pins, json.dumps(models).encode())
    for record in sample.records:
        value = json.loads(other.members[f"{layout.IMAGES}{record.key}.json"])
        value["context"] = [old for old in value["context"] if not old["what"].startswith("wheel ")]
        if record.rootfs:
            value["rootfs"]["debs"] = [deb]
            value["context"].append(used)
        other.members[f"{layout.IMAGES}{record.key}.json"] = layout.as_json(value)
    other.members |= {layout.STORE + sha256(data): data for data in (DEB, WHEEL, *MODELS)}
    return other


def row(name: str, file: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "file": file, "size": len(data), "sha256": sha256(data)}


def with_top_layer(parts: Parts, sample: Sample, tar: bytes) -> Parts:
    """With another topmost layer; configuration, records and layout say so."""
    release, record = sample.release, sample.records[-1]
    old, new = release.diff_ids[-1], digest_of(tar)
    diff_ids = [*release.diff_ids[:-1], new]
    config = json.loads(record.config)["config"]
    made = image_config(config, os="linux", architecture="amd64", diff_ids=diff_ids)
    other = without_evidence(parts)
    del other.layers[old]
    other.layers[new], other.config = tar, made
    other.edit(layout.RELEASE, lambda value: value | {"image": digest_of(made), "diff_ids": diff_ids})
    change = {"config": made.decode(), "config_digest": digest_of(made), "diff_ids": diff_ids, "layers": []}
    other.edit(f"{layout.IMAGES}{record.key}.json", lambda value: value | change)
    return other


def tar_of(members: dict[str, bytes]) -> bytes:
    return b"".join(oci.member(name, data) for name, data in members.items()) + END


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def offset_of(data: bytes, name: str) -> int:
    """Where a member's header begins."""
    position = 0
    while (found := data.index(name.encode(), position)) % BLOCK:
        position = found + 1
    return found
