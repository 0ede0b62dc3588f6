"""Bundles: the same bytes each time, taken whole, and refused whole when anything about them is not right."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import os
import re
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from bundle_samples import (
    DEB,
    FILES,
    HEADER,
    MODELS,
    TENSOR,
    WHEEL,
    Parts,
    offset_of,
    quiet,
    sample_of,
    sha256,
    state_of,
    tar_of,
    with_checkpoint,
    with_input,
    with_store,
    with_top_layer,
    without_evidence,
    write_sample,
)
from evidence_samples import Sample

from sparkpin.build.record import layer_file
from sparkpin.bundle import export as exporting
from sparkpin.bundle import form, take_in
from sparkpin.bundle.copy import Sent
from sparkpin.bundle.export import BundleParts, export
from sparkpin.bundle.form import (
    CHECKPOINT,
    CHECKPOINTS,
    EVIDENCE,
    IMAGES,
    INDEX,
    INPUTS,
    LAYERS,
    RELEASE,
    STORE,
    open_bundle,
)
from sparkpin.commands import bundle as commands_bundle
from sparkpin.commands import evidence as commands_evidence
from sparkpin.core import files
from sparkpin.core.errors import DiskError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.evidence.signing import ALLOWED_SIGNERS, Keys
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.image import listing, oci
from sparkpin.image.layer_tar import BLOCK, END, Slice, block, padded, read_layer
from sparkpin.image.seal import digest_of
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import SBOM, STATEMENT, tag_of

NO_ENGINE = cast(Engine, None)  # whoever asks it anything fails


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return sample_of(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module")
def good(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(sample, tmp_path_factory.mktemp("bundle") / "good.tar")


@pytest.fixture
def parts(good: Path) -> Parts:
    return Parts.of(good)


def refused(tmp_path: Path, data: bytes) -> str:
    """Why an import is refused, which must leave no trace."""
    path = tmp_path / "bad.tar"
    path.write_bytes(data)
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with pytest.raises(IntegrityError) as caught:
        take_in.import_bundle(paths, NO_ENGINE, path, quiet)
    assert caught.value.exit_code == 5 and caught.value.next_step
    assert [child.name for child in tmp_path.iterdir()] == ["bad.tar"]
    return caught.value.message


def test_same_bytes_each_time(sample: Sample, good: Path, tmp_path: Path) -> None:
    assert write_sample(sample, tmp_path / "again.tar").read_bytes() == good.read_bytes()
    other = write_sample(sample_of(tmp_path / "other"), tmp_path / "other.tar")  # as on another machine
    assert other.read_bytes() == good.read_bytes()


def test_whole_bundle_is_taken(sample: Sample, good: Path) -> None:
    with open_bundle(good) as opened:
        assert opened.release == sample.release
        assert opened.records == sample.records
        assert list(opened.layers) == list(sample.release.diff_ids)
        assert set(opened.evidence) == {"provenance.json", "sbom.cdx.json", "smoke/server.log"}
        assert {check.result for check in opened.checks} == {"ok", "open"}


def test_packing_again_gives_the_same(parts: Parts, good: Path) -> None:
    assert parts.pack() == good.read_bytes()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file") as failed, open_bundle(tmp_path / "none.tar"):
        pass
    assert f"ls {tmp_path}" in failed.value.next_step and "import" not in failed.value.next_step


def test_cut_short_anywhere(good: Path, tmp_path: Path) -> None:
    data = good.read_bytes()
    middle = offset_of(data, RELEASE)
    for length in (0, 1, 511, 512, 513, middle, middle + 100, middle + 512, len(data) // 2, len(data) - 1024, -1):
        assert "refused, and nothing of it was used" in refused(tmp_path, data[:length])


@pytest.mark.parametrize("more", [b"\0", END, b"x" * 512, b"PK\x03\x04"])
def test_more_at_its_end(good: Path, tmp_path: Path, more: bytes) -> None:
    assert "cut short, or added to" in refused(tmp_path, good.read_bytes() + more)


def test_bytes_in_the_padding(good: Path, tmp_path: Path) -> None:
    data = bytearray(good.read_bytes())
    name = f"{EVIDENCE}smoke/server.log"
    start = offset_of(bytes(data), name) + BLOCK
    data[start + 20] = 1
    assert f"there are bytes between {name} and the next" in refused(tmp_path, bytes(data))
    data[start + 20] = 0
    data[-1] = 1
    assert "does not end as an archive does" in refused(tmp_path, bytes(data))


def test_a_flipped_bit(good: Path, tmp_path: Path, sample: Sample) -> None:
    data = bytearray(good.read_bytes())
    data[offset_of(bytes(data), oci.blob(sample.release.diff_ids[0])) + BLOCK] ^= 1
    assert "wanted sha256=" in refused(tmp_path, bytes(data))


@pytest.mark.parametrize("pack", [gzip.compress, lambda data: b"\x28\xb5\x2f\xfd" + data])
def test_compressed_as_a_whole(good: Path, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    assert "it is compressed" in refused(tmp_path, pack(good.read_bytes()))


@pytest.mark.parametrize("data", [b"", b"hello", tar_of({"a": b"b"}), block(INDEX.encode(), b"0", size=1 << 33)])
def test_something_else(tmp_path: Path, data: bytes) -> None:
    assert "it does not begin with sparkpin/bundle.json" in refused(tmp_path, data)


@pytest.mark.parametrize(
    "header",
    [
        block(b"x", b"2", link=b"/etc/passwd"),
        block(b"x", b"1", link=b"../../etc/passwd"),
        block(b"x", b"5"),
        block(b"x", b"3", device=(1, 3)),
        block(b"../../../etc/cron.d/x", b"0", size=6),
        block(b"/etc/cron.d/x", b"0", size=6),
        block(b"././@LongLink", b"L", size=6),
        block(b"././@PaxHeader", b"x", size=6, pax=True),
        b"\0" * BLOCK,
    ],
)
def test_another_header_than_the_index_says(good: Path, tmp_path: Path, header: bytes) -> None:
    """Links, devices, names outside and extensions: a header is compared, never interpreted."""
    data = bytearray(good.read_bytes())
    start = offset_of(bytes(data), f"{EVIDENCE}smoke/server.log")
    data[start : start + BLOCK] = header
    message = refused(tmp_path, bytes(data))
    assert f"where '{EVIDENCE}smoke/server.log' (6 bytes) has to be lies" in message


@pytest.mark.parametrize("change", [{"mode": 0o4755}, {"uid": 1}, {"mtime": 1}])
def test_other_metadata(good: Path, tmp_path: Path, change: dict[str, int]) -> None:
    data = bytearray(good.read_bytes())
    name = f"{EVIDENCE}smoke/server.log"
    start = offset_of(bytes(data), name)
    data[start : start + BLOCK] = block(name.encode(), b"0", size=6, **change)
    assert "has to be lies" in refused(tmp_path, bytes(data))


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/x",
        "sparkpin/evidence/../../x",
        "sparkpin/evidence//x",
        "sparkpin/evidence/.ssh/x",
        "sparkpin/evidence/" + "x" * 100,
        "sparkpin/evidence/a\\b",
        "sparkpin/evidence/a\n",
        "",
    ],
)
def test_names_outside_the_grammar(parts: Parts, tmp_path: Path, name: str) -> None:
    parts.members[name] = b"x"
    assert "members." in refused(tmp_path, parts.pack())


def test_members_that_no_record_asks_for(parts: Parts, tmp_path: Path) -> None:
    for name in ("x", "sparkpin/x", f"{INPUTS}{sha256(b'x')}", f"{STORE}{sha256(b'x')}", f"blobs/sha256/{'0' * 64}"):
        other = Parts({**parts.members, name: b"x"}, parts.index)
        assert f"{name} is not what a record asks for" in refused(tmp_path, other.pack())


def test_a_name_twice(good: Path, parts: Parts, tmp_path: Path) -> None:
    index = json.loads(tar_index(good))
    index["members"].append(index["members"][0])
    model = form.BundleIndex.model_validate(index)
    data = tar_of({INDEX: model.text, **parts.members})
    assert "names a member twice" in refused(tmp_path, data)


def tar_index(path: Path) -> bytes:
    data = path.read_bytes()
    size = int(data[124:135], 8)
    return data[BLOCK : BLOCK + size]


def test_an_index_that_is_written_otherwise(good: Path, parts: Parts, tmp_path: Path) -> None:
    text = tar_index(good)
    for other in (text + b" ", text.replace(b'"schema": 1', b'"schema": 1, "schema": 1'), text[:-1]):
        data = tar_of({INDEX: other, **parts.members})
        assert INDEX in refused(tmp_path, data)
    newer = tar_of({INDEX: text.replace(b'"schema": 1', b'"schema": 2'), **parts.members})
    assert "a newer one wrote it" in refused(tmp_path, newer)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"{}", b"[]", b'{"schema": 1e999}', b"\xff", b"1" * 5000])
def test_an_index_that_is_none(tmp_path: Path, text: bytes) -> None:
    assert INDEX in refused(tmp_path, tar_of({INDEX: text}))


def test_huge_declared_sizes(good: Path, parts: Parts, tmp_path: Path) -> None:
    """Compared with the file's own size before anything is read."""
    index = json.loads(tar_index(good))
    index["members"][5]["size"] = 1 << 60
    data = tar_of({INDEX: form.BundleIndex.model_validate(index).text, **parts.members})
    assert "cut short" in refused(tmp_path, data)
    assert "does not begin with" in refused(tmp_path, block(INDEX.encode(), b"0", size=form.JSON_LIMIT + 1) + data)


