"""Bundles: the same bytes each time, taken whole, and refused whole when anything about them is not right."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from bundle_samples import Parts, offset_of, quiet, sample_of, sha256, state_of, tar_of, write_sample
from evidence_samples import Sample

from sparkpin import bundle, contents, importing, oci
from sparkpin.bundle import EVIDENCE, IMAGES, INDEX, INPUTS, LAYERS, RELEASE, STORE, open_bundle
from sparkpin.canonical import BLOCK, END, block
from sparkpin.engine import Engine
from sparkpin.errors import InputError, IntegrityError
from sparkpin.exporting import Wanted, export
from sparkpin.inputs import Inputs
from sparkpin.paths import Paths

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
        importing.import_bundle(paths, NO_ENGINE, path, quiet)
    assert caught.value.exit_code == 5 and caught.value.next_step
    assert [child.name for child in tmp_path.iterdir()] == ["bad.tar"]
    return caught.value.message


def test_same_bytes_each_time(sample: Sample, good: Path, tmp_path: Path) -> None:
    assert write_sample(sample, tmp_path / "again.tar").read_bytes() == good.read_bytes()
    other = write_sample(sample_of(tmp_path / "other"), tmp_path / "other.tar")
    assert Parts.of(other).members.keys() == Parts.of(good).members.keys()


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
    with pytest.raises(InputError, match="No such file"), open_bundle(tmp_path / "none.tar"):
        pass


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
    model = bundle.Index.model_validate(index)
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
    data = tar_of({INDEX: bundle.Index.model_validate(index).text, **parts.members})
    assert "cut short" in refused(tmp_path, data)
    assert "does not begin with" in refused(tmp_path, block(INDEX.encode(), b"0", size=bundle.JSON_LIMIT + 1) + data)


def test_huge_json(parts: Parts, tmp_path: Path) -> None:
    parts.members[RELEASE] += b" " * bundle.JSON_LIMIT
    assert f"{bundle.JSON_LIMIT:,} are allowed" in refused(tmp_path, parts.pack())


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
    assert f"longer than {contents.LIMIT:,} bytes" in refused(tmp_path, parts.pack())


@pytest.mark.parametrize(
    "row", [[1], ["a", "hole", 1, 2, 3, 4], ["a", "file", "rwx", 0, 0, 0], ["a", "file", -1, 0, 0, 0], [[]]]
)
def test_a_listing_of_something_else(parts: Parts, tmp_path: Path, row: list[Any]) -> None:
    name = next(name for name in parts.members if name.startswith(LAYERS))
    text = '{"contents":1,"entries":1}\n' + json.dumps(row, separators=(",", ":")) + "\n"
    parts.members[name] = gzip.compress(text.encode())
    assert name in refused(tmp_path, parts.pack())


def test_a_member_that_is_missing(parts: Parts, tmp_path: Path) -> None:
    for name in list(parts.members):
        if not name.startswith(EVIDENCE):
            less = {other: data for other, data in parts.members.items() if other != name}
            message = refused(tmp_path, Parts(less, parts.index).pack())
            assert "missing" in message or "is not the one of an image" in message, name


def test_a_blob_that_is_not_its_name(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    parts.members[oci.blob(sample.release.diff_ids[1])] = b"something else"
    assert "is not the one of an image with plain layers" in refused(tmp_path, parts.pack())
    again = Parts.of(tmp_path / "bad.tar")
    again.members[oci.blob(sample.release.diff_ids[1])] = b"x" * len(b"base venv")
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
        ({"inputs": {"../../../etc/cron.d/x": "0" * 64}}, "names of project files"),
        ({"inputs": {"/etc/cron.d/x": "0" * 64}}, "names of project files"),
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
        importing.import_bundle(paths, NO_ENGINE, good, quiet, signed=True)
    assert not list(tmp_path.iterdir())


def test_flags_and_members_agree(parts: Parts, tmp_path: Path) -> None:
    for change in ({"image": False}, {"store": True}, {"checkpoint": True}):
        message = refused(tmp_path, Parts(parts.members, parts.index | change).pack())
        assert "is not what a record asks for" in message or "missing" in message, change


def test_a_file_that_is_there_is_not_overwritten(sample: Sample, tmp_path: Path) -> None:
    before = state_of(sample)
    with pytest.raises(InputError, match="is there already"):
        export(sample.paths, lambda: NO_ENGINE, sample.release, tmp_path, Wanted(image=False), quiet)
    assert state_of(sample) == before


def test_an_export_with_a_damaged_input_leaves_no_file(tmp_path: Path) -> None:
    own = sample_of(tmp_path / "own")
    target = tmp_path / "out.tar"
    name, digest = next(iter(own.release.inputs.items()))
    path = Inputs.of(own.paths).kept.path(digest)
    data = path.read_bytes()
    path.write_bytes(b"x" * len(data))
    with pytest.raises(IntegrityError, match=f"integrity mismatch on {name}"):
        export(own.paths, lambda: NO_ENGINE, own.release, target, Wanted(image=False), quiet)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"was made from {name}"):
        export(own.paths, lambda: NO_ENGINE, own.release, target, Wanted(image=False), quiet)
    assert [child.name for child in tmp_path.iterdir()] == ["own"]
    path.write_bytes(data)
    export(own.paths, lambda: NO_ENGINE, own.release, target, Wanted(image=False), quiet)
    with open_bundle(target) as opened:
        assert not opened.layers
    (row,) = json.loads((own.folder / bundle.EXPORTS).read_text())
    assert (row["file"], row["with_store"]) == (str(target), False)
