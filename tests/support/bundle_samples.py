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
from sparkpin.distribute import attest, export, form
from sparkpin.distribute.export import BundleParts
from sparkpin.distribute.signing import Keys
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.listing import contents_of, write_contents
from sparkpin.image.oci import digest_of
from sparkpin.releases.record import Releases


def quiet(line: str) -> None:
    pass


def sample_of(folder: Path, keys: Keys | None = None) -> Sample:
    """With statement, logs and listings of layers. keys: that sign it, if any."""
    sample = listed(make_sample(folder))
    attest.attest(sample.paths, sample.release, keys or Keys())
    (sample.folder / "smoke").mkdir()
    (sample.folder / "smoke/server.log").write_text("ready\n")
    return sample


def listed(sample: Sample) -> Sample:
    """With the listings of its layers."""
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
    """A bundle with the image, as `export` writes it from the layers that an engine gave it."""
    layers = layers_of(sample)
    config = sample.records[-1].config.encode()
    sizes = [oci.OciLayer(diff_id, len(data)) for diff_id, data in layers.items()]
    files = oci.layout(config, sizes, sample.release.tag) | {oci.blob(diff_id): d for diff_id, d in layers.items()}
    pieces = export.release_pieces(sample.paths, sample.release, sample.records)
    pieces += export.input_pieces(sample.paths, sample.release, sample.records)
    pieces += [export.of_bytes(name, data) for name, data in files.items()]
    export.write(target, sample.release, BundleParts(), pieces, quiet)
    return target


@dataclass
class Parts:
    """A bundle in pieces. members: all but the index, in their order; index: changes of it."""

    members: dict[str, bytes]
    index: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Parts:
        with tarfile.open(path, "r:") as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        index = json.loads(found.pop(form.INDEX))
        return cls(found, index)

    def edit(self, name: str, change: Callable[[Any], Any]) -> None:
        """Change a JSON member."""
        value = json.loads(self.members[name])
        self.members[name] = export.as_json(change(value) or value)

    def pack(self) -> bytes:
        """With an index that fits: whoever rewrites a bundle rewrites it, too."""
        rows = [form.MemberRow(name="x", size=len(data), sha256=sha256(data)) for data in self.members.values()]
        named = [row.model_copy(update={"name": name}) for row, name in zip(rows, self.members, strict=True)]
        index = form.BundleIndex.model_validate({**self.index, "members": []}).model_copy(update={"members": named})
        return tar_of({form.INDEX: index.text, **self.members})


def with_checkpoint(parts: Parts, sample: Sample, files: list[str], data: bytes = b"x") -> Parts:
    """With a finished checkpoint, all of whose files have the same bytes."""
    row = {"size": len(data), "sha256": sha256(data)}
    value = {"model": sample.release.model, "key": sample.release.checkpoint_key, "files": dict.fromkeys(files, row)}
    members = {**parts.members, form.CHECKPOINT: json.dumps(value).encode()}
    members[form.CHECKPOINTS + sha256(data)] = data
    return Parts(members, parts.index | {"checkpoint": True})


def without_evidence(parts: Parts) -> Parts:
    """What whoever changes the records has to leave out."""
    members = {name: data for name, data in parts.members.items() if not name.startswith(form.EVIDENCE)}
    return Parts(members, parts.index)


def with_input(parts: Parts, path: str, data: bytes) -> Parts:
    """Another project file, by a sender who leaves the statement out."""
    other = without_evidence(parts)
    release = json.loads(other.members[form.RELEASE])
    old = release["inputs"].get(path)
    release["inputs"][path] = sha256(data)
    if old is not None and old not in release["inputs"].values():
        del other.members[f"{form.INPUTS}{old}"]
    other.members[form.RELEASE] = json.dumps(release).encode()
    other.members[f"{form.INPUTS}{sha256(data)}"] = data
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
    lock = json.loads(parts.members[form.INPUTS + release.inputs[path]])
    models = json.loads(parts.members[form.INPUTS + release.inputs[pins]])
    for name, data in FILES.items():
        files = [row("config.json", "config.json", data)]
        models["repositories"][name] |= {"files": files, "headers": [], "tensors": []}
    models["repositories"]["fp8"]["headers"] = [row("a.safetensors", "a.safetensors", HEADER)]
    models["repositories"]["fp8"]["tensors"] = [row("x.weight", "a.safetensors", TENSOR)]
    other = with_input(parts, path, json.dumps(lock | {"debs": [deb], "wheels": [wheel]}).encode())
    other = with_input(other, pins, json.dumps(models).encode())
    for record in sample.records:
        value = json.loads(other.members[f"{form.IMAGES}{record.key}.json"])
        value["context"] = [old for old in value["context"] if not old["what"].startswith("wheel ")]
        if record.rootfs:
            value["rootfs"]["debs"] = [deb]
            value["context"].append(used)
        other.members[f"{form.IMAGES}{record.key}.json"] = json.dumps(value).encode()
    other.members |= {form.STORE + sha256(data): data for data in (DEB, WHEEL, *MODELS)}
    return Parts(other.members, other.index | {"store": True})


def row(name: str, file: str, data: bytes) -> dict[str, Any]:
    return {"name": name, "file": file, "size": len(data), "sha256": sha256(data)}


def with_top_layer(parts: Parts, sample: Sample, tar: bytes) -> Parts:
    """With another topmost layer; configuration, records and layout say so."""
    release, record = sample.release, sample.records[-1]
    old, new = release.diff_ids[-1], digest_of(tar)
    diff_ids = [*release.diff_ids[:-1], new]
    config = json.loads(record.config)
    config["rootfs"]["diff_ids"] = diff_ids
    made = json.dumps(config).encode()
    other = without_evidence(parts)
    sizes = [oci.OciLayer(diff_id, len(other.members[oci.blob(diff_id)])) for diff_id in release.diff_ids]
    for name in oci.layout(record.config.encode(), sizes, release.tag):
        del other.members[name]
    del other.members[oci.blob(old)]
    other.members |= oci.layout(made, [*sizes[:-1], oci.OciLayer(new, len(tar))], release.tag) | {oci.blob(new): tar}
    other.members[form.listing(new)] = other.members.pop(form.listing(old))
    other.edit(form.RELEASE, lambda value: value | {"image": digest_of(made), "diff_ids": diff_ids})
    change = {"config": made.decode(), "config_digest": digest_of(made), "diff_ids": diff_ids, "layers": []}
    other.edit(f"{form.IMAGES}{record.key}.json", lambda value: value | change)
    return other


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    for name, data in members.items():
        out.write(oci.member(name, data))
    return out.getvalue() + END


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def offset_of(data: bytes, name: str) -> int:
    """Where a member's header begins."""
    position = 0
    while (found := data.index(name.encode(), position)) % BLOCK:
        position = found + 1
    return found


def state_of(sample: Sample) -> dict[str, bytes]:
    """Everything below the home, to see that nothing changed."""
    root = Releases(sample.paths).root.parent
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}