def test_huge_json(parts: Parts, tmp_path: Path) -> None:
    parts.members[RELEASE] += b" " * form.JSON_LIMIT
    assert f"{form.JSON_LIMIT:,} are allowed" in refused(tmp_path, parts.pack())


def listing_bomb(size: int) -> bytes:
    packing = zlib.compressobj(9, wbits=31)
    data = packing.compress(b'{"contents":1,"entries":1}\n["')
    for _ in range(size >> 20):
        data += packing.compress(b"a" * (1 << 20))
    return data + packing.compress(b'"]\n') + packing.flush()


def test_a_listing_that_unpacks_to_gigabytes(parts: Parts, tmp_path: Path) -> None:
    name = next(name for name in parts.members if name.startswith(LAYERS))
    parts.members[name] = listing_bomb(1 << 30)
    assert len(parts.members[name]) < 2 << 20
    assert f"longer than {listing.LIMIT:,} bytes" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize(
    "row", [[1], ["a", "hole", 1, 2, 3, 4], ["a", "file", "rwx", 0, 0, 0], ["a", "file", -1, 0, 0, 0], [[]]]
)
def test_a_listing_of_something_else(parts: Parts, tmp_path: Path, row: list[Any]) -> None:
    name = next(name for name in parts.members if name.startswith(LAYERS))
    text = '{"contents":1,"entries":1}\n' + json.dumps(row, separators=(",", ":")) + "\n"
    parts.members[name] = gzip.compress(text.encode())
    assert name in refused(tmp_path, parts.pack())


