"""Bundles: the same bytes each time, taken whole, and refused whole when anything about them is not right."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import io
import json
import os
import resource
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from bad_values import ENV, HUGE, SECRETS, WORDS
from bundle_samples import (
    DEB,
    FILES,
    HEADER,
    MODELS,
    TENSOR,
    WHEEL,
    Parts,
    members_of,
    offset_of,
    sample_of,
    sha256,
    tar_of,
    with_input,
    with_store,
    with_top_layer,
    without_evidence,
    write_sample,
)
from evidence_samples import Sample
from layer_samples import CAPABILITY, hardlink, layer, member, symlink, tar_header

from sparkpin.build.consistent import IMPORTS, is_brought
from sparkpin.core import files
from sparkpin.core.errors import DiskError, EngineError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.distribute import bundle, layout, transfer, verify
from sparkpin.distribute.bundle import open_bundle
from sparkpin.distribute.engines import images_of, send
from sparkpin.distribute.layout import IMAGES, INPUTS, RELEASE, STORE
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END, Slice
from sparkpin.image.layer_tar import read_layer
from sparkpin.image.oci import digest_of
from sparkpin.pins import reading
from sparkpin.releases.record import Releases

NO_ENGINE = cast(Engine, None)  # whoever asks it anything fails
ZERO = "0" * 64


@pytest.fixture(scope="module")
def good(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(sample, tmp_path_factory.mktemp("bundle") / "good.tar")


@pytest.fixture
def parts(good: Path) -> Parts:
    return Parts.of(good)


@pytest.fixture
def full(parts: Parts, sample: Sample) -> Parts:
    """With its store."""
    return with_store(parts, sample)


STORED = [f"{STORE}{sha256(data)}" for data in (DEB, WHEEL, *MODELS)]


def refused(tmp_path: Path, data: bytes | Parts, *facts: str, signed: bool = False) -> str:
    """Why an import is refused, which must leave no trace. facts: that the message must tell."""
    path = tmp_path / "bad.tar"
    path.write_bytes(data.pack() if isinstance(data, Parts) else data)
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with pytest.raises(IntegrityError) as caught:
        transfer.import_bundle(paths, NO_ENGINE, path, signed=signed)
    assert caught.value.exit_code == 5 and caught.value.next_step
    assert [child.name for child in tmp_path.iterdir()] == ["bad.tar"]
    for fact in facts:
        assert fact in caught.value.message
    return caught.value.message


def test_same_bytes_each_time(sample: Sample, good: Path, parts: Parts, tmp_path: Path) -> None:
    assert write_sample(sample, tmp_path / "again.tar").read_bytes() == good.read_bytes()
    other = write_sample(sample_of(tmp_path / "other"), tmp_path / "other.tar")  # as on another machine
    assert other.read_bytes() == good.read_bytes()
    assert parts.files() == members_of(good.read_bytes())


def test_whole_bundle_is_taken(sample: Sample, good: Path) -> None:
    with open_bundle(good) as opened:
        assert opened.release == sample.release
        assert opened.records == sample.records
        assert list(opened.layers) == list(sample.release.diff_ids)
        assert {"provenance.json", "sbom.cdx.json"} < set(opened.data)
        assert {check.result for check in opened.checks} == {"ok", "open"}


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    unreadable, opened = tmp_path / "unreadable.tar", Path.open
    unreadable.touch()

    def refuse(path: Path, *words: Any) -> Any:
        if path == unreadable:  # root may read everything
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(path, *words)

    monkeypatch.setattr(Path, "open", refuse)
    names = ("none.tar", "fifo", "x" * 300, unreadable.name)
    for path in (*(tmp_path / name for name in names), Path("/dev/null")):
        with pytest.raises(InputError) as failed, open_bundle(path):
            pass
        assert str(path) in failed.value.message


def test_a_folder_with_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").symlink_to("/etc/passwd")
    with pytest.raises(layout.Refused):
        layout.read_folder(tmp_path)


def test_a_folder_of_more_files_than_a_process_can_open(tmp_path: Path) -> None:
    """What a registry gave."""
    for number in range(200):
        (tmp_path / str(number)).write_bytes(b"x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        found = layout.read_folder(tmp_path)
        assert {data.read() for data in found.values()} == {b"x"} and len(found) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# Hostile layouts: each is refused by a check of its own, whose words stand beside it

Change = Callable[[Parts, Sample], Parts | bytes]
BLOB = f"blobs/sha256/{sha256(b'x')}"


def raw(change: Callable[[bytes], bytes]) -> Change:
    """Of the archive's bytes; tests/adversary changes them at random."""
    return lambda parts, sample: change(parts.pack())