def test_a_member_that_is_missing(parts: Parts, tmp_path: Path) -> None:
    inputs = [name for name in parts.members if name.startswith(INPUTS)]
    for name in parts.members:
        if not name.startswith(EVIDENCE) and name not in inputs[3:]:
            less = {other: data for other, data in parts.members.items() if other != name}
            message = refused(tmp_path, Parts(less, parts.index).pack())
            assert "missing" in message or "is not the one of an image" in message, name


def test_a_blob_that_is_not_its_name(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    parts.members[oci.blob(sample.release.diff_ids[1])] = b"something else"
    assert "is not the one of an image with plain layers" in refused(tmp_path, parts.pack())
    again = Parts.of(tmp_path / "bad.tar")
    again.members[oci.blob(sample.release.diff_ids[1])] = parts.members[oci.blob(sample.release.diff_ids[0])]
    assert "its sha256 is" in refused(tmp_path, again.pack())


def test_an_input_that_is_not_its_name(parts: Parts, tmp_path: Path) -> None:
    name = next(name for name in parts.members if name.startswith(INPUTS))
    parts.members[name] = b"something else"
    assert "is not what its evidence says: kept inputs" in refused(tmp_path, parts.pack())


def test_compressed_or_foreign_layers(parts: Parts, tmp_path: Path) -> None:
    for old, new in (
        (b"layer.v1.tar", b"layer.v1.tar+gzip"),
        (b"layer.v1.tar", b"layer.nondistributable.v1.tar"),
        (b'"schemaVersion":2', b'"schemaVersion":2,"x":1'),
    ):
        members = {}
        for name, data in parts.members.items():
            changed = data.replace(old, new) if name.startswith("blobs/") else data
            members[name if changed == data else oci.blob(f"sha256:{sha256(changed)}")] = changed
        assert "plain layers" in refused(tmp_path, Parts(members, parts.index).pack())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image": f"sha256:{'0' * 64}"}, "image"),
        ({"diff_ids": [f"sha256:{'0' * 64}"]}, "layers"),
        ({"argv": ["sh", "-c", "evil"]}, "release key"),
        ({"env": {"LD_PRELOAD": "x"}}, "release key"),
        ({"checkpoint_key": "0" * 64}, "release key"),
        ({"recipe": "../../x"}, "recipe"),
        ({"recipe": "stack-x"}, "tag"),
        ({"tag": "sparkpin/other:base-000000000000"}, "is of"),
        ({"model": "../x"}, "model"),
        ({"schema": 2}, "schema"),
        ({"surprise": 1}, "surprise"),
        ({"inputs": {"../../../etc/cron.d/x": "0" * 64}}, "names a file '../../../etc/cron.d/x'"),
        ({"inputs": {"/etc/cron.d/x": "0" * 64}}, "names a file '/etc/cron.d/x'"),
        ({"executable": ["../x"]}, "names of project files"),
        ({"inputs": {}}, "inputs"),
    ],
)
def test_a_record_that_says_something_else(parts: Parts, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    parts.edit(RELEASE, lambda value: value | change)
    assert why in refused(tmp_path, parts.pack())


def test_release_records_that_are_none(parts: Parts, tmp_path: Path) -> None:
    twice = parts.members[RELEASE].replace(b'"state": "built"', b'"state": "built", "state": "built"')
    for data in (b"[]", b"{}", b"null", b"\xff", b'"x"', b"[" * 10_000, twice, b'{"1": NaN}'):
        parts.members[RELEASE] = data
        assert RELEASE in refused(tmp_path, parts.pack())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stage": "../../x"}, "stage and stack"),
        ({"ref": "sparkpin/elsewhere:latest"}, "names its image"),
        ({"stack": "other"}, "stack"),
        ({"config": "{}"}, "config digest"),
        ({"config_digest": f"sha256:{'0' * 64}"}, "config digest"),
        ({"key": "0" * 64}, "is of the build key"),
        ({"diff_ids": []}, "diff IDs"),
        ({"platform": "linux/riscv"}, "platform"),
        ({"schema": 2}, "schema"),
    ],
)
def test_a_build_record_that_says_something_else(
    parts: Parts, tmp_path: Path, sample: Sample, change: dict[str, Any], why: str
) -> None:
    for name in [name for name in parts.members if name.startswith(EVIDENCE)]:
        del parts.members[name]  # the statement names the records: an attacker leaves it out
    parts.edit(f"{IMAGES}{sample.release.build_key}.json", lambda value: value | change)
    assert why in refused(tmp_path, parts.pack())