def over(new: bytes, skip: int = 0, name: str = oci.INDEX) -> Change:
    """Other bytes in the place of some. skip: so many after the beginning of the header of this member."""

    def change(data: bytes) -> bytes:
        start = offset_of(data, name) + skip
        return data[:start] + new + data[start + len(new) :]

    return raw(change)


def with_file(name: str, data: bytes) -> Change:
    return lambda parts, sample: tar_of(parts.files() | {name: data})


def artifact(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda parts, sample: parts.copy(edit_artifact=change)


def first_row(**changes: Any) -> Change:
    return artifact(lambda value: value["layers"][0].update(changes))


def image(change: Callable[[dict[str, Any]], object]) -> Change:
    return lambda parts, sample: parts.copy(edit_image=change)


def other_blob(parts: Parts, sample: Sample) -> bytes:
    """Bytes of the same size under a digest."""
    name = oci.blob(digest_of(parts.members[RELEASE]))
    return tar_of(parts.files() | {name: parts.members[RELEASE].replace(b"{", b"[", 1)})


def other_time(parts: Parts, sample: Sample) -> bytes:
    """A layer whose file has another time, under its digest: sealed it would be the same."""
    name = oci.blob(sample.release.diff_ids[-1])
    found = parts.files()
    head = bytearray(found[name][:BLOCK])
    head[136:147] = b"%011o" % 1
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return tar_of(found | {name: bytes(head) + found[name][BLOCK:]})


def without_layer(parts: Parts, sample: Sample) -> bytes:
    gone = oci.blob(sample.release.diff_ids[-1])
    return tar_of({name: data for name, data in parts.files().items() if name != gone})


def top(*members: tuple[tarfile.TarInfo, bytes | None]) -> Change:
    """Another topmost layer, in its canonical form, which everything names."""
    return top_tar(b"".join(read_layer(io.BytesIO(layer(members)), everything=True).chunks()))


def top_tar(tar: bytes) -> Change:
    return lambda parts, sample: with_top_layer(parts, sample, tar)


HEADER_FAULT, LAYER_FAULT = "is none that an export writes", "is not the canonical tar of what it holds"
HOSTILE: dict[str, tuple[Change, str]] = {
    # the archive
    "link": (over(tar_header(oci.INDEX, type=b"2", linkname="/etc/passwd")), HEADER_FAULT),
    "size beyond the end": (over(tar_header(oci.INDEX, size=1 << 30)), "cut short"),
    "path above": (with_file("../../../etc/cron.d/x", b"x"), "no file of an OCI layout"),
    "name twice": (raw(lambda d: d[: -len(END)] + tar_of({oci.LAYOUT: oci.LAYOUT_TEXT})), f"has {oci.LAYOUT} twice"),
    "10,000 tiny members": (
        lambda parts, sample: tar_of({f"blobs/sha256/{number:064x}": b"" for number in range(10_000)}),
        f"more than {layout.MEMBERS:,} members",
    ),
    "bytes in the padding": (over(b"\1", BLOCK + len(oci.LAYOUT_TEXT), oci.LAYOUT), "bytes between"),
    "bytes at the end": (raw(lambda d: d[:-1] + b"\1"), "does not end as an archive"),
    "zip bomb": (raw(lambda d: gzip.compress(bytes(1 << 24))), "no tar of an OCI layout"),
    "nothing": (raw(lambda d: b""), "it is no OCI layout"),
    # its manifests
    "layout of another version": (with_file(oci.LAYOUT, b"{}"), f"{oci.LAYOUT} is not the one"),
    **{f"index {text[:12]!r}": (with_file(oci.INDEX, text), oci.INDEX) for text in (b"[" * 100_000, b"{}", b"\xff")},
    "blob that nothing names": (with_file(BLOB, b"x"), f"{BLOB} is missing, or is nothing"),
    "blob of other bytes": (other_blob, f"{RELEASE}: got other bytes"),
    "descriptor of a huge size": (first_row(size=HUGE), "the artifact: layers.0.size"),
    "descriptor that leads elsewhere": (first_row(digest="sha256:../../etc/passwd"), "the artifact: layers.0.digest"),
    "title twice": (artifact(lambda v: v["layers"].append(v["layers"][0])), "a title twice"),
    "title of no kind": (first_row(annotations={layout.TITLE: "x/y"}), "is missing"),
    "another subject": (
        artifact(lambda v: v["subject"].update(digest=f"sha256:{ZERO}")),
        "not the one of this release",
    ),
    "10,000 rows": (artifact(lambda v: v.update(layers=v["layers"][:1] * 10_000)), "at most 8192 items"),
    # its image
    "compressed layers": (
        image(lambda v: v["layers"][0].update(mediaType="application/vnd.oci.image.layer.v1.tar+gzip")),
        "plain layers",
    ),
    "image that lies about a layer's size": (image(lambda v: v["layers"][0].update(size=7)), "says 7 bytes"),
    "a layer less": (image(lambda v: v["layers"].pop()), "the image's manifest"),
    "layer of other bytes in the same canonical form": (other_time, "got other bytes"),
    "layer whose blob is not there": (without_layer, "is missing"),
    # its layers
    "layer with a device": (top(member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)), "is a device"),
    "layer that links out": (top(symlink("a/link", "../../etc/passwd")), "links out of the image"),
    "layer that links out by the root": (top(symlink("link", "/usr/../../etc")), "links out of the image"),
    "layer with a hard link out": (top(hardlink("link", "etc/shadow")), "is a hard link out of the layer"),
    "layer with setuid": (top(member("su", b"x", mode=0o4755)), "has mode 4755"),
    "layer with a capability": (top(member("ping", b"x", pax_headers=CAPABILITY)), "or a capability"),
    "layer with an opaque whiteout": (top(member("a/.wh..wh..opq", b"")), "is a whiteout"),
    "layer with a name twice": (top_tar(tar_of({"a": b"x"})[: -len(END)] + tar_of({"a": b"y"})), LAYER_FAULT),
    "layer with a path above": (top_tar(layer([member("../../etc/x", b"x")])), LAYER_FAULT),
    "layer that is cut": (top_tar(tar_header("x", size=1 << 30) + END), "the layer's tar is damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_layouts(parts: Parts, sample: Sample, tmp_path: Path, case: str) -> None:
    change, why = HOSTILE[case]
    refused(tmp_path, change(parts, sample), why, "refused, and nothing of it was used")


def test_another_layer_in_its_canonical_form_is_taken(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    """So that the trials above are about the layer. A layer may delete a file by its plain whiteout."""
    path = tmp_path / "other.tar"
    change = top(member("a/.wh.gone", b""), member("made-up", b"other"), symlink("link", "/usr/bin"))
    other = cast(Parts, change(parts, sample))
    path.write_bytes(other.pack())
    with open_bundle(path) as opened:
        assert set(opened.layers) == set(other.layers) and opened.listings[list(other.layers)[-1]]


def test_a_layer_that_the_engine_lost_meanwhile(good: Path) -> None:
    with open_bundle(good) as opened, pytest.raises(EngineError):
        send(NO_ENGINE, images_of(opened.release, opened.records), {}, 0)


def test_a_build_that_recorded_the_release_during_the_import_keeps_its_own(good: Path, tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")
    with open_bundle(good) as opened:
        built = dataclasses.replace(opened.release, created="2026-01-01T00:00:00Z")
        assert transfer.merged(paths, opened, built) == built and not is_brought(paths, built)
        with pytest.raises(IntegrityError):
            transfer.merged(paths, opened, dataclasses.replace(built, image=f"sha256:{ZERO}"))
        assert not is_brought(paths, built)
        brought = transfer.merged(paths, opened, None)
        assert brought.state == "built" and is_brought(paths, brought)
        for damaged in ("{", "3", '["damaged"]'):
            (Releases(paths).evidence(brought) / IMPORTS).write_text(damaged)
            with pytest.raises(ManifestError):
                transfer.merged(paths, opened, brought)


def test_all_layers_together_have_a_limit(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "ENTRIES", 2)
    refused(tmp_path, good.read_bytes(), "the layers have more than 2 entries")


# What lies in it


def test_an_input_that_is_not_its_name(parts: Parts, tmp_path: Path) -> None:
    parts.members[next(name for name in parts.members if name.startswith(INPUTS))] = b"something else"
    refused(tmp_path, parts, "is not what its evidence says: kept inputs")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"image": f"sha256:{ZERO}"}, "image"),
        ({"diff_ids": [f"sha256:{ZERO}"] * 3000}, "names 3,000 layers; 128 are allowed"),
        ({"env": {"LD_PRELOAD": "x"}}, "release key"),
        ({"recipe": "../../x"}, "recipe"),
        ({"model": "y" * 101}, "names have at most"),
        ({"tag": "sparkpin/other:base-000000000000"}, "release key"),
        ({"surprise": 1}, "surprise"),
        ({"inputs": {"../../../etc/cron.d/x": ZERO}}, "names a file '../../../etc/cron.d/x'"),
        ({"executable": ["../x"]}, "`executable`"),
        ({"size": HUGE}, "size"),
        ({"argv": ["vllm", "serve", "/model", WORDS["a token of the hub"]]}, "command"),
        ({"env": {"HF_TOKEN": ENV["HF_TOKEN"]}}, "env"),
        ({"inputs": {}}, "statement"),
    ],
)
def test_a_record_that_says_something_else(parts: Parts, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    parts.edit(RELEASE, lambda value: value | change)
    said = refused(tmp_path, parts, why)
    assert not [secret for secret in SECRETS if secret in said]


def test_a_secret_in_a_recipe_that_a_bundle_brings(parts: Parts, tmp_path: Path) -> None:
    text = f"# sk-{'a' * 40}\n".encode()
    refused(tmp_path, with_input(parts, "recipes/scripted-tiny.yaml", text), "a key of OpenAI's")


@pytest.mark.parametrize("data", [b"{}", b"null", b"\xff", b"[" * 10_000, b" " * (layout.JSON_LIMIT + 1)])
def test_release_records_that_are_none(parts: Parts, tmp_path: Path, data: bytes) -> None:
    parts.members[RELEASE] = data
    refused(tmp_path, parts, RELEASE)


@pytest.mark.parametrize("literal", [r'"\ud800"', "NaN", "1e999", '"completion"], "checks": ["completion"'])
def test_values_that_json_has_no_words_for(parts: Parts, tmp_path: Path, literal: str) -> None:
    """They pass a reader that is not strict, and end the run later, when half of it is done."""
    parts.members[RELEASE] = parts.members[RELEASE].replace(b'"completion"', literal.encode(), 1)
    refused(tmp_path, parts, f"{RELEASE}: ")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stage": "../../x"}, "the record of"),
        ({"ref": "sparkpin/elsewhere:latest"}, "the record of"),
        ({"config_digest": f"sha256:{ZERO}"}, "config digest"),
        ({"key": ZERO}, "is of the build key"),
        ({"diff_ids": []}, "configuration of"),
        ({"config": '{"config": {"Env": ["PIP_PASSWORD=x"]}}'}, "env.PIP_PASSWORD"),
        ({"parent_key": "ring"}, "is of the build key"),
        ({"path": "../../etc/cron.d/x"}, "names a file '../../etc/cron.d/x'"),
        ({"what": "wheel  "}, ""),
    ],
)
def test_a_build_record_that_says_something_else(
    parts: Parts, tmp_path: Path, sample: Sample, change: dict[str, Any], why: str
) -> None:
    """The statement names the records: an attacker leaves it out. path, what: of the first file of its context."""
    key, other = sample.release.build_key, without_evidence(parts)
    if {"path", "what"} & set(change):
        other.edit(f"{IMAGES}{key}.json", lambda value: value["context"][0].update(change))
    else:
        change = {"parent_key": key} if "parent_key" in change else change
        other.edit(f"{IMAGES}{key}.json", lambda value: value | change)
    refused(tmp_path, other, why)