def test_a_lower_stage_with_a_name_outside(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    for name in [name for name in parts.members if name.startswith(EVIDENCE)]:
        del parts.members[name]
    name = f"{IMAGES}{sample.records[0].key}.json"
    parts.edit(
        name, lambda value: value | {"stage": "../../x", "ref": f"sparkpin/stack-cpu:../../x-{value['key'][:12]}"}
    )
    assert "the record of '../../x'" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize("path", ["../../etc/cron.d/x", "/etc/cron.d/x", "tools/../../x", ".git/hooks/x", "a//b"])
def test_a_build_record_with_files_outside(parts: Parts, tmp_path: Path, sample: Sample, path: str) -> None:
    for name in [name for name in parts.members if name.startswith(EVIDENCE)]:
        del parts.members[name]
    name = f"{IMAGES}{sample.release.build_key}.json"
    parts.edit(name, lambda value: value["context"][0].update(path=path))
    assert f"names a file {path!r}" in refused(tmp_path, parts.pack())


def test_build_records_in_a_ring(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    key = sample.release.build_key
    parts.edit(f"{IMAGES}{key}.json", lambda value: value | {"parent_key": key})
    assert "is of the build key" in refused(tmp_path, parts.pack())


def test_evidence_that_is_file_and_folder(parts: Parts, tmp_path: Path) -> None:
    parts.members[f"{EVIDENCE}smoke"] = b"x"
    assert "is a file and a folder" in refused(tmp_path, parts.pack())


def test_a_statement_about_another_image(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    image = sample.release.image.removeprefix("sha256:").encode()
    name = f"{EVIDENCE}provenance.json"
    assert image in parts.members[name]
    parts.members[name] = parts.members[name].replace(image, b"0" * 64)
    assert "statement" in refused(tmp_path, parts.pack())


def test_unsigned_where_a_signature_is_required(good: Path, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with pytest.raises(IntegrityError, match="not signed; the signature of an allowed signer is required"):
        take_in.import_bundle(paths, NO_ENGINE, good, quiet, signed=True)
    assert not list(tmp_path.iterdir())


def test_flags_and_members_agree(parts: Parts, tmp_path: Path) -> None:
    for change in ({"image": False}, {"store": True}, {"checkpoint": True}):
        message = refused(tmp_path, Parts(parts.members, parts.index | change).pack())
        assert "is not what a record asks for" in message or "missing" in message, change


def test_a_file_that_is_there_is_not_overwritten(sample: Sample, tmp_path: Path) -> None:
    before = state_of(sample)
    there = tmp_path / "there.tar"
    there.write_text("x")
    for target, why, step in (
        (there, "is there already", f"rm {there}"),
        (tmp_path, "is a folder", f"-o {tmp_path / sample.release.name}.tar"),
        (tmp_path / "missing/x.tar", "there is no folder", f"mkdir -p {tmp_path / 'missing'}"),
    ):
        with pytest.raises(InputError, match=why) as failed:
            export(sample.paths, lambda: NO_ENGINE, sample.release, target, BundleParts(image=False), quiet)
        assert step in failed.value.next_step
    assert state_of(sample) == before and [path.name for path in tmp_path.iterdir()] == ["there.tar"]


def test_what_every_import_would_refuse_is_not_exported(tmp_path: Path) -> None:
    own, target = sample_of(tmp_path / "own"), tmp_path / "out.tar"

    def refused_export() -> IntegrityError:
        with pytest.raises(IntegrityError) as caught:
            export(own.paths, lambda: NO_ENGINE, own.release, target, BundleParts(image=False), quiet)
        assert [child.name for child in tmp_path.iterdir()] == ["own"]
        return caught.value

    said, bill = own.folder / STATEMENT, own.folder / SBOM
    data = said.read_bytes()
    said.write_bytes(data.replace(b"linux/amd64", b"linux/arm64") if b"linux/amd64" in data else data + b"x")
    found = refused_export()
    assert "statement" in found.message and own.release.tag in found.next_step
    said.unlink()
    assert refused_export().next_step == f"invoke attest {own.release.tag} makes it"
    said.write_bytes(data)
    parts_of_bill = bill.read_bytes()
    bill.unlink()
    assert "SBOM" in refused_export().message
    bill.write_bytes(parts_of_bill)
    listed = layer_file(own.paths, own.release.diff_ids[0])
    packed = listed.read_bytes()
    listed.write_bytes(packed[:-9])
    assert "sparkpin/layers/" in refused_export().message
    listed.write_bytes(packed)
    export(own.paths, lambda: NO_ENGINE, own.release, target, BundleParts(image=False), quiet)


def test_next_steps_name_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = sample_of(tmp_path / "own")
    monkeypatch.setenv("SPARKPIN_HOME", str(own.paths.home))
    monkeypatch.setenv("SPARKPIN_CACHE", str(own.paths.cache))
    target = tmp_path / "out.tar"
    commands_bundle.export(own.release.tag, str(target), store=False, checkpoint=False, image=False)
    assert "next, on the other machine: invoke import out.tar" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # what it says afterwards needs no second engine
        patch.setattr(commands_bundle.transfer, "copy", lambda *args: Sent(1, 0, 1))
        patch.setattr(commands_bundle, "engine_of", lambda paths: NO_ENGINE)
        commands_bundle.copy(own.release.tag, "ssh://host")
    said = capsys.readouterr().out
    name = f"{own.release.name}.tar"
    assert f"invoke export {own.release.tag} --no-image -o {name}, and there: invoke import {name}" in said


def test_whom_this_machine_trusts_stops_no_export(
    tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "allowed_signers").write_text("")
    monkeypatch.setenv(ALLOWED_SIGNERS, str(tmp_path / "allowed_signers"))
    own = sample_of(tmp_path / "own", Keys(signing_key))
    export(own.paths, lambda: NO_ENGINE, own.release, tmp_path / "out.tar", BundleParts(image=False), quiet)
    with pytest.raises(IntegrityError, match="does not allow"), open_bundle(tmp_path / "out.tar"):
        pass


def test_an_export_says_beforehand_what_no_signature_is_over(
    tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's pieces are left out: what is said does not depend on them."""
    monkeypatch.setattr(exporting, "checkpoint_pieces", lambda *args: [])
    for keys, count in ((Keys(), 0), (Keys(signing_key), 1)):
        own, said = sample_of(tmp_path / f"own{count}", keys), list[str]()
        with pytest.raises(IntegrityError):
            wanted = BundleParts(image=False, checkpoint=True)
            export(own.paths, lambda: NO_ENGINE, own.release, tmp_path / "out.tar", wanted, said.append)
        assert sum("no signature is over a finished checkpoint" in line for line in said) == count


@pytest.mark.parametrize(
    ("length", "why"),
    [(0, "it is empty"), (300, "it is cut short after 300 bytes"), (600, "is cut short after 88 of ")],
)
def test_a_bundle_that_is_hardly_there(good: Path, tmp_path: Path, length: int, why: str) -> None:
    assert why in refused(tmp_path, good.read_bytes()[:length])


def test_a_changed_byte_in_what_comes_first(good: Path, tmp_path: Path) -> None:
    data = bytearray(good.read_bytes())
    data[130] ^= 1
    assert "the header of that is damaged" in refused(tmp_path, bytes(data))
    data[130] ^= 1
    place = data.index(b'"sha256": "') + len(b'"sha256": "')
    data[place] = ord("z")
    message = refused(tmp_path, bytes(data))
    assert f"{INDEX} is damaged, or something else wrote it: members.0.sha256: saw 'z" in message
    assert "wanted 64 hexadecimal digits" in message and "pattern" not in message


def test_an_export_with_a_damaged_input_leaves_no_file(tmp_path: Path) -> None:
    own = sample_of(tmp_path / "own")
    target = tmp_path / "out.tar"
    name, digest = next(iter(own.release.inputs.items()))
    path = KeptInputs.of(own.paths).kept.path(digest)
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    with pytest.raises(IntegrityError, match=f"integrity mismatch on {name}"):
        export(own.paths, lambda: NO_ENGINE, own.release, target, BundleParts(image=False), quiet)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"was made from {name}"):
        export(own.paths, lambda: NO_ENGINE, own.release, target, BundleParts(image=False), quiet)
    assert [child.name for child in tmp_path.iterdir()] == ["own"]
    path.write_bytes(data)
    export(own.paths, lambda: NO_ENGINE, own.release, target, BundleParts(image=False), quiet)
    with open_bundle(target) as opened:
        assert not opened.layers
    (row,) = json.loads((own.folder / form.EXPORTS).read_text())
    assert (row["file"], row["with_store"]) == (str(target), False)


BAD_NAMES = [
    (["a", "a/b"], "a is a file and a folder"),
    (["a/b", "a"], "a is a file and a folder"),
    (["x" * 300], "none for a file system"),
    (["/".join(["x" * 100] * 20)], "none for a file system"),
    (["\u00e4" * 150], "none for a file system"),
    (["../x"], "none for a file system"),
    (["sparkpin.json/x"], "sparkpin.json is a file and a folder"),
    (["sparkpin.json"], "names a file twice"),
]


@pytest.mark.parametrize(("names", "why"), BAD_NAMES)
def test_a_checkpoint_with_names_that_no_folder_can_hold(
    parts: Parts, tmp_path: Path, sample: Sample, names: list[str], why: str
) -> None:
    assert why in refused(tmp_path, with_checkpoint(parts, sample, names).pack())


@pytest.mark.parametrize(("names", "why"), BAD_NAMES[:6])
def test_names_that_no_folder_can_hold(names: list[str], why: str) -> None:
    """Project files, files of a context, of a model and of the evidence go the same way."""
    with pytest.raises(form.Refused, match=why):
        form.require_names(names, "it")


def test_project_files_with_names_that_no_folder_can_hold(parts: Parts, tmp_path: Path) -> None:
    other = with_input(parts, "recipes/scripted-tiny.yaml/x", b"x")
    assert "is a file and a folder" in refused(tmp_path, other.pack())
    assert "none for a file system" in refused(tmp_path, with_input(parts, "mods/" + "x" * 300, b"x").pack())


@pytest.mark.parametrize("literal", [r'"\ud800"', "NaN", "Infinity", "-Infinity", "1e999", '"\ud800"'])
def test_values_that_json_has_no_words_for(parts: Parts, tmp_path: Path, sample: Sample, literal: str) -> None:
    """They pass a reader that is not strict, and end the run later, when half of it is done."""
    text = parts.members[RELEASE].decode()
    parts.members[RELEASE] = text.replace('"completion"', literal, 1).encode("utf-8", "surrogatepass")
    assert RELEASE in refused(tmp_path, parts.pack())
    with pytest.raises(form.Refused):
        form.parse_json(f'{{"a": [{literal}]}}'.encode("utf-8", "surrogatepass"), "it")
    assert form.parse_json(rb'["\ud83d\ude00", 1.5]', "it") == ["\U0001f600", 1.5]


def test_build_records_that_readers_do_not_expect(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    name = f"{IMAGES}{sample.release.build_key}.json"
    for what in ("", "wheel", "wheel  "):
        other = Parts(dict(parts.members))
        other.index = parts.index
        other.edit(name, lambda value, what=what: value["context"][0].update(what=what))
        refused(tmp_path, other.pack())


def test_a_refusal_does_nothing_to_a_terminal(parts: Parts, tmp_path: Path) -> None:
    parts.edit(RELEASE, lambda value: value | {"tag": "\x1b]0;owned\x07\x1b[2J" + "x" * 100_000})
    message = refused(tmp_path, parts.pack())
    assert "\x1b" not in message and r"\x1b]0;owned" in message and len(message) < 5000


def test_all_listings_together_have_a_limit(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "ENTRIES", 2)
    assert "the listings have more than 2 entries" in refused(tmp_path, good.read_bytes())


@pytest.mark.parametrize("field", ["recipe", "stage", "stack", "model"])
def test_long_names(sample: Sample, field: str) -> None:
    release = dataclasses.replace(sample.release, **{field: "x" * 101})
    with pytest.raises(form.Refused, match="names have at most 100 characters"):
        form.require_paths(release, sample.records)


def test_names_in_a_build_record(sample: Sample) -> None:
    first, *others = sample.records
    form.require_paths(sample.release, sample.records)
    long = {"stage": "x" * 101, "ref": f"sparkpin/stack-{first.stack}:{'x' * 101}-{first.key[:12]}"}
    with pytest.raises(form.Refused, match="names its image"):
        form.require_paths(sample.release, [first.model_copy(update=long), *others])
    assert first.rootfs
    deb = first.rootfs.debs[0].model_copy(update={"file": "a/b.deb"})
    rootfs = first.rootfs.model_copy(update={"debs": [deb]})
    with pytest.raises(form.Refused, match=r"names a package 'a/b\.deb'"):
        form.require_paths(sample.release, [first.model_copy(update={"rootfs": rootfs}), *others])


def test_recipes_with_a_reserved_name(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    other = without_evidence(parts)
    tag = tag_of("stack-x", sample.release.stage, sample.release.key)
    other.edit(RELEASE, lambda value: value | {"recipe": "stack-x", "tag": tag})
    other.index = other.index | {"tag": tag}
    assert "belong to the images of stages" in refused(tmp_path, other.pack())


def test_padding_after_the_index(good: Path, tmp_path: Path) -> None:
    data, size = bytearray(good.read_bytes()), len(tar_index(good))
    assert size % BLOCK
    data[BLOCK + size] = 1
    assert f"{INDEX} is not in the form" in refused(tmp_path, bytes(data))


def test_a_pipe_or_folder_is_no_bundle(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(InputError, match="no regular file"), open_bundle(path):
            pass
    (tmp_path / "a.tar").touch()
    with pytest.raises(InputError, match="is a folder") as failed, open_bundle(tmp_path):
        pass
    assert "(in it: a.tar)" in failed.value.next_step


def test_layers_without_number(parts: Parts, tmp_path: Path) -> None:
    parts.edit(RELEASE, lambda value: value | {"diff_ids": value["diff_ids"][:1] * 3000})
    assert "names 3,000 layers; 128 are allowed" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize("text", [b"x: " + b"[" * 100_000, b"x: [" + b"a, " * 60_000 + b"a]", b" " * (1 << 19)])
def test_pins_that_no_reader_survives(parts: Parts, tmp_path: Path, sample: Sample, text: bytes) -> None:
    """With so many levels the reader of C ends the process."""
    other = with_input(parts, f"pins/models/{sample.release.model}.yaml", text)
    other.index = other.index | {"store": True}
    message = refused(tmp_path, other.pack())
    assert "50 and 50,000" in message or "262,144 or less" in message


def test_many_names_of_one_large_pin(parts: Parts, tmp_path: Path) -> None:
    """A name costs a sender no bytes, but all pins are read."""
    data = b"x" * manifests.LOCK_LIMIT
    other = with_input(parts, "pins/models/x0.lock", data)
    other.edit(
        RELEASE, lambda value: value["inputs"].update({f"pins/models/x{i}.lock": sha256(data) for i in range(9)})
    )
    assert "1,000 of 33,554,432 are allowed" in refused(tmp_path, other.pack())
    other = with_input(parts, "stages/x0.yaml", b"")
    names = [f"stages/x{i}.yaml" for i in range(1000)]
    other.edit(RELEASE, lambda value: value["inputs"].update(dict.fromkeys(names, sha256(b""))))
    assert "1,000 of 33,554,432 are allowed" in refused(tmp_path, other.pack())


@pytest.mark.parametrize(
    ("name", "limit"),
    [("mods/vllm-cpu/pyproject.toml", manifests.YAML_LIMIT), ("pins/stacks/cpu.lock", manifests.LOCK_LIMIT)],
)
def test_a_pin_is_measured_before_it_is_parsed(
    parts: Parts, tmp_path: Path, name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form.verify, "check_evidence", None)
    message = refused(tmp_path, with_input(parts, name, b" " * (limit + 1)).pack())
    assert f"{name} has {limit + 1:,} bytes, wanted {limit:,} or less" in message


def test_large_inputs_are_read_piece_by_piece(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source file of a mod only the hash matters."""
    pieces: list[int] = []
    read = Slice.read

    def counting(self: Slice, size: int | None = -1) -> bytes:
        data = read(self, size)
        pieces.append(len(data))
        return data

    large = bytes(form.JSON_LIMIT + 1)
    path = tmp_path / "large.tar"
    path.write_bytes(with_input(parts, "mods/vllm-cpu/large.bin", large).pack())
    monkeypatch.setattr(Slice, "read", counting)
    with open_bundle(path) as opened:
        assert f"{INPUTS}{sha256(large)}" in opened.data
        (kept,) = [check for check in opened.checks if check.what == "kept inputs"]
    assert kept.result == "ok" and re.match(r"(\d\d) of \1 hashes agree", kept.detail)
    assert max(pieces) <= files.CHUNK
    assert len(large) < sum(pieces) < 2 * len(large), "read once, to be hashed"


def test_a_full_disk_is_not_the_fault_of_the_bundle(
    good: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "x").write_bytes(bytes((1 << 20) - 4096))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(DiskError, match="No space left"), open_bundle(good):
        pass


def test_pins_whose_aliases_multiply(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    lines = ["a0: &a0 [x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    path.write_text("\n".join(lines))
    with pytest.raises(ManifestError, match="at most 50 and 50,000"):
        manifests.read_yaml(path)
    path.write_text("a: &a {b: c}\nd: *a\n")
    assert manifests.read_yaml(path) == {"a": {"b": "c"}, "d": {"b": "c"}}


def packed_listing(lines: list[bytes], count: int | None = None) -> bytes:
    head = json.dumps({"contents": 1, "entries": len(lines) if count is None else count}, separators=(",", ":"))
    return gzip.compress(b"\n".join([head.encode(), *lines, b""]), 1)


FILE = b'["a","file",420,0,0,0]'


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([FILE] * (listing.ENTRIES + 1), "more than 400,000 entries"),
        ([b'["a","file",0,0,0,0,"","",[' + b"1," * 40_000 + b"1]]"], "of more than 65,536 bytes"),
        ([FILE + b"," + FILE], "more than one entry"),
        ([b'{"path":"a"}'], "it has an entry"),
        ([b'["a","file",0,0,0,0,"","",[1]]'], "it has an entry"),
        ([b'["a","file",0,0,0,true]'], "it has an entry"),
    ],
)
def test_listings_that_take_time_and_memory(lines: list[bytes], why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        listing.parse_contents(packed_listing(lines))


def negative(name: bytes) -> bytes:
    """A header with a size below 0, as base 256 has it."""
    head = bytearray(block(name, b"0", size=0))
    head[124:136] = ((1 << 96) - BLOCK).to_bytes(12, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


RECORD = b'"' + b"x" * 200_000 + b'"\n'
SIZED = b"12 size=abc\n"


@pytest.mark.parametrize(
    "tar",
    [
        b"x" * BLOCK + END,
        block(b"x", b"0", size=1 << 30) + END,
        block(b"x", b"x", size=len(SIZED)) + padded(SIZED) + block(b"a", b"0", size=1) + padded(b"a") + END,
        tar_of({"a/x-1.dist-info/RECORD": RECORD}),
        negative(b"x") + END,
        b"",
    ],
    ids=["no tar", "cut", "size", "record", "negative", "empty"],
)
def test_layers_that_readers_do_not_expect(parts: Parts, tmp_path: Path, sample: Sample, tar: bytes) -> None:
    refused(tmp_path, with_top_layer(parts, sample, tar).pack())


@pytest.mark.parametrize("error", [tarfile.HeaderError, csv.Error, zlib.error, struct.error, EOFError, OverflowError])
def test_errors_that_nobody_foresaw_are_a_refusal(
    good: Path, tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake: whatever gave one of these was mended."""

    def fail(*args: Any) -> Any:
        raise error("unforeseen")

    monkeypatch.setattr(form, "contents_of", fail)
    assert f"it cannot be read ({error.__name__}: unforeseen)" in refused(tmp_path, good.read_bytes())


def test_another_layer_that_is_listed(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    """So that the test above is about the layer."""
    tar = tar_of({"made-up": b"other"})
    path = tmp_path / "other.tar"
    other = with_top_layer(parts, sample, tar)
    entries = listing.contents_of(read_layer(io.BytesIO(tar), everything=True))
    listing.write_contents(tmp_path / "listing", entries)
    other.members[form.listing(digest_of(tar))] = (tmp_path / "listing").read_bytes()
    path.write_bytes(other.pack())
    with open_bundle(path) as opened:
        assert digest_of(tar) in opened.layers


def test_a_listing_of_another_layer(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    """The statement does not name listings, but the layers lie in the same file."""
    name = form.listing(sample.release.diff_ids[0])
    parts.members[name] = packed_listing([FILE])
    assert f"{name} does not list what lies in its layer" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize(
    "change", [{"checks": []}, {"checks": ["mods"]}, {"mods": []}, {"acceptance_floor": 0.1}, {"scripted": False}]
)
def test_demands_are_those_of_the_stages(parts: Parts, tmp_path: Path, change: dict[str, Any]) -> None:
    """No statement names them, but it names the stages and pins that they follow from."""
    parts.edit(RELEASE, lambda value: value["demands"].update(change))
    assert f"{RELEASE}: demands: saw" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize("checks", ["[]", "[mods]", "[chat]", "[sleep, mods]"])
def test_stages_that_prove_nothing(parts: Parts, tmp_path: Path, sample: Sample, checks: str) -> None:
    path = f"stages/{sample.release.stage}.yaml"
    stage = yaml.safe_load(parts.members[INPUTS + sample.release.inputs[path]])
    stage["smoke"]["checks"] = yaml.safe_load(checks)
    other = with_input(parts, path, yaml.safe_dump(stage).encode())
    other.edit(RELEASE, lambda value: value["demands"].update(checks=stage["smoke"]["checks"]))
    assert "smoke.checks" in refused(tmp_path, other.pack())


def test_no_signature_is_over_a_finished_checkpoint(
    tmp_path: Path, signing_key: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f"lead@example {signing_key.with_suffix('.pub').read_text()}")
    monkeypatch.setenv(ALLOWED_SIGNERS, str(allowed))
    signed = sample_of(tmp_path / "signed", Keys(signing_key, allowed))
    plain, finished = write_sample(signed, tmp_path / "plain.tar"), tmp_path / "finished.tar"
    finished.write_bytes(with_checkpoint(Parts.of(plain), signed, ["config.json"]).pack())
    commands_evidence.verify(str(plain), deep=False, require_signature=True)
    commands_evidence.verify(str(finished), deep=False, require_signature=False)
    shown = capsys.readouterr().out
    assert shown.count("not in the statement: which files may be executed, times and sizes, logs") == 2
    assert shown.count("finished checkpoint: 1 files as its own record names them; no statement does") == 1
    assert "ok     checkpoint" not in shown, "only its own record says so"
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    for take in (
        lambda: commands_evidence.verify(str(finished), deep=True, require_signature=True),
        lambda: take_in.import_bundle(paths, NO_ENGINE, finished, quiet, signed=True),
    ):
        with pytest.raises(IntegrityError, match=r"lacks a trusted signature: finished checkpoint") as caught:
            take()
        assert "signature of an allowed signer" not in caught.value.message, "it is signed"
        assert "export --with-store instead" in caught.value.next_step and "again from" not in caught.value.next_step
    assert "--deep adds nothing for a bundle" in capsys.readouterr().err
    assert not paths.home.exists() and not paths.cache.exists()


@pytest.fixture
def full(parts: Parts, sample: Sample) -> Parts:
    """With all that a bundle can hold."""
    return with_checkpoint(with_store(parts, sample), sample, ["config.json", "a/model.safetensors"], b"a checkpoint")


def test_with_store_and_checkpoint(full: Parts, tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "full.tar"
    path.write_bytes(full.pack())
    with open_bundle(path) as opened:
        assert [file.sha256 for file in opened.locked] == sorted([sha256(DEB), sha256(WHEEL)])
        assert [file.sha256 for file in opened.model_files.values()] == [sha256(FILES["fp8"]), sha256(FILES["int4"])]
        assert [file.sha256 for file in opened.model_blobs] == [sha256(HEADER), sha256(TENSOR)]
        places = take_in.cache_files(sample.paths, opened)
        for data in (DEB, WHEEL, HEADER, TENSOR):
            assert places[Store(sample.paths.store).path(sha256(data))] == f"{STORE}{sha256(data)}"
        models = {path for path in places if path.is_relative_to(sample.paths.models)}
        assert [path.name for path in models] == ["config.json"] * 2
        assert set(opened.checkpoint_files) == {"config.json", "a/model.safetensors"}


DONE = b"a checkpoint"
STORED = {f"{STORE}{sha256(data)}": data for data in (DEB, WHEEL, *MODELS)} | {f"{CHECKPOINTS}{sha256(DONE)}": DONE}


@pytest.mark.parametrize("name", STORED)
def test_stored_files_that_are_not_what_the_records_name(full: Parts, tmp_path: Path, name: str) -> None:
    data = bytearray(full.pack())
    data[offset_of(bytes(data), name) + BLOCK] ^= 1
    assert f"{name}: wanted sha256=" in refused(tmp_path, bytes(data)), "a flipped bit"
    flipped = bytes([full.members[name][0] ^ 1]) + full.members[name][1:]
    for other in (flipped, b""):
        changed = Parts({**full.members, name: other}, full.index)
        assert f"{name}: its sha256 is" in refused(tmp_path, changed.pack()), "with an index that fits"


@pytest.mark.parametrize("name", [*STORED, CHECKPOINT])
def test_stored_files_that_are_missing(full: Parts, tmp_path: Path, name: str) -> None:
    del full.members[name]
    assert f"{name} is missing" in refused(tmp_path, full.pack())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"repo": "../x"}, "names a repository ../x@"),
        ({"repo": "a/b/c"}, "names a repository a/b/c@"),
        ({"revision": "main"}, "@main"),
        ({"file": "a" * 201}, "none for a file system"),
        ({"file": ".git/config"}, "none for a file system"),
    ],
)
def test_models_that_no_folder_can_hold(
    full: Parts, tmp_path: Path, sample: Sample, change: dict[str, str], why: str
) -> None:
    path = f"pins/models/{sample.release.model}.lock"
    lock = json.loads(full.members[INPUTS + json.loads(full.members[RELEASE])["inputs"][path]])
    repository = next(iter(lock["repositories"].values()))
    (repository["files"][0] if "file" in change else repository).update(change)
    assert why in refused(tmp_path, with_input(full, path, json.dumps(lock).encode()).pack())


def test_stored_files_that_nothing_names(full: Parts, tmp_path: Path) -> None:
    for name in (f"{STORE}{sha256(b'x')}", f"{CHECKPOINTS}{sha256(b'x')}", f"{STORE}x"):
        other = Parts({**full.members, name: b"x"}, full.index)
        assert f"{name} is not what a record asks for" in refused(tmp_path, other.pack())


@pytest.mark.parametrize("kind", ["wheel", "deb"])
def test_packages_that_the_lock_does_not_name(full: Parts, tmp_path: Path, sample: Sample, kind: str) -> None:
    """Record and member agree; but the release's own lock wants another file."""

    def change(value: Any) -> None:
        row = value["rootfs"]["debs"][0] if kind == "deb" else value["context"][-1]
        del full.members[f"{STORE}{row['sha256']}"]
        full.members[f"{STORE}{sha256(b'evil')}"] = b"evil"
        row.update(sha256=sha256(b"evil"), size=4)

    full.edit(f"{IMAGES}{sample.records[0].key}.json", change)
    message = refused(tmp_path, full.pack())
    assert f"locks: pins/stacks/cpu.lock does not name {kind} made 1.0 {sha256(b'evil')}" in message


@pytest.mark.parametrize(
    "change", [{"key": "0" * 64}, {"model": "other"}, {"files": []}, {"files": {"a": {"size": -1, "sha256": "x"}}}]
)
def test_a_checkpoint_of_something_else(full: Parts, tmp_path: Path, change: dict[str, Any]) -> None:
    full.edit(CHECKPOINT, lambda value: value | change)
    assert CHECKPOINT in refused(tmp_path, full.pack())


def test_sizes_are_those_of_the_records(full: Parts, tmp_path: Path, sample: Sample) -> None:
    full.edit(CHECKPOINT, lambda value: value["files"]["config.json"].update(size=1))
    full.edit(CHECKPOINT, lambda value: value["files"]["a/model.safetensors"].update(size=1))
    assert "wanted 1 bytes, as its record says; it has 12" in refused(tmp_path, full.pack())