def test_unsigned_where_a_signature_is_required(good: Path, tmp_path: Path) -> None:
    refused(tmp_path, good.read_bytes(), "not signed; the signature of an allowed signer is required", signed=True)


def test_recipes_with_a_reserved_name(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    other, tag = without_evidence(parts), tag_of("stack-x", sample.release.stage, sample.release.key)
    other.edit(RELEASE, lambda value: value | {"recipe": "stack-x", "tag": tag})
    other.tag = tag
    refused(tmp_path, other, "belong to the images of stages")


def test_files_that_lie_in_each_other(parts: Parts, tmp_path: Path) -> None:
    refused(tmp_path, with_input(parts, "recipes/scripted-tiny.yaml/x", b"x"), f"{RELEASE}: recipes/")


def test_a_refusal_does_nothing_to_a_terminal(parts: Parts, tmp_path: Path) -> None:
    parts.edit(RELEASE, lambda value: value | {"tag": "\x1b]0;owned\x07\x1b[2J" + "x" * 100_000})
    message = refused(tmp_path, parts, r"\x1b]0;owned")
    assert "\x1b" not in message and len(message) < 5000


def test_demands_are_those_of_the_stages(parts: Parts, tmp_path: Path) -> None:
    """No statement names them, but it names the stages and pins that they follow from."""
    parts.edit(RELEASE, lambda value: value["demands"].update(checks=["mods"]))
    refused(tmp_path, parts, f"{RELEASE}: demands: got")


def test_stages_that_prove_nothing(parts: Parts, tmp_path: Path, sample: Sample) -> None:
    path, checks = f"stages/{sample.release.stage}.yaml", ["mods"]
    stage = yaml.safe_load(parts.members[INPUTS + sample.release.inputs[path]])
    stage["smoke"]["checks"] = checks
    other = with_input(parts, path, yaml.safe_dump(stage).encode())
    other.edit(RELEASE, lambda value: value["demands"].update(checks=checks))
    refused(tmp_path, other, "smoke.checks")


# Names

BAD_NAMES = [["a/b", "a"], ["/".join(["x" * 100] * 20)], ["\u00e4" * 150], ["../x"], ["x", "x"]]


@pytest.mark.parametrize("names", BAD_NAMES)
def test_names_that_no_folder_can_hold(names: list[str]) -> None:
    """Project files, files of a context, of a model, of a checkpoint and of the evidence go the same way."""
    with pytest.raises(layout.Refused):
        bundle.require_names(names, "it")


def test_a_package_s_name_that_becomes_a_path_later(sample: Sample) -> None:
    record, *others = sample.records
    bundle.require_harmless(sample.release, sample.records)
    assert record.rootfs
    deb = record.rootfs.debs[0].model_copy(update={"file": "a/b.deb"})
    other = record.model_copy(update={"rootfs": record.rootfs.model_copy(update={"debs": [deb]})})
    with pytest.raises(layout.Refused):
        bundle.require_harmless(sample.release, [other, *others])


# What takes time or memory

ALIASES = ["a0: &a0 [x, x, x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
LONG = b"x: [" + b"a, " * 60_000 + b"a]"


@pytest.mark.parametrize("text", [LONG, "\n".join(ALIASES).encode()], ids=["nodes", "aliases"])
def test_pins_that_no_reader_survives(parts: Parts, tmp_path: Path, sample: Sample, text: bytes) -> None:
    refused(tmp_path, with_input(parts, f"pins/models/{sample.release.model}.yaml", text), "50 and 50,000")


def test_many_names_of_one_pin(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name costs a sender no bytes, but all pins are read."""
    data = b"x" * 300_000
    other = with_input(parts, "pins/models/x0.lock", data)
    names = [f"pins/models/x{i}.lock" for i in range(9)]
    other.edit(RELEASE, lambda value: value["inputs"].update(dict.fromkeys(names, sha256(data))))
    monkeypatch.setattr(verify, "PINS_LIMIT", 2 << 20)
    refused(tmp_path, other, "too many to be read")
    (tmp_path / "bad.tar").unlink()
    large = with_input(parts, "recipes/x.yaml", b"#" * (3 << 20))
    refused(tmp_path, large, f"{2 << 20:,} are allowed")


def test_a_pin_is_measured_before_it_is_parsed(parts: Parts, tmp_path: Path) -> None:
    name, limit = "pins/stacks/cpu.lock", reading.LOCK_LIMIT
    refused(tmp_path, with_input(parts, name, b" " * (limit + 1)), f"{name} has {limit + 1:,} bytes")


def test_large_inputs_are_read_piece_by_piece(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a source file of a mod only the hash matters."""
    pieces: list[int] = []
    readinto = Slice.readinto
    monkeypatch.setattr(Slice, "readinto", lambda self, view: pieces.append(readinto(self, view)) or pieces[-1])
    large, path = bytes(layout.JSON_LIMIT + 1), tmp_path / "large.tar"
    path.write_bytes(with_input(parts, "mods/vllm-cpu/large.bin", large).pack())
    with open_bundle(path) as opened:
        assert f"{INPUTS}{sha256(large)}" in opened.data
    assert max(pieces) <= files.CHUNK and sum(pieces) > len(large)


def test_a_full_disk_is_not_the_fault_of_the_bundle(
    good: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small_disk / "x").write_bytes(bytes((1 << 20) - 4096))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(DiskError, match="No space left"), open_bundle(good):
        pass


# Store


def test_with_its_store(full: Parts, tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "full.tar"
    path.write_bytes(full.pack())
    with open_bundle(path) as opened:
        places = {part.place(sample.paths): part.title for part in opened.parts}
        for data in (DEB, WHEEL, HEADER, TENSOR):
            assert places[Store(sample.paths.store).path(sha256(data))] == f"{STORE}{sha256(data)}"
        models = [path for path in places if path.is_relative_to(sample.paths.models)]
        assert [path.name for path in models] == ["config.json"] * 2
        assert {places[path] for path in models} == {f"{STORE}{sha256(data)}" for data in FILES.values()}


def test_stored_files_that_are_not_what_the_records_name(full: Parts, tmp_path: Path) -> None:
    """A bit of it is another one, with an index that fits. Without such an index it is a byte as any other."""
    name = STORED[0]
    full.members[name] = bytes([full.members[name][0] ^ 1]) + full.members[name][1:]
    refused(tmp_path, full, "the artifact is not the one")


@pytest.mark.parametrize("start", [RELEASE, IMAGES, INPUTS, *STORED])
def test_a_row_that_is_missing(full: Parts, tmp_path: Path, start: str) -> None:
    """Of each kind the last."""
    name = [name for name in full.members if name.startswith(start)][-1]
    del full.members[name]
    refused(tmp_path, full, "missing")


def test_rows_that_no_record_asks_for(full: Parts, tmp_path: Path) -> None:
    name = f"{STORE}{sha256(b'x')}"
    full.members[name] = b"x"
    refused(tmp_path, full, f"{name} is not what a record asks for")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"repo": "../x"}, "repositories.int4.repo"),
        ({"revision": "main"}, "repositories.int4.revision"),
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
    refused(tmp_path, with_input(full, path, json.dumps(lock).encode()), why)


def test_a_package_that_the_lock_does_not_name(full: Parts, tmp_path: Path, sample: Sample) -> None:
    """Record and member agree; but the release's own lock wants another file."""

    def change(value: Any) -> None:
        row = value["context"][-1]
        del full.members[f"{STORE}{row['sha256']}"]
        full.members[f"{STORE}{sha256(b'evil')}"] = b"evil"
        row.update(sha256=sha256(b"evil"), size=4)

    full.edit(f"{IMAGES}{sample.records[0].key}.json", change)
    refused(tmp_path, full, f"pins/stacks/cpu.lock does not name wheel made 1.0 {sha256(b'evil')}")


def test_a_file_that_changes_after_it_was_verified(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "moving.tar"
    path.write_bytes(good.read_bytes())
    with open_bundle(path) as opened:
        part = next(part for part in opened.parts if opened.data[part.title].size)
        with path.open("r+b") as file:
            file.seek(opened.data[part.title].start)
            file.write(b"\xff")
        with pytest.raises(IntegrityError):
            transfer.keep_file(opened, part, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_two_names_of_one_repository(full: Parts, tmp_path: Path, sample: Sample) -> None:
    path = f"pins/models/{sample.release.model}.lock"
    lock = json.loads(full.members[INPUTS + json.loads(full.members[RELEASE])["inputs"][path]])
    one, other = (lock["repositories"][name] for name in ("int4", "fp8"))
    other.update(repo=one["repo"], revision=one["revision"], files=one["files"])
    del full.members[f"{STORE}{sha256(FILES['fp8'])}"]
    (tmp_path / "full.tar").write_bytes(with_input(full, path, json.dumps(lock).encode()).pack())
    with open_bundle(tmp_path / "full.tar") as opened:
        assert layout.has_store(opened.data)
